"""Counts how often a block of code makes the host wait for the device to read a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DeviceReads(TorchDispatchMode):
    """Context manager that counts reads of numbers from the device in `count`.

    At each read the host waits until the device has done all that was enqueued. On a CPU the same
    operators are counted, though nothing waits: the code would wait on a GPU.
    """

    # `.item()`, and operators whose result has a size that only the device knows
    _READING: ClassVar = {
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
    }
    # `.cpu()` and `.to("cpu")`: reads if the source is on another device
    _COPYING: ClassVar = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        answer = func(*args, **(kwargs or {}))
        copies_to_host = (
            func in self._COPYING and answer.device.type == "cpu" and args[-1].device.type != "cpu"
        )
        self.count += func in self._READING or copies_to_host
        return answer
