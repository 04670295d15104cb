"""Hidden states that go from one batch to the next: those of the rows that continue rows of the batch before.

Row numbers of one recording follow one another, so row n continues row n - 1 unless it begins a recording. Which rows
do is known on the host; the device gathers states by index and never waits. A batch may come in pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from flatout.models.two_streams import State

if TYPE_CHECKING:
    from flatout.data.batches.flat_batch import FlatBatch


class CarriedState:
    """The states after the last batch, by row number."""

    def __init__(self) -> None:
        self._before: tuple[NDArray[np.int64], State] | None = None
        self._now: list[tuple[NDArray[np.int64], State]] = []
        self._batch: FlatBatch | None = None
        self._is_first: NDArray[np.bool_] = np.empty(0, np.bool_)

    def begin(self, batch: FlatBatch, is_first: NDArray[np.bool_]) -> None:
        """A batch, or a piece of one, is next; `[B]` whether each row begins a recording."""
        if batch.cut_from is None or batch.cut_from[0] == 0:
            self._close()
        self._batch, self._is_first = batch, is_first

    def take(self, zeros: State) -> State:
        """The states with which the rows of this batch begin."""
        assert self._batch is not None
        if self._before is None:
            return zeros
        rows, state = self._before
        wanted = self._batch.rows.numpy() - 1
        order = np.argsort(rows)
        place = np.clip(np.searchsorted(rows, wanted, sorter=order), 0, len(rows) - 1)
        found = order[place]
        continues = (rows[found] == wanted) & ~self._is_first
        if not continues.any():
            return zeros
        device = zeros[0].device
        index, is_kept = torch.from_numpy(found), torch.from_numpy(continues).view(1, -1, 1)
        if device.type != "cpu":  # from page-locked memory: nothing waits for what the device has yet to do
            index, is_kept = (each.pin_memory().to(device, non_blocking=True) for each in (index, is_kept))
        kept = (part.to(device).index_select(1, index) for part in state)
        return tuple(torch.where(is_kept, part, zero) for part, zero in zip(kept, zeros, strict=True))

    def keep(self, state: State) -> None:
        """The states after this batch, cut from its gradient."""
        assert self._batch is not None
        self._now.append((self._batch.rows.numpy(), tuple(part.detach() for part in state)))

    def reset(self) -> None:
        """Forget everything: a pass over the recordings begins."""
        self._before, self._now = None, []

    def state_dict(self) -> dict[str, Any]:
        """For an exact checkpoint: the states after the last batch."""
        self._close()
        if self._before is None:
            return {}
        rows, state = self._before
        return {"rows": torch.from_numpy(rows.copy()), "state": [part.cpu() for part in state]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.reset()
        if saved:
            self._before = saved["rows"].numpy(), tuple(saved["state"])

    def mark(self) -> Any:
        """Where a step begins, for `go_back` when it is repeated."""
        return self._before, list(self._now)

    def go_back(self, mark: Any) -> None:
        self._before, self._now = mark[0], list(mark[1])

    def _close(self) -> None:
        """The pieces of the last batch are whole: they are what the next one continues."""
        if self._now:
            rows = np.concatenate([each[0] for each in self._now])
            states = [each[1] for each in self._now]
            self._before = rows, tuple(torch.cat(parts, dim=1) for parts in zip(*states, strict=True))
            self._now = []
