"""Errors of answers to recordings, as metrics: over all recordings, and for each of them.

Metrics are in each target's own unit. `SequenceScores` keeps sums for each recording and target on
the device, so a batch costs a few additions and memory stays flat. Every metric is made of these
sums.

    two answers to recording 0, errors 1 and -3     count 2, squares 10, absolute 4, largest 3
    rmse sqrt(10 / 2), mae 4 / 2, max_error 3

Shapes: N answers, R recordings, K targets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flatout.distributed.collectives import of_all_ranks
from flatout.tasks.score_intervals import Interval, bootstrap

NAMES = ("rmse", "mae", "max_error", "r2", "mse_scaled", "mae_scaled")
# what is added up, by its place in the first axis of the sums
_COUNT = 0  # of answers
_SQUARES = 1  # of errors
_ABSOLUTE = 2  # errors without their sign
_TRUTH = 3  # what the answers should be
_TRUTH_SQUARES = 4


class SequenceScores:
    """Adds up errors on scaled values, and says what they are in each target's unit."""

    def __init__(self, recordings: int, targets: Sequence[str], factor: Sequence[float]) -> None:
        self.targets = list(targets)
        self._factor = torch.tensor(list(factor), dtype=torch.float64)
        # each one's errors over all recordings, of the last `values`
        self.of_targets: dict[str, dict[str, float]] = {}
        shape = recordings, len(self.targets)
        self._sums = torch.zeros(5, *shape, dtype=torch.float64)
        self._largest = torch.zeros(shape, dtype=torch.float64)

    def reset(self) -> None:
        self._sums.zero_()
        self._largest.zero_()

    def add(self, answers_NK: Tensor, truths_NK: Tensor, recording_N: Tensor) -> None:
        """Add scaled answers; a truth that is NaN was not measured, and does not count."""
        # The sums move to the device of the first batch, and stay there: a step never waits.
        self._sums = self._sums.to(answers_NK.device)
        self._largest = self._largest.to(answers_NK.device)
        # Three answers, the second truth not measured; the first two are of recording 0:
        #
        #     answers    2.0   7.0   5.0        known      1    0    1
        #     truths     1.0   NaN   8.0        squares    1    0    9
        #     recording  0     0     1          sums of recording 0: count 1, squares 1
        is_known_NK = ~truths_NK.isnan()
        errors_NK = (answers_NK.double() - truths_NK.double()).where(is_known_NK, 0.0)
        truths_NK = truths_NK.double().where(is_known_NK, 0.0)
        absolute_NK = errors_NK.abs()
        parts = is_known_NK.double(), errors_NK**2, absolute_NK, truths_NK, truths_NK**2
        self._sums.index_add_(1, recording_N, torch.stack(parts))
        index_NK = recording_N.unsqueeze(1).expand_as(absolute_NK)
        self._largest.scatter_reduce_(0, index_NK, absolute_NK, "amax")

    def values(self, *, is_alone: bool = False) -> dict[str, float]:
        """Each metric over the answers of all ranks; `is_alone`: over this rank's.

        With several targets a metric is their mean, and there is an rmse of each.
        """
        if is_alone:
            sums = self._sums.cpu()
            largest = self._largest.cpu()
        else:
            sums, largest = self._of_all_ranks()
        sums = sums.sum(1)
        largest = largest.amax(0)
        by_target = _errors(sums, largest, self._factor)
        for number, target in enumerate(self.targets):
            self.of_targets[target] = {
                name: float(errors[number]) for name, errors in by_target.items()
            }
        values = self._values_of(sums, largest)
        return {name: float(value) for name, value in values.items()}

    def _values_of(self, sums: Tensor, largest: Tensor) -> dict[str, Tensor]:
        """Each metric from `[5, …, K]` sums; each `…` is a draw of a bootstrap."""
        # Metrics in units are means over targets. Scaled ones have no unit, so all answers to all
        # targets are one mean.
        by_target = _errors(sums, largest, self._factor)
        values = {name: by_target[name].mean(-1) for name in ("rmse", "mae", "max_error", "r2")}
        count = sums[_COUNT].sum(-1)
        values["mse_scaled"] = sums[_SQUARES].sum(-1) / count
        values["mae_scaled"] = sums[_ABSOLUTE].sum(-1) / count
        if len(self.targets) > 1:
            for number, name in enumerate(self.targets):
                values[f"rmse_{name}"] = by_target["rmse"][..., number]
        return values

    def intervals(self) -> dict[str, Interval]:
        """The 95 % interval of each metric but the largest error, drawn over recordings.

        All ranks must call this at the same time.
        """

        # A bootstrap draws rows of sums whose last column counts. Here a row is a recording: its
        # `[5, K]` sums flat, turned round so that the count, which comes first, is the last.
        def values_of(flat_sums: Tensor) -> dict[str, Tensor]:
            sums = flat_sums.unflatten(-1, (5, -1)).movedim(-2, 0).flip(0)
            values = self._values_of(sums, torch.zeros_like(sums[0]))
            del values["max_error"]  # a largest error cannot be drawn
            return values

        sums, _ = self._of_all_ranks()
        return bootstrap(sums.flip(0).movedim(0, 1).flatten(1), values_of)

    def by_recording(self) -> dict[str, Tensor]:
        """`[R, K]` of each error; NaN where a recording has no answer."""
        return _errors(*self._of_all_ranks(), self._factor)

    def _of_all_ranks(self) -> tuple[Tensor, Tensor]:
        sums, largest = zip(*of_all_ranks([self._sums.cpu(), self._largest.cpu()]), strict=True)
        return torch.stack(sums).sum(0), torch.stack(largest).amax(0)


def names_of(targets: Sequence[str]) -> list[str]:
    """The names of the metrics for these targets."""
    return [*NAMES, *(f"rmse_{name}" for name in targets if len(targets) > 1)]


def _errors(sums: Tensor, largest: Tensor, factor: Tensor) -> dict[str, Tensor]:
    """`[…, K]` each error in the unit of its target, from sums `[5, …, K]` on scaled values.

    NaN without an answer, and an r2 of NaN where all true values are equal.
    """
    # The spread is the sum of the true values' squared distances from their mean, without a second
    # pass: of 1, 2 and 3, squares 14 less 6² / 3 leave 2. Rounding may leave it just below 0.
    count = sums[_COUNT].masked_fill(sums[_COUNT] == 0, float("nan"))
    spread = sums[_TRUTH_SQUARES] - sums[_TRUTH] ** 2 / count
    return {
        "rmse": (sums[_SQUARES] / count).sqrt() * factor,
        "mae": sums[_ABSOLUTE] / count * factor,
        "max_error": largest * factor,
        "r2": 1 - sums[_SQUARES] / spread.masked_fill(spread <= 0, float("nan")),
    }
