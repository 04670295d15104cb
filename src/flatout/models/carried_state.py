"""Hidden states that go from one batch to the next, where long recordings are cut into chunks.

Row numbers of one recording follow one another. So row n continues row n - 1 of the batch before,
unless row n begins a recording.

    batch before    rows 4 and 7, with their last states
    this batch      rows 5, 8 and 9; row 9 begins a recording
    it begins with  the state of row 4, that of row 7, and zeros

A batch may be computed in pieces to save memory. Its states are kept once all pieces are through.
Row numbers and states lie on the device, at the same place in all steps, so captured steps find
them there. Nothing here waits for the device.

Shapes: B rows of a batch, S states that are kept.
"""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from flatout.data.batches.flat_batch import FlatBatch
from flatout.models.recurrent import State

_NOTHING = -1  # in place of a row's number: zeros follow it


class StatesOfRows(NamedTuple):
    """Row numbers `[S]`, and their states in this order."""

    rows: Tensor
    state: State

    def clone(self) -> StatesOfRows:
        return StatesOfRows(self.rows.clone(), tuple(part.clone() for part in self.state))

    def to(self, device: torch.device) -> StatesOfRows:
        return StatesOfRows(self.rows.to(device), tuple(part.to(device) for part in self.state))


Mark = tuple[StatesOfRows | None, list[StatesOfRows]]


class SavedState(TypedDict, total=False):
    """What a checkpoint holds; nothing before the first batch."""

    rows: Tensor
    state: list[Tensor]


class CarriedState:
    """The states after the last batch, by row number."""

    def __init__(self) -> None:
        # After the whole batch before. The first is of no row, and zeros: rows begin with it where
        # they continue none.
        self._kept: StatesOfRows | None = None
        self._pieces: list[StatesOfRows] = []  # of this batch
        self._batch: FlatBatch | None = None
        self._rows_B = torch.empty(0)
        self._continued_B = torch.empty(0)

    def begin(self, batch: FlatBatch, rows_B: Tensor, continued_B: Tensor) -> None:
        """Begin a batch, or a piece of one.

        Given are the numbers of its rows on the device, and of those that they continue: -2 where
        a row begins a recording.
        """
        if batch.cut_from is None or batch.cut_from[0] == 0:
            self._pieces.clear()
        self._batch = batch
        self._rows_B = rows_B
        self._continued_B = continued_B

    def take(self, zeros: State) -> State:
        """The states with which the rows of this batch begin; `zeros` where none is continued."""
        if self._kept is None:
            return zeros
        if self._kept.rows.device != zeros[0].device:
            self._kept = self._kept.to(zeros[0].device)
        # The first of the largest: 0, where no row is continued.
        is_continued_BS = self._kept.rows == self._continued_B.unsqueeze(1)
        places_B = is_continued_BS.byte().argmax(1)
        return tuple(part.index_select(1, places_B) for part in self._kept.state)

    def keep(self, state: State) -> None:
        """Note the states after this batch, without their gradient."""
        assert self._batch is not None
        states = StatesOfRows(self._rows_B, tuple(part.detach() for part in state))
        cut_from = self._batch.cut_from
        if cut_from is not None:
            self._pieces.append(states)
            before, whole = cut_from
            if before + self._batch.num_real < whole:
                return
            states = _join(self._pieces)
            self._pieces.clear()
        self._write(states)

    def reset(self) -> None:
        """Forget all states: a new pass over the recordings begins."""
        self._pieces.clear()
        if self._kept is not None:
            self._kept.rows.fill_(_NOTHING)

    def tensors(self) -> list[Tensor]:
        """All that a batch changes in place."""
        return [] if self._kept is None else [self._kept.rows, *self._kept.state]

    def state_dict(self) -> SavedState:
        if self._kept is None:
            return {}
        rows_S = self._kept.rows.cpu()
        is_row_S = rows_S != _NOTHING
        return {
            "rows": rows_S[is_row_S],
            "state": [part.cpu()[:, is_row_S] for part in self._kept.state],
        }

    def load_state_dict(self, saved: list[SavedState]) -> None:
        """Take the states of all ranks; together they hold all rows."""
        self._kept = None
        self._pieces.clear()
        states = [StatesOfRows(rank["rows"], tuple(rank["state"])) for rank in saved if rank]
        if states:
            self._write(_join(states))

    def mark(self) -> Mark:
        """What `go_back` needs to repeat the step that begins now."""
        return None if self._kept is None else self._kept.clone(), list(self._pieces)

    def go_back(self, mark: Mark) -> None:
        kept, pieces = mark
        self._kept = None if kept is None else kept.clone()
        self._pieces = list(pieces)

    def _write(self, states: StatesOfRows) -> None:
        """Keep these states instead of the last ones, at the same place in memory if they fit."""
        count = len(states.rows)
        if self._kept is None or len(self._kept.rows) <= count:
            self._kept = _make_room(states)
        self._kept.rows[1 : 1 + count] = states.rows
        self._kept.rows[1 + count :] = _NOTHING
        for kept, part in zip(self._kept.state, states.state, strict=True):
            kept[:, 1 : 1 + count] = part


def _make_room(states: StatesOfRows) -> StatesOfRows:
    """Zeros for so many states, and in front those with which new recordings begin."""
    # A validation may be the first to need them; what inference mode makes nothing else may change.
    with torch.inference_mode(False):
        rows_S = states.rows.new_full((1 + len(states.rows),), _NOTHING)
        parts = list[Tensor]()
        for part in states.state:
            layers, count, width = part.shape
            # in 32 bits, as those of a later batch may be
            parts.append(part.new_zeros(layers, 1 + count, width, dtype=torch.float32))
    return StatesOfRows(rows_S, tuple(parts))


def _join(states: list[StatesOfRows]) -> StatesOfRows:
    """The states of all rows, one after the other."""
    parts = zip(*(each.state for each in states), strict=True)
    rows_S = torch.cat([each.rows for each in states])
    return StatesOfRows(rows_S, tuple(torch.cat(part, dim=1) for part in parts))
