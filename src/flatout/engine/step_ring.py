"""What captured steps read and leave by a counter on the device, so that many follow each other.

Between two captured steps the host would have to copy a batch, learning rates and the share of a
running mean, and to read a loss. Instead it fills a block and a table for up to `PLACES` steps at
once. Each captured step reads the rows of its place, writes its loss and norm, and counts on:

    place   batch         numbers: rates, share of the mean, rows of the step   results: loss, norm
    0       block row 0   0.0100  0.0099  0.5  32                               2.31  0.8
    1       block row 1   0.0099  0.0098  0.6  32                               2.29  0.7

A step that is taken alone is one at the first place. `stretch.py` decides how many are taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from flatout.data.batches.flat_batch import FlatBatch, on_device
from flatout.data.batches.ring import BatchRing
from flatout.engine.stretch import PLACES

if TYPE_CHECKING:
    from flatout.data.batches.shapes import Shape, Shapes
    from flatout.engine.step import Step
    from flatout.engine.weight_average import WeightAverage


class _AveragedTask(Protocol):
    average: WeightAverage | None


class StepRing:
    """Batches, numbers and results of the coming steps of one training."""

    def __init__(self, step: Step, shapes: Shapes) -> None:
        assert step.rates is not None
        self._step = step
        self._shapes = shapes
        self._rates = step.rates
        self._batches: BatchRing | None = None
        device = step.module.device
        self._numbers = self._make_table()
        self._results = torch.zeros(PLACES, 2, device=device)
        self._average = cast("_AveragedTask", step.module).average
        self._share = torch.zeros((), device=device)  # of the step that is taken now
        if self._average is not None:
            self._average.share = self._share

    def means(self) -> list[Tensor]:
        """The running mean of the weights, which each step moves; empty where there is none."""
        return [] if self._average is None else self._average.means()

    def tensors(self) -> list[Tensor]:
        """All that captured steps read of this."""
        own = [self._numbers, self._results]
        return own if self._batches is None else [*own, *self._batches.tensors()]

    def _make_table(self) -> Tensor:
        """A row of numbers for each place: the rate of each group, the mean's share, the rows."""
        columns = len(self._step.optimizer.param_groups) + 2
        return torch.zeros(PLACES, columns, device=self._step.module.device)

    # Around a step that is captured, or tried before.

    def begin(self, buffer: FlatBatch) -> None:
        """Prepare for a step on a buffer: make what is missing, and note the mean's share."""
        if self._batches is None:
            self._batches = BatchRing(self._shapes, PLACES, buffer)
        if self._numbers.shape[1] != len(self._step.optimizer.param_groups) + 2:
            # A callback has added a group, as those do that thaw layers: no captured step of before
            # is replayed any more.
            self._numbers = self._make_table()
        if self._average is not None:
            self._share.fill_(self._average.share_at(self._step.side.trainer.global_step))

    def follow(self) -> None:
        """Move the running mean after the update of a step."""
        if self._average is not None:
            self._average.add_share(self._share)

    @contextmanager
    def capturing(self, buffer: FlatBatch) -> Iterator[FlatBatch]:
        """Context manager for the capture of a step in the shape of a buffer; yields its batch."""
        assert self._batches is not None
        share = self._share
        row = self._numbers.index_select(0, self._batches.place)[0].unbind()
        self._rates.of_place = row[:-2]
        self._share = row[-2]
        try:
            yield self._batches.read(buffer, row[-1])
        finally:
            self._rates.of_place = None
            self._share = share

    def keep(self, loss: Tensor, norm: Tensor) -> None:
        """Write what a captured step has computed, and count on; called within the capture."""
        assert self._batches is not None
        results = torch.stack([loss.detach().float(), norm.float()])
        self._results.index_copy_(0, self._batches.place, results[None])
        self._batches.place.add_(1)

    # Around replays.

    def put(self, buffer: FlatBatch) -> None:
        """Let the next captured step read a buffer, with the rates and the share of now."""
        assert self._batches is not None
        assert isinstance(buffer.step_rows, Tensor)
        numbers = [*self._rates.now(), self._share, buffer.step_rows]
        torch.stack(numbers, out=self._numbers[0])
        self._batches.put(buffer)
        self._batches.place.zero_()

    def put_all(
        self, batches: Sequence[FlatBatch], shapes: Sequence[Shape], rates: Sequence[list[float]]
    ) -> None:
        """Let the next captured steps read these batches, with the rates of each step."""
        assert self._batches is not None
        shares = self._shares(len(batches))
        columns = zip(rates, shares, batches, strict=True)
        rows = [[*of_groups, share, batch.step_rows] for of_groups, share, batch in columns]
        numbers = torch.tensor(rows, dtype=torch.float32)
        self._numbers[: len(rows)].copy_(on_device(numbers, self._numbers.device))
        self._batches.put_all(batches, shapes)
        self._batches.place.zero_()

    def _shares(self, count: int) -> list[float]:
        """The share of the weights in their running mean, in the coming steps."""
        if self._average is None:
            return [0.0] * count
        first = self._step.side.trainer.global_step
        return [self._average.share_at(step) for step in range(first, first + count)]

    def take(self, count: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Losses and norms of so many steps; copies, as later steps write to the same places."""
        losses, norms = self._results[:count].T.clone().unbind()
        return losses.unbind(), norms.unbind()
