"""Features that hold the target: its values, or its values in another unit.

A network that reads one of them learns nothing else. Sums of products are kept, so memory stays flat. Values are taken
relative to the first sample, which keeps the digits of a column far from zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
    """Adds up samples, then names the features that are copies of a target."""

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
