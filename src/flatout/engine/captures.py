"""What captures a function of the device and replays it: a CUDA graph.

A captured function runs no Python any more. A replay repeats its kernels on the same addresses with
the same plain numbers; random numbers go on. All captures of a training share one pool of memory,
as their replays never read each other's results.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
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

    def forget(self) -> None:
        """Give back what captures hold, once none of them is used any more."""

    def seconds(self, function: Callable[[], object]) -> float:
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
        # `torch.cuda.graph` empties the cache, too, but only after memory would have been read here
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        current = torch.cuda.current_stream(self._device)
        try:
            # Other threads gather batches meanwhile: what they ask for must not end the capture.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                function()
        except BaseException:
            # also of an interrupt: a capture that stays open would break all later work
            self._end_broken_capture()
            raise
        finally:
            # after an error torch leaves the stream of the capture current
            torch.cuda.set_stream(current)
        self.num_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return graph

    def _end_broken_capture(self) -> None:
        """Let allocator and random numbers leave a capture that torch could not end.

        Without it memory that other streams have used is never reused, and dropout fails.
        """
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        # Of any class: what torch has ended itself cannot be ended again.
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(index, self._pool)
        with suppress(Exception):
            generator = torch.cuda.default_generators[index]
            generator.graphsafe_set_state(generator.clone_state())

    def forget(self) -> None:
        # Workspaces of libraries stay in the old pool, so no later capture may share it.
        self._pool = torch.cuda.graph_pool_handle()
        self.num_bytes = 0

    def seconds(self, function: Callable[[], object]) -> float:
        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        function()
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - began


CAPTURES: dict[str, Callable[[torch.device], Capture]] = {"cuda": CudaCapture}
"""What captures on a type of device. A device that is not listed captures nothing."""
