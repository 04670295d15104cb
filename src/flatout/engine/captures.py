"""What captures a function of the device and replays it: a CUDA graph.

A captured function runs no Python any more. A replay repeats its kernels on the same addresses with
the same plain numbers; random numbers go on. All captures of a training share one pool of memory,
as their replays never read each other's results.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

import torch

GraphUse = StrEnum("GraphUse", "auto on off")  # whether steps are captured


class Replayable(Protocol):
    """A function that was captured."""

    def replay(self) -> None: ...


class Capture(Protocol):
    """Captures functions of one device."""

    @property
    def num_bytes(self) -> int:
        """Memory that the captures hold."""

    def capture(self, function: Callable[[], None]) -> Replayable:
        """Record what a function asks of the device. Its results count from a replay on."""

    def seconds(self, function: Callable[[], None]) -> float:
        """How long a function takes until the device has done its work; waits for the device."""


class CudaCapture:
    """Captures CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self.num_bytes = 0

    def capture(self, function: Callable[[], None]) -> Replayable:
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_reserved(self._device)
        current = torch.cuda.current_stream(self._device)
        try:
            # Other threads gather batches meanwhile: what they ask for must not end the capture.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                function()
        finally:
            # after an error torch leaves the stream of the capture current
            torch.cuda.set_stream(current)
        self.num_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return graph

    def seconds(self, function: Callable[[], None]) -> float:
        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        function()
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - began


CAPTURES: dict[str, Callable[[torch.device], Capture]] = {"cuda": CudaCapture}
"""What captures on a type of device. A device that is not listed captures nothing."""
