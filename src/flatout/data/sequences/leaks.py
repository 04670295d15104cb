"""What gives the answers of recordings away: features that are copies of a target, samples that two splits share.

Both are found on the way, a block of samples at a time, so memory stays flat.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flatout.data.sequences.columns import Floats

_LEAST_UNEXPLAINED = 1e-6
"""Share of a target's variance that a line through a feature leaves open; less is a copy in another unit."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Copy:
    """A feature that is a line of a target: `target = factor * feature + shift`."""

    feature: str
    target: str
    is_equal: bool
    """Whether the two have the same values."""
    factor: float
    shift: float


class Copies:
    """Adds up samples, then names the features that hold a target: its values, or its values in another unit.

    A network that reads one of them learns nothing else. Sums of products are kept. Values are taken relative to the
    first sample, which keeps the digits of a column far from zero.
    """

    def __init__(self, columns: list[str], targets: list[str]) -> None:
        self._targets = [name for name in columns if name in targets]
        self._features = [name for name in columns if name not in targets]
        self._places = [columns.index(name) for name in [*self._features, *self._targets]]
        size = len(self._places)
        self._origin: Floats | None = None
        self._count, self._sums, self._products = 0, np.zeros(size), np.zeros((size, size))
        self._is_equal = np.ones((len(self._features), len(self._targets)), np.bool_)

    def add(self, values: Floats) -> None:
        """Take in a block of samples `[samples, columns]`."""
        if not self._is_equal.size or not len(values):
            return
        chosen = values[:, self._places]
        features = len(self._features)
        for place, target in np.argwhere(self._is_equal).tolist():
            self._is_equal[place, target] = np.array_equal(chosen[:, place], chosen[:, features + target])
        self._origin = chosen[0].copy() if self._origin is None else self._origin
        with np.errstate(over="ignore", invalid="ignore"):  # what is too large for a scale is refused by name
            apart = chosen - self._origin
            self._count += len(apart)
            self._sums += apart.sum(axis=0)
            self._products += apart.T @ apart

    def find(self) -> list[Copy]:
        """The copies, those with equal values first."""
        if self._origin is None:
            return []
        features, found = len(self._features), []
        with np.errstate(all="ignore"):  # a column without spread has no line; NaN is no copy
            means = self._sums / self._count
            spreads = self._products / self._count - np.outer(means, means)
            for place, feature in enumerate(self._features):
                for number, target in enumerate(self._targets):
                    both, own, other = (
                        float(spreads[pair])
                        for pair in ((place, features + number), (place, place), (features + number,) * 2)
                    )
                    is_equal = bool(self._is_equal[place, number])
                    unexplained = 1 - both * both / (own * other) if own > 0 and other > 0 else 1.0
                    if is_equal or unexplained < _LEAST_UNEXPLAINED:
                        factor = both / own if own > 0 else 1.0
                        ends = [float(means[at] + self._origin[at]) for at in (place, features + number)]
                        shift = ends[1] - factor * ends[0]
                        is_zero = abs(shift) < _ROUNDING * abs(ends[1])
                        found.append(Copy(feature, target, is_equal, factor, 0.0 if is_zero else shift))
        return sorted(found, key=lambda copy: not copy.is_equal)


_SAMPLES_A_RUN, _KEPT = 8, np.uint64(16)
_LEAST_RUNS, _LEAST_SHARE = 4, 0.5
_FACTOR, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)


@dataclass(frozen=True, slots=True)
class Overlap:
    """A recording whose samples stand in another one as well."""

    recording: int
    other: int
    share: float
    """Of its runs of samples."""


class Overlaps:
    """Recordings of different splits that share samples, though they are not equal: one is a part of the other.

    Runs of eight samples get a hash, and one run in sixteen is kept, chosen by its hash. So a run that stands in two
    recordings is kept in both or in neither. A sample costs half a byte. A flat signal has one run, which counts once.
    """

    def __init__(self) -> None:
        self._runs: list[NDArray[np.uint64]] = []

    def begin(self) -> None:
        """A recording is next."""
        self._runs.append(np.empty(0, np.uint64))

    def add(self, values: Floats) -> None:
        """Take in a block of the recording `[samples, columns]`; runs across two blocks are left out."""
        self._runs[-1] = np.union1d(self._runs[-1], _runs_of(values))

    def find(self, splits: list[int]) -> list[Overlap]:
        """Recordings that share most of their runs with one recording of an earlier split; `splits` by recording."""
        found: list[Overlap] = []
        for split in sorted(set(splits))[1:]:
            before = [number for number, each in enumerate(splits) if each < split and len(self._runs[number])]
            if not before:
                continue
            runs = np.concatenate([self._runs[number] for number in before])
            owners = np.repeat(before, [len(self._runs[number]) for number in before])
            for number in (number for number, each in enumerate(splits) if each == split):
                own = self._runs[number]
                shared = owners[np.isin(runs, own)]
                if len(own) < _LEAST_RUNS or not len(shared):
                    continue
                other = int(np.bincount(shared).argmax())
                share = int((shared == other).sum()) / len(own)
                if share >= _LEAST_SHARE:
                    found.append(Overlap(number, other, share))
        return found


def _runs_of(values: Floats) -> NDArray[np.uint64]:
    """Hashes of the runs that are kept."""
    if len(values) < _SAMPLES_A_RUN:
        return np.empty(0, np.uint64)
    rows = np.zeros(len(values), np.uint64)
    for column in values.T:  # unsigned numbers wrap around, as a hash should
        rows = _mix(rows ^ np.ascontiguousarray(column).view(np.uint64))
    runs = np.zeros(len(values) - _SAMPLES_A_RUN + 1, np.uint64)
    for place in range(_SAMPLES_A_RUN):
        runs = _mix(runs ^ rows[place : place + len(runs)])
    kept: NDArray[np.uint64] = np.unique(runs[runs % _KEPT == 0])
    return kept


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed: NDArray[np.uint64] = (numbers ^ (numbers >> _SHIFT)) * _FACTOR
    return mixed ^ (mixed >> _SHIFT)
