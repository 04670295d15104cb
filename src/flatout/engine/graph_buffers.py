"""What captured steps ask of their batches: fixed addresses, and a ring for many steps at once.

`data/batches/shapes.py` and `signatures.py` are `Buffers`, `step_ring.py` is a `Ring`. Open this
file where `step_graph.py` needs something else of a batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from torch import Tensor

ShapeT = TypeVar("ShapeT", bound=Hashable)
AnyShapeT = TypeVar("AnyShapeT", bound=Hashable, contravariant=True)
BatchT = TypeVar("BatchT")


class Buffers(Protocol[ShapeT, BatchT]):
    """Brings batches to shapes, each with a buffer at a fixed address."""

    plain_first: int  # batches of a shape that train plainly before its step is captured
    most: int  # shapes that are captured

    def shape_of(self, batch: BatchT) -> ShapeT | str:
        """The shape for a batch, or in words why there is none."""

    def make(self, shape: ShapeT, batch: BatchT) -> BatchT:
        """A buffer of a shape, filled with a batch."""

    def fill(self, buffer: BatchT, batch: BatchT) -> BatchT:
        """Copy a batch into a buffer of its shape, which is returned; nothing waits."""

    def release(self, buffer: BatchT) -> None:
        """Let a buffer forget its batch."""

    def count_tokens(self, shapes: Sequence[ShapeT], batches: Sequence[BatchT]) -> tuple[int, int]:
        """Tokens of some batches, and those that steps of their shapes compute."""


class Ring(Protocol[AnyShapeT, BatchT]):
    """Where captured steps read their batches and numbers by a counter of their own."""

    def means(self) -> list[Tensor]:
        """The running mean of the weights, which each step moves."""

    def begin(self, buffer: BatchT) -> None:
        """Prepare for a step on a buffer, by a replay or to try one."""

    def follow(self) -> None:
        """Move the running mean after the update of a step."""

    def capturing(self, buffer: BatchT) -> AbstractContextManager[BatchT]:
        """Context manager for the capture of a step; yields its batch."""

    def keep(self, loss: Tensor, norm: Tensor) -> None:
        """Write what a captured step has computed, and count on."""

    def put(self, buffer: BatchT) -> None:
        """Let the next captured step read a buffer."""

    def put_all(
        self, batches: Sequence[BatchT], shapes: Sequence[AnyShapeT], rates: Sequence[list[float]]
    ) -> None:
        """Let the next captured steps read these batches, with the rates of each step."""

    def take(self, count: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Losses and norms of the latest steps, from the first place on."""
