"""What more rows would bring: a power law through the errors at an eighth, a quarter, a half and all of the rows.

Each fold has a curve of its own, so the forecast has an interval: folds are drawn again, and errors with them. The law
falls to nothing (`a n^-b`), or to a floor (`a n^-b + c`), or begins at the last doubling. With few rows a model is near
chance, so its errors fall faster later. Four points cannot tell which, so the interval spans all three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Floats = NDArray[np.float64]
PARTS = (1 / 8, 1 / 4, 1 / 2, 1.0)
_DRAWS, _NO_USE = 120, 0.003
_SHALLOWEST, _STEEPEST = 1e-3, 1.5


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the score gains by more rows of the same kind; shares, with a 95 % interval."""

    more: int
    gain: float
    low: float
    high: float

    @property
    def is_useless(self) -> bool:
        return self.high < _NO_USE

    def line(self) -> str:
        if self.is_useless:
            most = f"{self.more:,} more bring at most {100 * self.high:.1f} points"
            return f"more rows of this kind will not help: {most}"
        low, high = 100 * self.low, 100 * self.high
        return f"{self.more:,} more rows: {100 * self.gain:+.1f} points ({low:.1f} to {high:.1f})"


def forecast(sizes: Floats, errors: Floats, rows_now: int, more: int, judged: int) -> Forecast:
    """The gain of `more` rows over `rows_now`; `errors`: a row a fold, a column a size, each of `judged` rows."""
    random = np.random.default_rng(0)
    gains = []
    for _ in range(_DRAWS):
        drawn = errors[random.integers(0, len(errors), len(errors))].mean(axis=0)
        spread = np.sqrt(drawn * (1 - drawn) / (judged * len(errors))) / 2  # the sizes share their judged rows
        gains += _gains(sizes, drawn + random.normal(0, spread), rows_now, more)
    mean = _gains(sizes, errors.mean(axis=0), rows_now, more)
    low, high = np.quantile(gains, [0.025, 0.975])
    return Forecast(more, float(np.mean(mean)), float(low), float(high))


def _gains(sizes: NDArray, errors: NDArray, rows_now: int, more: int) -> list[float]:
    """The gain by each of the three laws."""
    shares, errors = sizes / sizes[-1], np.maximum(errors, 1e-4)
    laws = [_fit(shares, errors, False), _fit(shares, errors, True), _fit(shares[-2:], errors[-2:], False)]
    now, then = np.array([rows_now, rows_now + more]) / sizes[-1]
    return [float(law(now) - law(then)) for law in laws]


def _fit(sizes: NDArray, errors: NDArray, has_floor: bool) -> Callable[[NDArray], NDArray]:
    def law(size: NDArray, scale: float, power: float, floor: float = 0.0) -> NDArray:
        return scale * size**-power + floor

    start = [errors[-1], 0.3] if not has_floor else [errors[-1] / 2, 0.5, errors[-1] / 2]
    least, most = [0.0, _SHALLOWEST, 0.0], [2.0, _STEEPEST, 1.0]
    bounds = (least[: len(start)], most[: len(start)])
    found = least_squares(lambda given: law(sizes, *given) - errors, start, bounds=bounds, max_nfev=200).x
    return lambda size: law(size, *found)


def round_number(rows: float) -> int:
    """A number of rows as people name them: 1, 2 or 5 and zeros."""
    power = 10 ** int(np.floor(np.log10(max(1.0, rows))))
    return int(max(step * power for step in (1, 2, 5) if step * power <= max(1.0, rows)))
