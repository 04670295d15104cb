"""The plan of more rows than are held in order at once: by windows, each planned as a whole epoch
is.

The rows of the source are cut into runs of a million. An epoch permutes the runs, lays them one
after the other and cuts them into windows of whole optimizer steps; inside a window rows are
ordered as ever. So a plan takes the memory of one window however many rows there are, and a row
meets those of its window's runs: sixteen million others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flatout.data.batches.plan import BatchRows, Plan, PlanSettings, Rows, stream

WINDOW_ROWS = 1 << 24
RUN_ROWS = 1 << 20
_SAMPLED = 512
_UNEVEN = 0.6


def is_large(num_rows: int, settings: PlanSettings) -> bool:
    """Whether rows are planned by windows.

    Not under a token cap: its steps are counted from the tokens of all rows.
    """
    return settings.shuffle and settings.tokens_per_batch is None and num_rows > WINDOW_ROWS


class LargePlan(Plan):
    """One epoch of one rank, as `Plan`; the last window that was read is kept."""

    def __init__(
        self, lengths: NDArray[np.integer], settings: PlanSettings, epoch: int = 0
    ) -> None:
        self.settings = settings
        self.lengths = lengths
        self.epoch = 0 if settings.repeats else epoch
        self._step_rows = settings.rows_per_batch * settings.parts
        self._window_steps = max(1, WINDOW_ROWS // self._step_rows)
        # The order of runs is drawn from a stream that no window's own order has.
        self._runs = stream(settings.seed, (1 << 63) + self.epoch).permutation(
            -(-len(lengths) // RUN_ROWS)
        )
        self._ends = np.cumsum(np.minimum(RUN_ROWS, len(lengths) - self._runs * RUN_ROWS))
        self._number = -1
        self._window = (np.empty(0, np.int64), Plan(lengths[:0], settings))

    @property
    def num_steps(self) -> int:
        return -(-len(self.lengths) // self._step_rows)

    def rows_of_step(self, step: int) -> Rows:
        number, place = divmod(step, self._window_steps)
        rows, plan = self._planned(number)
        return rows[plan.rows_of_step(place)]

    def batches(self, start: int, stop: int) -> BatchRows:
        length = self._window_steps * self.settings.accumulate
        found = []
        for number in range(start // length, -(-stop // length)):
            rows, plan = self._planned(number)
            part = plan.batches(
                max(0, start - number * length), min(length, stop - number * length)
            )
            part.rows = rows[part.rows]
            found.append(part)
        names = ("rows", "num_real", "step_rows", "ends_step")
        joined = {name: np.concatenate([getattr(part, name) for part in found]) for name in names}
        sizes = np.concatenate([np.diff(part.bounds) for part in found])
        return BatchRows(**joined, bounds=np.append(0, np.cumsum(sizes)))

    def _planned(self, number: int) -> tuple[Rows, Plan]:
        """The rows of a window, in the order of the source within each run, and the plan of their
        places.
        """
        if number != self._number:
            # the memory of the one before it goes first
            self._window = (np.empty(0, np.int64), self._window[1])
            rows = self._rows(number * self._window_steps * self._step_rows)
            plan = Plan(self.lengths[rows], self.settings, self.epoch, window=number)
            self._number = number
            self._window = (rows, plan)
        return self._window

    def _rows(self, begin: int) -> Rows:
        end = min(begin + self._window_steps * self._step_rows, len(self.lengths))
        first, last = np.searchsorted(self._ends, [begin, end - 1], side="right")
        found = []
        for place in range(first, last + 1):
            before = int(self._ends[place - 1]) if place else 0
            run = int(self._runs[place]) * RUN_ROWS - before
            found.append(
                np.arange(run + max(begin, before), run + min(end, int(self._ends[place])))
            )
        return np.concatenate(found)


def is_sorted_by(classes: NDArray[np.integer]) -> bool:
    """Whether runs differ in their classes, and so windows would: by some hundred rows of up to 64
    runs.
    """
    starts = np.unique(np.linspace(0, len(classes) - 1, 64).astype(np.int64) // RUN_ROWS) * RUN_ROWS
    width = min(RUN_ROWS, len(classes))
    places = np.linspace(0, width - 1, min(_SAMPLED, width)).astype(np.int64)
    found = [classes[np.minimum(start + places, len(classes) - 1)] for start in starts]
    shares = np.stack(
        [np.bincount(each, minlength=int(np.max(found)) + 1) / len(each) for each in found]
    )
    usual = shares.mean(axis=0)
    distance = np.abs(shares - usual).sum(axis=1).mean() / 2
    return bool(distance > _UNEVEN * (1 - (usual**2).sum()))
