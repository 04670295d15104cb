"""The 95 % interval of a score: its range on other rows of the same kind, by bootstrap over rows.

A metric is a function of sums over rows, such as right answers of a class. So each row's part of
the sums is kept while rows are judged. A resample draws as many rows as there are, some twice and
some not at all. It is a weighted sum of parts, so many resamples are one product of matrices.

    parts of 3 rows (right answers, rows)    [1, 1], [0, 1], [1, 1]

    a resample draws the rows 0, 0 and 1     weights [2, 1, 0], sums [2, 3], accuracy 2/3

Where there are more than some thousand rows, the parts of several are added to one group; a row's
number says to which. So memory stays flat, and ranks can add up their groups. For recordings a part
is a whole recording, as its windows resemble each other. The area under the ROC curve is no
function of few sums. Its resamples add up each row's influence on it (infinitesimal jackknife), for
which a byte for each row and class is kept. The seed is fixed, so no random number of the run is
drawn. Open this file to change how wide the interval of a score is; which sums a metric needs
stands beside the metric (`tasks/metrics.py`). Audits of texts draw rows in `audit/measure.py`.

Shapes: B rows, G groups of rows, S sums, R resamples, C classes, T buckets of scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Interval = tuple[float, float]
OverRanks = Callable[[NDArray[np.float64]], NDArray[np.float64]]
ValuesOf = Callable[[Tensor], Mapping[str, Tensor]]  # metrics of `[R, S]` sums, each `[R]`
LEAST_ROWS = 10  # below so many rows, groups or recordings there is no interval
_OUTSIDE = 0.025  # share of cases in which the truth lies below a 95 % interval; above: the same
_FEW_GROUPS = 200  # groups below which an interval is made by bootstrap-t
_MOST_CELLS_OF_FEW = 60_000  # sums of all groups, up to which that takes a second
_LEAST_MEASURED = 0.99  # share of resamples that must have a standard error
_ROUNDING = 1e-20  # squared errors up to this part of the squared value are zeros that were rounded
_RESAMPLES = 1000  # a multiple of _AT_ONCE
_AT_ONCE = 50  # resamples that are one product of matrices
_MOST_CELLS = 4_000_000  # sums of all groups: with many columns there are fewer groups
_LEAST_GROUPS = 200  # however many columns; from _FEW_GROUPS on, quantiles of resamples do
_MOST_GROUPS = 4000
_FACTOR = 0x9E3779B1  # spreads row numbers over 32 bits (Knuth's multiplicative hash)


class RowSums:
    """What rows add to each of some sums, by groups of rows.

    The last sum counts rows (or words, recordings): it is 0 in a group without any.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._num_groups = int(np.clip(_MOST_CELLS // columns, _LEAST_GROUPS, _MOST_GROUPS))
        self._sums: Tensor | None = None

    def add(self, rows: Tensor, values: Tensor, places: Tensor | None = None) -> None:
        """Add `[B, …]` values of the rows with these numbers.

        `places` `[B, …]` say to which sums; None: the values of a row are all of its sums, in turn.
        """
        if places is None:
            places = torch.arange(self.columns, device=values.device).expand_as(values)
        if self._sums is None:
            self._sums = torch.zeros(
                self._num_groups, self.columns, dtype=torch.float64, device=values.device
            )
        # Each of the first rows has a group for itself; a hash of a later row's number says which
        # group it joins.
        hashes = ((rows.long() * _FACTOR) & 0xFFFFFFFF) >> 12
        groups = torch.where(rows < self._num_groups, rows, hashes % self._num_groups).long()
        # Group 2 and sum 1 of 4 columns are cell 2 * 4 + 1 = 9.
        cells = groups.to(values.device).unsqueeze(1) * self.columns + places
        self._sums.view(-1).index_add_(0, cells.flatten(), values.double().flatten())

    def gathered(self, over_ranks: OverRanks | None = None) -> Tensor:
        """`[G, S]` on the host: added up over all ranks, which must all call this at once.

        Without `over_ranks`: those of this rank.
        """
        if self._sums is None:
            sums = torch.zeros(self._num_groups, self.columns).double()
        else:
            sums = self._sums.cpu()
        return sums if over_ranks is None else torch.from_numpy(over_ranks(sums.numpy()))

    def reset(self) -> None:
        self._sums = None


def bootstrap(sums_GS: Tensor, values_of: ValuesOf) -> dict[str, Interval]:
    """The interval of each metric that `values_of` makes of `[R, S]` sums.

    Empty for fewer than `LEAST_ROWS` groups with rows. A metric that is the same in all resamples
    is left out.
    """
    sums_GS = sums_GS[sums_GS[:, -1] > 0].double()
    num_groups = len(sums_GS)
    if num_groups < LEAST_ROWS:
        return {}
    is_few = num_groups < _FEW_GROUPS and sums_GS.numel() <= _MOST_CELLS_OF_FEW
    few = _FewGroups(sums_GS, values_of) if is_few else None
    random = np.random.default_rng(0)
    resampled = list[Mapping[str, Tensor]]()
    for _ in range(0, _RESAMPLES, _AT_ONCE):
        drawn = random.integers(0, num_groups, (_AT_ONCE, num_groups))
        # Numbered on from resample to resample, so that one count over all gives their weights. Of
        # 3 groups, resamples [0 0 2] and [1 2 2] → 0 0 2 4 5 5 → weights [2 0 1] and [0 1 2].
        drawn += np.arange(_AT_ONCE)[:, None] * num_groups
        weights = np.bincount(drawn.ravel(), minlength=drawn.size)
        weights_RG = torch.from_numpy(weights.reshape(drawn.shape)).double()
        resampled.append(values_of(weights_RG @ sums_GS))
        if few is not None:
            few.add(weights_RG)
    intervals = {}
    for name in resampled[0]:
        values_R = torch.cat([values[name] for values in resampled])
        finite_values = values_R[values_R.isfinite()]
        if not len(finite_values):
            continue
        ends = None if few is None else few.interval(name)
        if ends is None:
            ends = _quantiles(finite_values, _lower_share(num_groups))
        low, high = ends
        if low < high:
            intervals[name] = (low, high)
    return intervals


class _FewGroups:
    """Intervals by bootstrap-t, for groups so few that quantiles of resamples lie too close.

    A resample of few groups varies less than new groups do, and a large group that is missing makes
    value and spread small together. So each resample is measured by its own standard error: how
    many of them it lies off the value of all groups. The interval holds the values from which that
    of all groups is as far off, by its own standard error.

        all groups             value 0.80, standard error 0.02

        95 % of the resamples  lie -2.6 to +2.1 of their standard errors off

        interval               0.80 - 2.1 * 0.02 to 0.80 + 2.6 * 0.02
    """

    def __init__(self, sums_GS: Tensor, values_of: ValuesOf) -> None:
        self._sums_GS = sums_GS
        self._values_of = values_of
        self._whole = self._values_and_errors(torch.ones(1, len(sums_GS)).double())
        # What single groups score: no interval reaches beyond the best and the worst of them.
        self._of_groups = values_of(sums_GS)
        self._resampled = list[dict[str, tuple[Tensor, Tensor]]]()

    def add(self, weights_RG: Tensor) -> None:
        """Take in resamples, by how often each draws each group."""
        self._resampled.append(self._values_and_errors(weights_RG))

    def interval(self, name: str) -> Interval | None:
        """None where some resamples have no standard error, as all their groups score the same."""
        value, error = self._whole[name]
        parts = [part[name] for part in self._resampled]
        values_R, errors_R = map(torch.cat, zip(*parts, strict=True))
        off_R = (values_R - value) / errors_R
        is_finite_R = off_R.isfinite()
        if not error.isfinite() or is_finite_R.double().mean() < _LEAST_MEASURED:
            return None
        # A little less outside than asked for: these bounds depend on the groups drawn, too.
        # 2 % of 10 groups, 2.4 % of 40 (measured by tests/soak/test_score_intervals.py).
        outside = _OUTSIDE * (1 - 2 / len(self._sums_GS))
        least, most = _quantiles(off_R[is_finite_R], outside)
        possible = torch.cat([values_R, self._of_groups[name]])
        possible = possible[possible.isfinite()]
        low = max(float(value - most * error), float(possible.min()))
        high = min(float(value - least * error), float(possible.max()))
        return low, high

    def _values_and_errors(self, weights_RG: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """`[R]` values of each metric, and their standard errors by the jackknife."""
        # How much the metric moves when a group is left out once, for each group of each resample.
        # The squares of these moves add up to nearly the squared standard error.
        num_groups = weights_RG.shape[1]
        sums_RS = weights_RG @ self._sums_GS
        without_group_RGS = sums_RS[:, None] - self._sums_GS
        values_without_group = self._values_of(without_group_RGS.flatten(0, 1))
        measured = {}
        for name, values_R in self._values_of(sums_RS).items():
            without_RG = values_without_group[name].view(-1, num_groups)
            # a group that was not drawn cannot be left out
            without_RG = torch.where(weights_RG > 0, without_RG, 0.0)
            mean_R1 = (weights_RG * without_RG).sum(1, keepdim=True) / num_groups
            squares_R = (weights_RG * (without_RG - mean_R1) ** 2).sum(1)
            is_above_rounding_R = squares_R > _ROUNDING * values_R**2
            deviations_R = torch.where(is_above_rounding_R, squares_R, 0.0).sqrt()
            errors_R = deviations_R * ((num_groups - 1) / num_groups) ** 0.5
            measured[name] = (values_R, errors_R)
        return measured


def describe_drawn_groups(num_groups: int, column: str) -> str:
    """A line on the intervals of rows that belong to groups."""
    if num_groups < LEAST_ROWS:
        return (
            f"no intervals: they need {LEAST_ROWS} groups of {column}, and these rows are of"
            f" {num_groups}"
        )
    return f"intervals draw the {num_groups:,} groups of {column}, not single rows"


def _quantiles(values_R: Tensor, outside: float) -> Interval:
    """The bounds of the values but for this share of them at each end."""
    ends = torch.tensor([outside, 1 - outside]).double()
    low, high = torch.quantile(values_R, ends).tolist()
    return low, high


def _lower_share(num_groups: int) -> float:
    """The share of resamples below an interval's lower bound: 2.5 %, and less of few groups.

    Resamples of G groups vary less than new groups do, by (G - 1) / G in their variance. Means of
    few groups also lie further out than a normal law has it (Student's law): of 10 groups 2.26
    standard errors, not 1.96. So of 10 groups the share is 0.9 %, of 200 it is 2.4 %.
    """
    # imported here: most of what judges needs no scipy
    from scipy.special import ndtr, stdtrit

    factor = float(stdtrit(num_groups - 1, 1 - _OUTSIDE))
    return float(ndtr(-factor * (num_groups / (num_groups - 1)) ** 0.5))


def auroc_influence(buckets_BC: Tensor, is_theirs_BC: Tensor, counts_TC2: Tensor) -> Tensor:
    """`[B]` what a row adds to the mean area under the ROC curve when it is drawn once more.

    `buckets_BC`: the bucket of each row's score for each class, the higher the surer.
    `is_theirs_BC`: whether a row has a class. `counts_TC2`: how many rows have their score in a
    bucket, without a class and with it.
    """
    # Classes that all rows have, or none, take no part. A row with a class weighs by the rows
    # without it that it beats, and the other way round; rows of one bucket beat each other by half.
    # Two rows with a class, in the buckets 1 and 2, and two without it, in 0 and 1:
    #
    #     bucket                                    0      1      2
    #     rows without it, and with it              1, 0   1, 1   0, 1
    #     share of the others that a row beats      0.25   0.75   1      area (0.75 + 1) / 2 = 0.875
    #     influence of a row with it                       -1/16  +1/16   (share - area) / 2 rows
    is_mixed_C = (counts_TC2.sum(0) > 0).all(-1)
    if not is_mixed_C.any():
        return torch.zeros(len(buckets_BC)).double()
    buckets_BC = buckets_BC[:, is_mixed_C].long()
    is_theirs_BC = is_theirs_BC[:, is_mixed_C]
    absent_TC, present_TC = counts_TC2[:, is_mixed_C].double().unbind(-1)
    num_absent_C = absent_TC.sum(0)
    num_present_C = present_TC.sum(0)
    beaten_TC = (absent_TC.cumsum(0) - absent_TC / 2) / num_absent_C
    above_TC = (present_TC.flip(0).cumsum(0).flip(0) - present_TC / 2) / num_present_C
    area_C = (present_TC * beaten_TC).sum(0) / num_present_C
    as_present_BC = (beaten_TC.gather(0, buckets_BC) - area_C) / num_present_C
    as_absent_BC = (above_TC.gather(0, buckets_BC) - area_C) / num_absent_C
    return torch.where(is_theirs_BC, as_present_BC, as_absent_BC).mean(1)
