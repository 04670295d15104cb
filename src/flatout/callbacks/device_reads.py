"""Counts how often a block of code makes the host wait for the device to read a number."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DeviceReads(TorchDispatchMode):
    """Counts the reads of numbers from the device: at each the host waits for all that it has
    enqueued.
    """

    _ASKING: ClassVar = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
    _COPYING: ClassVar = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        comes_over = (
            func in self._COPYING and answer.device.type == "cpu" and args[-1].device.type != "cpu"
        )
        self.count += func in self._ASKING or comes_over
        return answer
