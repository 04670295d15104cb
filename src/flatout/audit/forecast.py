"""What more rows would bring: power laws through the errors of models that learned from fewer.

Errors are known for an eighth, a quarter, a half and all of the rows. A law through them falls to
nothing (`a n^-b`), or to a floor (`a n^-b + c`), or is drawn through the last doubling alone. With
few rows a model is near chance, so its errors fall faster later. Four points cannot tell which law
holds, so the interval spans all three. Each fold has a curve of its own: folds are drawn again, and
errors with them, which gives the interval its width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Floats = NDArray[np.float64]
PARTS = (1 / 8, 1 / 4, 1 / 2, 1.0)  # of the rows, whose models' errors make a learning curve
_RESAMPLES = 120  # of folds; with three laws each, 9 of 360 gains lie beyond each end
_NO_USE = 0.003  # share of the score: a gain below it is called none
# bounds of a law's power and scale, in which the fit stays
_LEAST_POWER = 1e-3
_MOST_POWER = 1.5
_MOST_SCALE = 2.0
_LEAST_ERROR = 1e-4  # a law cannot be fitted to an error of 0


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the score gains by more rows of the same kind: a share, and its 95 % interval."""

    more: int  # rows
    gain: float
    low: float
    high: float

    @property
    def is_useless(self) -> bool:
        """Whether even the upper end of the interval is too little to label rows for."""
        return self.high < _NO_USE

    def line(self) -> str:
        """The forecast in a sentence, in points."""
        if self.is_useless:
            most = f"{self.more:,} more bring at most {100 * self.high:.1f} points"
            return f"more rows of this kind will not help: {most}"
        interval = f"{100 * self.low:.1f} to {100 * self.high:.1f}"
        return f"{self.more:,} more rows: {100 * self.gain:+.1f} points ({interval})"


def forecast(
    sizes: Floats, errors: Floats, rows_now: int, more: int, num_judged: int | None
) -> Forecast:
    """The gain of `more` rows beyond `rows_now`.

    `errors`: a row for each fold, a column for each of `sizes`, from 0 to 1. `num_judged`: rows of
    a fold, where errors are shares of wrong rows; None: errors of another kind.
    """
    random = np.random.default_rng(0)
    num_folds = len(errors)
    gains = list[float]()
    for _ in range(_RESAMPLES):
        folds = random.integers(0, num_folds, num_folds)
        means = errors[folds].mean(axis=0)
        variance = means * (1 - means) / num_judged if num_judged else errors.var(axis=0)
        # Halved, as all sizes are judged by the same rows, whose luck they share.
        spread = np.sqrt(variance / num_folds) / 2
        gains += _find_gains(sizes, means + random.normal(0, spread), rows_now, more)
    gain = np.mean(_find_gains(sizes, errors.mean(axis=0), rows_now, more))
    low, high = np.quantile(gains, [0.025, 0.975])
    return Forecast(more, float(gain), float(low), float(high))


def _find_gains(sizes: Floats, errors: Floats, rows_now: int, more: int) -> list[float]:
    """The gain of `more` rows by each of the three laws."""
    shares = sizes / sizes[-1]
    errors = np.maximum(errors, _LEAST_ERROR)
    laws = [
        _fit_law(shares, errors, has_floor=False),
        _fit_law(shares, errors, has_floor=True),
        _fit_law(shares[-2:], errors[-2:], has_floor=False),
    ]
    now_and_then = np.array([rows_now, rows_now + more]) / sizes[-1]
    gains = list[float]()
    for law in laws:
        now, then = law(now_and_then)
        gains.append(float(now - then))
    return gains


def _law(sizes: Floats, scale: float, power: float, floor: float = 0.0) -> Floats:
    """Errors of models that learned from these shares of the rows."""
    return scale * sizes**-power + floor


def _fit_law(sizes: Floats, errors: Floats, *, has_floor: bool) -> Callable[[Floats], Floats]:
    """The law with the least squares through some errors."""
    last = float(errors[-1])
    start = [last, 0.3]
    least = [0.0, _LEAST_POWER]
    most = [_MOST_SCALE, _MOST_POWER]
    if has_floor:
        start = [last / 2, 0.5, last / 2]
        least.append(0.0)
        most.append(1.0)

    def misses(parameters: Floats) -> Floats:
        return _law(sizes, *parameters) - errors

    fitted = least_squares(misses, start, bounds=(least, most), max_nfev=200)
    return lambda sizes: _law(sizes, *fitted.x)


def round_number(rows: float) -> int:
    """The largest of 1, 2, 5, 10, 20, 50, … that is not above a number: 999 → 500."""
    rows = max(1.0, rows)
    power = 10 ** int(np.floor(np.log10(rows)))
    steps = [step * power for step in (1, 2, 5)]
    return max(step for step in steps if step <= rows)
