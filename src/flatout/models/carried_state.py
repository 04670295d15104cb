"""Hidden states that go from one batch to the next, where long recordings are cut into chunks.

Row numbers of one recording follow one another. So row n continues row n - 1 of the batch before,
unless row n begins a recording.

    batch before    rows 4 and 7, with their last states
    this batch      rows 5, 8 and 9; row 9 begins a recording
    it begins with  the state of row 4, that of row 7, and zeros

A batch may be computed in pieces to save memory. Its states are joined when the next batch begins.
Nothing here waits for the device.
"""

from __future__ import annotations

from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.data.batches.flat_batch import FlatBatch, on_device
from flatout.models.recurrent import State

StatesOfRows = tuple[NDArray[np.int64], State]  # row numbers, and their states in this order
Mark = tuple[StatesOfRows | None, list[StatesOfRows]]


class SavedState(TypedDict, total=False):
    """What a checkpoint holds; nothing before the first batch."""

    rows: Tensor
    state: list[Tensor]


class CarriedState:
    """The states after the last batch, by row number."""

    def __init__(self) -> None:
        self._before: StatesOfRows | None = None  # after the whole batch before
        self._now: list[StatesOfRows] = []  # after the pieces of this batch
        self._batch: FlatBatch | None = None
        self._is_first: NDArray[np.bool_] = np.empty(0, np.bool_)

    def begin(self, batch: FlatBatch, is_first: NDArray[np.bool_]) -> None:
        """A batch, or a piece of one, is next; `[B]` whether each row begins a recording."""
        if batch.cut_from is None or batch.cut_from[0] == 0:
            self._close()
        self._batch = batch
        self._is_first = is_first

    def take(self, zeros: State) -> State:
        """The states with which the rows of this batch begin; `zeros` where none is continued."""
        assert self._batch is not None
        if self._before is None:
            return zeros
        rows, state = self._before
        wanted_rows = self._batch.rows.numpy() - 1
        order = np.argsort(rows)
        places = np.searchsorted(rows, wanted_rows, sorter=order)
        nearest = order[np.clip(places, 0, len(rows) - 1)]
        continues = (rows[nearest] == wanted_rows) & ~self._is_first
        if not continues.any():
            return zeros
        device = zeros[0].device
        index = on_device(nearest, device)
        is_kept = on_device(continues, device).view(1, -1, 1)
        states = list[Tensor]()
        for part, zero in zip(state, zeros, strict=True):
            own = part.to(device).index_select(1, index)
            states.append(torch.where(is_kept, own, zero))
        return tuple(states)

    def keep(self, state: State) -> None:
        """Note the states after this batch, without their gradient."""
        assert self._batch is not None
        self._now.append((self._batch.rows.numpy(), tuple(part.detach() for part in state)))

    def reset(self) -> None:
        """Forget all states: a new pass over the recordings begins."""
        self._before = None
        self._now = []

    def state_dict(self) -> SavedState:
        self._close()
        if self._before is None:
            return {}
        rows, state = self._before
        return {"rows": torch.from_numpy(rows.copy()), "state": [part.cpu() for part in state]}

    def load_state_dict(self, saved: list[SavedState]) -> None:
        """Take the states of all ranks; together they hold all rows."""
        self.reset()
        self._now = [(rank["rows"].numpy(), tuple(rank["state"])) for rank in saved if rank]
        self._close()

    def mark(self) -> Mark:
        """What `go_back` needs to repeat the step that begins now."""
        return self._before, list(self._now)

    def go_back(self, mark: Mark) -> None:
        self._before = mark[0]
        self._now = list(mark[1])

    def _close(self) -> None:
        """Join the pieces of the last batch: the next one continues them."""
        if not self._now:
            return
        rows, states = zip(*self._now, strict=True)
        joined = tuple(torch.cat(parts, dim=1) for parts in zip(*states, strict=True))
        self._before = (np.concatenate(rows), joined)
        self._now = []
