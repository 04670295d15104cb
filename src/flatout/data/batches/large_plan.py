"""The plan of more rows than are ordered at once: window by window, each planned like an epoch.

The rows of the source are cut into runs of a million. An epoch permutes the runs, lays them one
after the other and cuts them into windows of whole optimizer steps. Inside a window rows are
ordered as in any plan. So a plan takes the memory of one window however many rows there are, and a
row is shuffled with the sixteen million others of its window. Open this file to change how very
large sources are shuffled.

With runs of 4 rows and windows of 6, 12 rows go like this:

    runs           0 1 2 3 | 4 5 6 7 | 8 9 10 11
    permuted       8 9 10 11 | 0 1 2 3 | 4 5 6 7

    windows        8 9 10 11 0 1 || 2 3 4 5 6 7
    each shuffled  10 0 8 1 11 9 || 5 2 7 3 6 4
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flatout.data.batches.plan import BatchRows, Plan, PlanSettings, Rows, generator_of
from flatout.data.ragged import row_bounds

WINDOW_ROWS = 1 << 24  # rows that are shuffled together; their order takes 128 MB
RUN_ROWS = 1 << 20  # neighbouring rows that come into one window together
_RUNS_SAMPLED = 64
_ROWS_SAMPLED = 512  # of a run: enough to see its classes
_UNEVEN = 0.6  # of the distance that runs of one class each would have; a guess


def is_large(num_rows: int, settings: PlanSettings) -> bool:
    """Whether rows are planned by windows.

    Not under a token cap: its steps are counted from the tokens of all rows.
    """
    return settings.shuffle and settings.tokens_per_batch is None and num_rows > WINDOW_ROWS


class LargePlan(Plan):
    """One epoch of one rank, as `Plan`; the last window that was read stays in memory."""

    def __init__(
        self, lengths: NDArray[np.integer], settings: PlanSettings, epoch: int = 0
    ) -> None:
        self.settings = settings
        self.lengths = lengths
        self.epoch = 0 if settings.repeats else epoch
        self._step_rows = settings.rows_per_batch * settings.parts
        self._window_steps = max(1, WINDOW_ROWS // self._step_rows)
        # The order of runs is drawn from a stream that no window's own order has.
        num_runs = -(-len(lengths) // RUN_ROWS)
        self._runs = generator_of(settings.seed, (1 << 63) + self.epoch).permutation(num_runs)
        # Where each run ends in the permuted order; the last run of the source may be short.
        self._run_ends = np.cumsum(np.minimum(RUN_ROWS, len(lengths) - self._runs * RUN_ROWS))
        self._window = -1  # the number of the window that is in memory
        self._window_rows = np.empty(0, np.int64)
        self._window_plan = Plan(lengths[:0], settings)

    @property
    def num_steps(self) -> int:
        return -(-len(self.lengths) // self._step_rows)

    def rows_of_step(self, step: int) -> Rows:
        window, step_of_window = divmod(step, self._window_steps)
        self._plan_window(window)
        return self._window_rows[self._window_plan.rows_of_step(step_of_window)]

    def batches(self, start: int, stop: int) -> BatchRows:
        window_batches = self._window_steps * self.settings.accumulate
        parts = []
        for window in range(start // window_batches, -(-stop // window_batches)):
            self._plan_window(window)
            before = window * window_batches
            part = self._window_plan.batches(
                max(0, start - before), min(window_batches, stop - before)
            )
            part.rows = self._window_rows[part.rows]
            parts.append(part)
        sizes = np.concatenate([np.diff(part.bounds) for part in parts])
        return BatchRows(
            rows=np.concatenate([part.rows for part in parts]),
            bounds=row_bounds(sizes),
            num_real=np.concatenate([part.num_real for part in parts]),
            step_rows=np.concatenate([part.step_rows for part in parts]),
            ends_step=np.concatenate([part.ends_step for part in parts]),
        )

    def _plan_window(self, window: int) -> None:
        """Read the rows of a window, and plan its batches; the plan numbers its rows from 0.

        Within a run they are in the order of the source.
        """
        if window == self._window:
            return
        # The rows of the window before are freed first, so that there are never two.
        self._window_rows = np.empty(0, np.int64)
        self._window_rows = self._read_rows(window * self._window_steps * self._step_rows)
        lengths = self.lengths[self._window_rows]
        self._window_plan = Plan(lengths, self.settings, self.epoch, window=window)
        self._window = window

    def _read_rows(self, begin: int) -> Rows:
        """The rows of the window that begins at place `begin` of the permuted order."""
        end = min(begin + self._window_steps * self._step_rows, len(self.lengths))
        first, last = np.searchsorted(self._run_ends, [begin, end - 1], side="right")
        rows = []
        for run in range(first, last + 1):
            run_begin = int(self._run_ends[run - 1]) if run else 0
            run_end = int(self._run_ends[run])
            # What a row's number in the source is beyond its place in the permuted order.
            shift = int(self._runs[run]) * RUN_ROWS - run_begin
            rows.append(np.arange(shift + max(begin, run_begin), shift + min(end, run_end)))
        return np.concatenate(rows)


def is_sorted_by(classes: NDArray[np.integer]) -> bool:
    """Whether windows would have other classes than the whole, as a table sorted by class has.

    That is judged by some hundred rows of up to 64 runs.
    """
    # Runs of classes 0 0 | 1 1 have the shares [1 0] and [0 1] around the usual [.5 .5]: distance
    # 0.5, the most there can be. Runs 0 1 | 1 0 have distance 0.
    places = np.linspace(0, len(classes) - 1, _RUNS_SAMPLED).astype(np.int64)
    run_begins = np.unique(places // RUN_ROWS) * RUN_ROWS
    width = min(RUN_ROWS, len(classes))
    sampled = np.linspace(0, width - 1, min(_ROWS_SAMPLED, width)).astype(np.int64)
    rows = np.minimum(run_begins[:, None] + sampled, len(classes) - 1)
    classes_of_runs = classes[rows]
    num_classes = int(classes_of_runs.max()) + 1
    counts = [np.bincount(of_run, minlength=num_classes) for of_run in classes_of_runs]
    shares = np.stack(counts) / len(sampled)
    usual = shares.mean(axis=0)
    distance = np.abs(shares - usual).sum(axis=1).mean() / 2
    return bool(distance > _UNEVEN * (1 - (usual**2).sum()))
