"""A plan for rows that continue each other: chunks of recordings, in lanes whose hidden state is carried on.

A lane is a place in the batch. Each recording is dealt to a lane, the longest first to the lane with the fewest chunks,
and a lane's recordings follow one another in random order. The n-th batch holds the n-th chunk of each lane. Loads do
not depend on the order in which recordings are dealt, so every epoch has as many batches, on every rank. Like `Plan`,
it is a pure function of lengths, settings and epoch.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flatout.data.batches.batch_rows import BatchRows, Rows

if TYPE_CHECKING:
    from flatout.data.batches.plan import PlanSettings


class StreamPlan:
    """One epoch of one rank; `recordings` is the number of each row's recording, equal ones side by side."""

    def __init__(
        self, lengths: NDArray[np.integer], recordings: NDArray[np.integer], settings: PlanSettings, epoch: int = 0
    ) -> None:
        self.settings, self.lengths = settings, lengths
        firsts = np.flatnonzero(np.append(True, recordings[1:] != recordings[:-1])) if len(recordings) else np.empty(0)
        counts = np.diff(np.append(firsts, len(recordings))).astype(np.int64)
        key = [settings.seed & (2**64 - 1), 0 if settings.repeats else epoch]
        random = np.random.Generator(np.random.Philox(key=key))
        drawn = random.permutation(len(counts)) if settings.shuffle else np.arange(len(counts))
        firsts, counts = firsts[drawn].astype(np.int64), counts[drawn]
        lane = _deal(counts, settings.rows_per_batch * settings.world)
        slot = _begin(counts, lane)
        within = np.arange(len(recordings)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows, slots, lanes = (np.repeat(each, counts) for each in (firsts, slot, lane))
        rows, slots = rows + within, slots + within
        order = np.lexsort((lanes, lengths[rows], slots)) if len(rows) else np.empty(0, np.int64)
        self.order, self._rank = rows[order], lanes[order] % settings.world
        num_slots = int(slots.max()) + 1 if len(slots) else 0
        self.num_steps = -(-num_slots // settings.accumulate)
        self._slots = np.searchsorted(slots[order], np.arange(self.num_batches + 1))
        self.bounds = self._slots[:: settings.accumulate]
        """Where each optimizer step begins in `order`."""

    @property
    def num_batches(self) -> int:
        return self.num_steps * self.settings.accumulate

    def batches(self, start: int, stop: int) -> BatchRows:
        """Batches `start` to `stop` of this rank; one without a row of its own has a filler that does not count."""
        accumulate = self.settings.accumulate
        found: list[Rows] = []
        real = np.zeros(stop - start, np.int64)
        for place, number in enumerate(range(start, stop)):
            whole = slice(self._slots[number], self._slots[number + 1])
            mine = self.order[whole][self._rank[whole] == self.settings.rank]
            real[place] = len(mine)
            found.append(mine if len(mine) else self.order[:1])
        step_rows = np.diff(self.bounds)[np.arange(start, stop) // accumulate]
        counts = np.maximum(real, 1)
        return BatchRows(
            rows=np.concatenate(found) if found else np.empty(0, np.int64),
            bounds=np.append(0, np.cumsum(counts)),
            num_real=real,
            step_rows=step_rows,
            ends_step=(np.arange(start, stop) + 1) % accumulate == 0,
        )


def _deal(counts: Rows, lanes: int) -> Rows:
    """The lane of each recording: the longest first, to the lane with the fewest chunks."""
    loads = [(0, lane) for lane in range(lanes)]
    lane_of = np.zeros(len(counts), np.int64)
    for number in np.argsort(-counts, kind="stable").tolist():
        load, lane = loads[0]
        lane_of[number] = lane
        heapq.heapreplace(loads, (load + int(counts[number]), lane))
    return lane_of


def _begin(counts: Rows, lane: Rows) -> Rows:
    """The batch in which each recording begins: after those before it in its lane."""
    by_lane = np.argsort(lane, kind="stable")
    sorted_counts, sorted_lane = counts[by_lane], lane[by_lane]
    before = np.cumsum(sorted_counts) - sorted_counts
    first = np.searchsorted(sorted_lane, sorted_lane)
    begin = np.empty(len(counts), np.int64)
    begin[by_lane] = before - before[first]
    return begin
