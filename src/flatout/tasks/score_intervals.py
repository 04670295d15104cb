"""The 95 % interval of a score: what it may be on other rows of the same kind, by bootstrap over
the rows.

A metric is a function of sums over rows, such as right answers of a class. So each row's part is
kept while rows are judged, and a resample is a weighted sum of parts: a thousand of them are one
product of matrices. Of more than some thousand rows the parts of several are added up at once; a
row's number says with which. So memory stays flat, and ranks add up what they have. Of recordings a
part is a whole recording, as windows of one resemble each other. The area under the ROC curve is no
function of few sums. Its resamples add up each row's influence on it (infinitesimal jackknife); a
byte for each row and class is kept. The seed is fixed, and no random number of the run is drawn.

Shapes: B rows, G groups of rows, S sums, R resamples, C classes, T thresholds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Interval = tuple[float, float]
OverRanks = Callable[[NDArray[np.float64]], NDArray[np.float64]]
LEAST_ROWS = 10  # below so many rows or recordings a bootstrap says little: there is no interval
_RESAMPLES = 1000
_AT_ONCE = 50
_MOST_CELLS = 4_000_000
_LEAST_GROUPS = 200
_MOST_GROUPS = 4000
_FACTOR = 0x9E3779B1


class RowSums:
    """What rows add to each of some sums, of which the last is 0 where there is no row."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._most = int(np.clip(_MOST_CELLS // columns, _LEAST_GROUPS, _MOST_GROUPS))
        self._sums: Tensor | None = None

    def add(self, rows: Tensor, values: Tensor, places: Tensor | None = None) -> None:
        """Add `[B, …]` values of rows with these numbers to the sums at `places`, by default to
        each in turn.
        """
        if places is None:
            places = torch.arange(self.columns, device=values.device).expand_as(values)
        if self._sums is None:
            self._sums = torch.zeros(
                self._most, self.columns, dtype=torch.float64, device=values.device
            )
        # The first rows each for itself, later ones where a hash of their number says.
        mixed = ((rows.long() * _FACTOR) & 0xFFFFFFFF) >> 12
        groups = torch.where(rows < self._most, rows, mixed % self._most).long()
        flat = groups.to(values.device).unsqueeze(1) * self.columns + places
        self._sums.view(-1).index_add_(0, flat.flatten(), values.double().flatten())

    def gathered(self, over_ranks: OverRanks | None = None) -> Tensor:
        """`[G, S]` on the host, over all ranks; all must ask at once."""
        own = (
            torch.zeros(self._most, self.columns).double()
            if self._sums is None
            else self._sums.cpu()
        )
        return own if over_ranks is None else torch.from_numpy(over_ranks(own.numpy()))

    def reset(self) -> None:
        self._sums = None


def bootstrap(
    sums_GS: Tensor, values_of: Callable[[Tensor], Mapping[str, Tensor]]
) -> dict[str, Interval]:
    """Intervals of metrics read off `[R, S]` sums (the last 0: no row); none below ten rows or
    where all agree.
    """
    sums_GS = sums_GS[sums_GS[:, -1] > 0].double()
    if len(sums_GS) < LEAST_ROWS:
        return {}
    random = np.random.default_rng(0)
    found = []
    for _ in range(0, _RESAMPLES, _AT_ONCE):
        drawn = random.integers(0, len(sums_GS), (_AT_ONCE, len(sums_GS)))
        drawn += np.arange(_AT_ONCE)[:, None] * len(sums_GS)
        weights = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)
        found.append(values_of(torch.from_numpy(weights).double() @ sums_GS))
    intervals = {}
    for name in found[0]:
        values_R = torch.cat([each[name] for each in found])
        if len(known := values_R[values_R.isfinite()]):
            intervals[name] = tuple(
                torch.quantile(known, torch.tensor([0.025, 0.975]).double()).tolist()
            )
    return {name: (low, high) for name, (low, high) in intervals.items() if low < high}


def auroc_influence(buckets_BC: Tensor, is_theirs_BC: Tensor, counts_TC2: Tensor) -> Tensor:
    """`[B]` what a row adds to the mean area under the ROC curve when it is drawn once more."""
    # `counts_TC2`: rows by bucket of the score, class, and whether it is theirs. Classes that all
    # rows have, or none, take no part. A row with a class weighs by the rows without it that it
    # beats, and the other way round.
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
