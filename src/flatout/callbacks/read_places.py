"""Counts the lines of Python that read a number from a tensor, such as `loss.item()`.

On a GPU the host waits at each until the device has done all that was enqueued. Unlike
`DeviceReads` it sees calls from Python only, so that no operator of a training runs differently.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TORCH = str(Path(torch.__file__).parent)


class ReadPlaces(TorchFunctionMode):
    """Context manager that counts reads in `counts`, by file and line."""

    _READING: ClassVar = {
        Tensor.item,
        Tensor.tolist,
        Tensor.numpy,
        Tensor.cpu,
        Tensor.__bool__,
        Tensor.__float__,
        Tensor.__int__,
        Tensor.__index__,
    }

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in self._READING:
            self.counts[_place_of(sys._getframe(1))] += 1
        return func(*args, **(kwargs or {}))


def _place_of(frame: FrameType | None) -> str:
    """The file and line that called into torch, with the folder of the file: `mypkg/loss.py:41`."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    if frame is None:
        return "torch"
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"
