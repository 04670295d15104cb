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
# What is added up, in the first axis of the sums: count of answers, squares of errors, errors
# without their sign, what the answers should be (the truth), and its squares.
_NUM_SUMS = 5


class SequenceScores:
    """Adds up errors on scaled values, and says what they are in each target's unit."""

    def __init__(self, recordings: int, targets: Sequence[str], factor: Sequence[float]) -> None:
        self.targets = list(targets)
        self._factor = torch.tensor(list(factor), dtype=torch.float64)
        # scores of each target over all recordings, as the last call of `values` found them
        self.of_targets: dict[str, dict[str, float]] = {}
        shape = (recordings, len(self.targets))
        self._sums = torch.zeros(_NUM_SUMS, *shape, dtype=torch.float64)
        self._largest = torch.zeros(shape, dtype=torch.float64)

    def reset(self) -> None:
        self._sums.zero_()
        self._largest.zero_()

    def add(self, answers_NK: Tensor, truths_NK: Tensor, recording_N: Tensor) -> None:
        """Add scaled answers; a truth that is NaN was not measured, and does not count."""
        # The sums follow the device of the batches. On one device nothing moves, and no step waits.
        self._sums = self._sums.to(answers_NK.device)
        self._largest = self._largest.to(answers_NK.device)
        # Three answers, the second truth not measured; the first two are of recording 0:
        #
        #     answers    2.0   7.0   5.0        known      1    0    1
        #     truths     1.0   NaN   8.0        squares    1    0    9
        #     recording  0     0     1          sums of recording 0: count 1, squares 1
        is_known_NK = ~truths_NK.isnan()
        truths_NK = truths_NK.double()
        errors_NK = (answers_NK.double() - truths_NK).where(is_known_NK, 0.0)
        truths_NK = truths_NK.where(is_known_NK, 0.0)
        absolute_NK = errors_NK.abs()
        terms = [is_known_NK.double(), errors_NK**2, absolute_NK, truths_NK, truths_NK**2]
        self._sums.index_add_(1, recording_N, torch.stack(terms))
        recording_NK = recording_N.unsqueeze(1).expand_as(absolute_NK)
        self._largest.scatter_reduce_(0, recording_NK, absolute_NK, "amax")

    def values(self, *, is_alone: bool = False) -> dict[str, float]:
        """Each metric over the answers of all ranks; `is_alone`: over this rank's.

        With several targets a metric is the mean over targets, of `max_error` too: the mean of each
        one's largest error. The two scaled ones are means over all answers. There is an rmse of
        each target.
        """
        if is_alone:
            sums = self._sums.cpu()
            largest = self._largest.cpu()
        else:
            sums, largest = self._of_all_ranks()
        sums_of_targets = sums.sum(1)
        largest_of_targets = largest.amax(0)
        scores = _scores_of_targets(sums_of_targets, largest_of_targets, self._factor)
        for number, target in enumerate(self.targets):
            self.of_targets[target] = {name: float(scores[name][number]) for name in scores}
        values = self._values_of(sums_of_targets, largest_of_targets)
        return {name: float(value) for name, value in values.items()}

    def _values_of(self, sums: Tensor, largest: Tensor) -> dict[str, Tensor]:
        """Each metric from `[5, …, K]` sums; axes in between, if any, are draws of a bootstrap."""
        # Metrics in units are means over targets. Scaled ones have no unit, so all answers to all
        # targets are one mean.
        scores = _scores_of_targets(sums, largest, self._factor)
        values = {name: of_each.mean(-1) for name, of_each in scores.items()}
        count, squares, absolute, *_ = sums
        num_answers = count.sum(-1)
        values["mse_scaled"] = squares.sum(-1) / num_answers
        values["mae_scaled"] = absolute.sum(-1) / num_answers
        if len(self.targets) > 1:
            rmse_of_targets = scores["rmse"].unbind(-1)
            for target, rmse in zip(self.targets, rmse_of_targets, strict=True):
                values[f"rmse_{target}"] = rmse
        return values

    def intervals(self) -> dict[str, Interval]:
        """The 95 % interval of each metric but the largest error, drawn over recordings.

        All ranks must call this at the same time.
        """

        # A bootstrap draws rows of sums, and wants the count in the last column. Here a row is a
        # recording. Of its `[5, K]` sums the count comes first, so they are put in reverse order
        # for the bootstrap, and turned back here. With one target a row is: squares of the truth,
        # truth, absolute, squares, count.
        def values_of(rows_of_sums: Tensor) -> dict[str, Tensor]:
            reversed_sums = rows_of_sums.unflatten(-1, (_NUM_SUMS, -1)).movedim(-2, 0)
            sums = reversed_sums.flip(0)
            values = self._values_of(sums, torch.zeros_like(sums[0]))
            del values["max_error"]  # a largest error cannot be drawn
            return values

        sums, _ = self._of_all_ranks()
        sums_of_recordings = sums.flip(0).movedim(0, 1)
        return bootstrap(sums_of_recordings.flatten(1), values_of)

    def by_recording(self) -> dict[str, Tensor]:
        """`[R, K]` of each score. All ranks must call this at the same time.

        Without an answer a score is NaN, and the largest error 0.
        """
        return _scores_of_targets(*self._of_all_ranks(), self._factor)

    def _of_all_ranks(self) -> tuple[Tensor, Tensor]:
        sums, largest = zip(*of_all_ranks([self._sums.cpu(), self._largest.cpu()]), strict=True)
        return torch.stack(sums).sum(0), torch.stack(largest).amax(0)


def names_of(targets: Sequence[str]) -> list[str]:
    """The names of the metrics for these targets."""
    return [*NAMES, *(f"rmse_{name}" for name in targets if len(targets) > 1)]


def _scores_of_targets(sums: Tensor, largest: Tensor, factor: Tensor) -> dict[str, Tensor]:
    """`[…, K]` each score in the unit of its target, from sums `[5, …, K]` on scaled values.

    Without an answer they are NaN, but for the largest error, which is then 0. An r2 is NaN where
    all true values are equal.
    """
    # The spread is the sum of squared distances of the true values from their mean. It needs no
    # second pass: the truths 1, 2 and 3 have squares 14, less 6² / 3 leaves 2. Rounding may leave
    # it just below 0.
    count, squares, absolute, truth, truth_squares = sums
    count = count.masked_fill(count == 0, float("nan"))
    spread = truth_squares - truth**2 / count
    spread = spread.masked_fill(spread <= 0, float("nan"))
    return {
        "rmse": (squares / count).sqrt() * factor,
        "mae": absolute / count * factor,
        "max_error": largest * factor,
        "r2": 1 - squares / spread,
    }
