"""What more rows would bring: power laws through the errors of models of fewer rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Floats = NDArray[np.float64]
PARTS = (1 / 8, 1 / 4, 1 / 2, 1.0)
_CURVES = 120
_NO_USE = 0.003
# powers of a law; the least probability of a network that counts
_SHALLOWEST = 1e-3
_STEEPEST = 1.5


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


def forecast(
    sizes: Floats, errors: Floats, rows_now: int, more: int, judged: int | None
) -> Forecast:
    """The gain of `more` rows; `errors`: a row a fold, a column a size, shares of `judged` rows
    where it is given.
    """
    random = np.random.default_rng(0)
    gains = list[float]()
    for _ in range(_CURVES):
        drawn = errors[random.integers(0, len(errors), len(errors))].mean(axis=0)
        variance = drawn * (1 - drawn) / judged if judged else errors.var(axis=0)
        spread = np.sqrt(variance / len(errors)) / 2  # the sizes share their judged rows
        gains += _gains(sizes, drawn + random.normal(0, spread), rows_now, more)
    mean = _gains(sizes, errors.mean(axis=0), rows_now, more)
    low, high = np.quantile(gains, [0.025, 0.975])
    return Forecast(more, float(np.mean(mean)), float(low), float(high))


def _gains(sizes: NDArray, errors: NDArray, rows_now: int, more: int) -> list[float]:
    shares = sizes / sizes[-1]
    errors = np.maximum(errors, 1e-4)
    laws = [
        _fit(shares, errors, False),
        _fit(shares, errors, True),
        _fit(shares[-2:], errors[-2:], False),
    ]
    now, then = np.array([rows_now, rows_now + more]) / sizes[-1]
    return [float(law(now) - law(then)) for law in laws]


def _fit(sizes: NDArray, errors: NDArray, has_floor: bool) -> Callable[[NDArray], NDArray]:
    def law(size: NDArray, scale: float, power: float, floor: float = 0.0) -> NDArray:
        return scale * size**-power + floor

    start = [errors[-1] / 2, 0.5, errors[-1] / 2] if has_floor else [errors[-1], 0.3]
    bounds = ([0.0, _SHALLOWEST, 0.0][: len(start)], [2.0, _STEEPEST, 1.0][: len(start)])
    found = least_squares(
        lambda given: law(sizes, *given) - errors, start, bounds=bounds, max_nfev=200
    ).x
    return lambda size: law(size, *found)


def round_number(rows: float) -> int:
    """A number of rows as people name them: 1, 2 or 5 and zeros."""
    power = 10 ** int(np.floor(np.log10(max(1.0, rows))))
    return int(max(step * power for step in (1, 2, 5) if step * power <= max(1.0, rows)))
