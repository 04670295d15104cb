"""Build a network without memory for its weights, to learn how large it would be.

torch's meta device does it: tensors there have a shape and no numbers. Open this file where a
network that is built there draws numbers, or imports much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DRAWING = (Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_)


@contextmanager
def without_memory() -> Iterator[None]:
    """What is built inside has shapes, and no numbers."""
    with torch.device("meta"), _DrawNothing():
        yield


class _DrawNothing(TorchFunctionMode):
    """Inside it no random numbers are drawn, and lists become tensors on the CPU.

    On the meta device torch would import its compiler for either, in seconds.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        if func in _DRAWING:
            return args[0] if args else keywords["tensor"]
        if func is torch.tensor:
            keywords = {"device": "cpu", **keywords}
        return func(*args, **keywords)
