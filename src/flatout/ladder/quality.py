"""Whether quality stayed: the difference of two groups that are paired by seed, with its 95 % interval.

A difference of scores, in their own unit. Ratios of speeds have intervals of their own: `perf/measure/intervals.py`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t, 97.5 %, for one degree of freedom and more."""
_T_MANY = 1.96


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of the differences with its 95 % interval; of one pair it has none."""

    value: float
    low: float | None = None
    high: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class Group:
    """Mean and standard deviation of some values; of one value it has none."""

    mean: float
    sd: float | None
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Group:
        sd = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), sd, tuple(values))


def t_value(freedom: int) -> float:
    """Student's t for a 95 % interval."""
    return _T[freedom - 1] if freedom <= len(_T) else _T_MANY + 2.5 / freedom


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Mean of `second - first`, pair by pair, with its 95 % interval."""
    differences = [after - before for before, after in zip(first, second, strict=True)]
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return Difference(mean)
    half = t_value(len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    return Difference(mean, mean - half, mean + half)


def quality_sentence(difference: Difference, allowed: float = 0.5) -> str:
    """Whether quality stayed: by the mean difference in points, and how sure that is."""
    shown = f"{difference.value:+.2f} points"
    if difference.low is not None and difference.high is not None:
        shown += f", 95 % interval {difference.low:+.2f} to {difference.high:+.2f}"
    if difference.value < -allowed:
        return f"a loss beyond {allowed:g} points ({shown})"
    is_sure = difference.low is not None and difference.low >= -allowed
    unsure = "" if is_sure else "; the interval does not rule out a larger loss"
    return f"no loss beyond {allowed:g} points ({shown}{unsure})"
