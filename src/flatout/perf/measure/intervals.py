"""Two ways compared by turns: rounds of both, and the ratio of their speeds with a lower and an
upper bound.

A side is a function that works for a while and returns its rate. All sides work once a round, and
every second round goes backwards, so a machine that gets slower or faster treats them alike. The
rates of two sides make an interval:

>>> rates = take_turns([lambda: 100.0, lambda: 150.0], least=3)
>>> str(speedup(*rates))
'1.5× (1.5–1.5)'

The verdict's tries, `tune=auto`, `doctor --confirm` and the benches use it. Each round gives one
ratio; the value is their median. The bounds are two of the ratios: the narrowest pair that holds
the median in nine of ten cases. That takes five rounds: the smallest and the largest of three hold
it in three of four cases, of two in every second. Everything is done in logarithms: swapped sides
give the inverse.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOST_ROUNDS = 12  # more rounds make an interval hardly narrower


@dataclass(frozen=True, slots=True)
class SpeedupInterval:
    """How many times as fast, at least and at most."""

    value: float
    low: float
    high: float

    def __contains__(self, ratio: float) -> bool:
        return self.low <= ratio <= self.high

    def __str__(self) -> str:
        digits = 2 if self.value < 1.5 else 1
        return f"{self.value:.{digits}f}× ({self.low:.{digits}f}–{self.high:.{digits}f})"

    def as_dict(self) -> dict[str, float]:
        return {
            "value": round(self.value, 4),
            "low": round(self.low, 4),
            "high": round(self.high, 4),
        }


def median_of(ratios: Sequence[float]) -> SpeedupInterval:
    """The median of positive ratios, between the two of them that bound it."""
    logs = sorted(map(math.log, ratios))
    count = len(ratios)
    beyond = itertools.accumulate(
        2 * math.comb(count, left_out) * 0.5**count for left_out in range(count)
    )
    # how many may lie beyond each bound
    left_out = max(0, sum(1 - share >= 0.9 for share in beyond) - 1)
    return SpeedupInterval(
        *map(math.exp, (statistics.median(logs), logs[left_out], logs[-1 - left_out]))
    )


def speedup(before: Sequence[float], after: Sequence[float]) -> SpeedupInterval:
    """How many times as fast the second side was, from the rates of both in the same rounds."""
    return median_of([now / was for was, now in zip(before, after, strict=True)])


def take_turns(
    sides: Sequence[Callable[[], float]], *, least: int, most: int | None = None, until: float = 0.0
) -> list[list[float]]:
    """The rates of each side: `least` rounds, and more up to `most` before `until` (of
    `time.perf_counter`).
    """
    rates: list[list[float]] = [[] for _ in sides]
    for number in range(least if most is None else max(least, most)):
        if number >= least and time.perf_counter() > until:
            break
        for side in range(len(sides))[:: -1 if number % 2 else 1]:
            rates[side].append(sides[side]())
    return rates
