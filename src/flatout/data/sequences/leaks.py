"""Ways in which recordings give answers away: features that copy a target, and shared samples.

Two searches, both fed a recording at a time. `CopyFinder` adds up products of columns; a feature
from which a line leads to a target makes the task trivial. `hash_runs` reduces a recording to
hashes of some of its runs of eight samples; `find_overlaps` names recordings of different splits
that share most of them. Open this file to find another kind of leak.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flatout.data.sequences.columns import Floats

Hashes = NDArray[np.uint64]
# of a target's variance that a line through a feature leaves open; less is a copy in another unit
_LEAST_UNEXPLAINED = 1e-6
_ROUNDING = 1e-9  # of the target's mean; a shift below is an error of rounding
_SAMPLES_A_RUN = 8
_ONE_RUN_IN = np.uint64(16)  # so many runs, one is remembered
_LEAST_RUNS = 4  # a recording with fewer remembered runs is not compared
_LEAST_SHARE = 0.5  # of a recording's runs that another one has; fewer are chance
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, the usual factor of such hashes
_SHIFT = np.uint64(29)  # bits


@dataclass(frozen=True, slots=True)
class CopiedTarget:
    """A feature that holds a target: target = factor * feature + shift."""

    feature: str
    target: str
    is_equal: bool  # whether all values are the same, so that factor and shift are 1 and 0
    factor: float
    shift: float


class CopyFinder:
    """Adds up products of samples, then names the features that hold a target in any unit.

    A network learns nothing but the unit from such a feature.
    """

    def __init__(self, columns: list[str], targets: list[str]) -> None:
        """Compare each of `columns` that is no target with each of `targets`."""
        self._targets = [name for name in columns if name in targets]
        self._features = [name for name in columns if name not in targets]
        # columns of a block in the order of the sums: features first
        self._order = [columns.index(name) for name in [*self._features, *self._targets]]
        size = len(self._order)
        self._origin: Floats | None = None
        self._count = 0
        self._sums = np.zeros(size)
        self._products = np.zeros((size, size))
        self._is_equal_FT = np.ones((len(self._features), len(self._targets)), np.bool_)

    def add(self, values: Floats) -> None:
        """Add a block of samples `[samples, columns]`."""
        if not self._is_equal_FT.size or not len(values):
            return
        ordered = values[:, self._order]
        num_features = len(self._features)
        # Only pairs that were equal in all blocks before are compared.
        for feature, target in np.argwhere(self._is_equal_FT).tolist():
            self._is_equal_FT[feature, target] = np.array_equal(
                ordered[:, feature], ordered[:, num_features + target]
            )
        # Distances from the first sample: sums of squares lose fewer digits than those of values.
        if self._origin is None:
            self._origin = ordered[0].copy()
        # values too large for a scale are refused by name elsewhere
        with np.errstate(over="ignore", invalid="ignore"):
            distances = ordered - self._origin
            self._count += len(distances)
            self._sums += distances.sum(axis=0)
            self._products += distances.T @ distances

    def find(self) -> list[CopiedTarget]:
        """All features that hold a target; those with equal values come first."""
        if self._origin is None:
            return []
        num_features = len(self._features)
        with np.errstate(all="ignore"):  # a column without spread has no line; NaN is no copy
            means = self._sums / self._count
            covariances = self._products / self._count - np.outer(means, means)
            variances = covariances.diagonal()
            of_feature_F1 = variances[:num_features, None]
            of_target_T = variances[num_features:]
            of_both_FT = covariances[:num_features, num_features:]
            unexplained_FT = 1 - of_both_FT * of_both_FT / (of_feature_F1 * of_target_T)
            varies_FT = (of_feature_F1 > 0) & (of_target_T > 0)
            is_line_FT = varies_FT & (unexplained_FT < _LEAST_UNEXPLAINED)
            factor_FT = np.where(of_feature_F1 > 0, of_both_FT / of_feature_F1, 1.0)
            mean_values = (means + self._origin).tolist()
        copies = []
        for feature, target in np.argwhere(self._is_equal_FT | is_line_FT).tolist():
            factor = float(factor_FT[feature, target])
            mean_of_target = mean_values[num_features + target]
            shift = mean_of_target - factor * mean_values[feature]
            if abs(shift) < _ROUNDING * abs(mean_of_target):
                shift = 0.0
            copies.append(
                CopiedTarget(
                    feature=self._features[feature],
                    target=self._targets[target],
                    is_equal=bool(self._is_equal_FT[feature, target]),
                    factor=factor,
                    shift=shift,
                )
            )
        return sorted(copies, key=lambda copy: not copy.is_equal)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two recordings of different splits that share samples."""

    recording: int  # the one of the later split
    earlier: int
    share: float  # of the recording's runs that the earlier one has


def find_overlaps(runs: list[Hashes], splits: list[int]) -> list[Overlap]:
    """Find the recordings that share most of their runs with a recording of an earlier split.

    Args:
        runs: what `hash_runs` returned for each recording
        splits: the number of each recording's split
    """
    all_runs = np.concatenate(runs)
    recording_of_run = np.repeat(np.arange(len(runs)), list(map(len, runs)))
    split_of_run = np.array(splits)[recording_of_run]
    first_split = min(splits)
    overlaps = []
    for recording in sorted(range(len(runs)), key=splits.__getitem__):
        split = splits[recording]
        count = len(runs[recording])
        if count < _LEAST_RUNS or split == first_split:
            continue
        is_earlier = split_of_run < split
        is_shared = np.isin(all_runs[is_earlier], runs[recording])
        sharing = recording_of_run[is_earlier][is_shared]  # a recording for each shared run
        if not len(sharing):
            continue
        num_shared = np.bincount(sharing)
        earlier = int(num_shared.argmax())
        share = int(num_shared[earlier]) / count
        if share >= _LEAST_SHARE:
            overlaps.append(Overlap(recording, earlier, share))
    return overlaps


def hash_runs(values: Floats) -> Hashes:
    """Sorted hashes of one in sixteen runs of eight neighbouring samples.

    The hash itself decides which runs are remembered, so two recordings remember the same ones, at
    whatever place they have them.
    """
    num_runs = len(values) - _SAMPLES_A_RUN + 1
    if num_runs < 1:
        return np.empty(0, np.uint64)
    samples = np.zeros(len(values), np.uint64)
    for column in values.T:  # unsigned numbers wrap around, as a hash should
        samples = _mix(samples ^ np.ascontiguousarray(column).view(np.uint64))
    runs = np.zeros(num_runs, np.uint64)
    for nth in range(_SAMPLES_A_RUN):
        runs = _mix(runs ^ samples[nth : nth + num_runs])
    return np.unique(runs[runs % _ONE_RUN_IN == 0])


def _mix(numbers: Hashes) -> Hashes:
    """Change about half of the bits of each number, depending on all its other bits."""
    mixed = (numbers ^ (numbers >> _SHIFT)) * _FACTOR
    return mixed ^ (mixed >> _SHIFT)
