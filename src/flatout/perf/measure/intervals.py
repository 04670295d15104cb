"""Compare the speed of two functions in turns, and give the ratio an interval.

A side is a function that works for a while and returns its rate. Each side works once in a round,
and every second round goes backwards. So a machine that becomes slower or faster treats all sides
alike. The rates of two sides give an interval:

>>> rates = take_turns([lambda: 100.0, lambda: 150.0], least=3)
>>> str(speedup(*rates))
'1.5× (1.5–1.5)'

Each round gives one ratio, and the value is their median. The bounds are two of the ratios: the
narrowest pair that contains the true median in nine of ten cases. That takes five rounds. The
smallest and largest of three ratios contain it in three of four cases, of two in half of them.
Logarithms are used throughout, so that swapped sides give the inverse. The verdict's tries,
`doctor --confirm` and the benches use this.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOST_ROUNDS = 12  # more rounds make an interval hardly narrower


@dataclass(frozen=True, slots=True)
class SpeedupInterval:
    """A speedup: how many times as fast, with bounds."""

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
    """The median of positive ratios, and the two ratios that bound it."""
    logs = sorted(map(math.log, ratios))
    count = len(ratios)
    # Each ratio lies below the true median with probability 1/2, like a coin. The bounds miss it if
    # at most `outside` coins of `count` show one side, or the other: for 5 ratios, 2 · 1/32 at 0,
    # 2 · 6/32 at 1. So only 0 ratios may lie outside each bound then.
    outside = 0
    missing = 2 * 0.5**count
    while outside < count - 1:
        missing += 2 * math.comb(count, outside + 1) * 0.5**count
        if 1 - missing < 0.9:
            break
        outside += 1
    numbers = (statistics.median(logs), logs[outside], logs[-1 - outside])
    return SpeedupInterval(*map(math.exp, numbers))


def speedup(before: Sequence[float], after: Sequence[float]) -> SpeedupInterval:
    """How many times as fast the second side was; both lists hold rates of the same rounds."""
    return median_of([now / was for was, now in zip(before, after, strict=True)])


def take_turns(
    sides: Sequence[Callable[[], float]], *, least: int, most: int | None = None, until: float = 0.0
) -> list[list[float]]:
    """The rates of each side, one for each round.

    There are `least` rounds, and more up to `most` until `until`, a time of `time.perf_counter`.
    """
    rates: list[list[float]] = [[] for _ in sides]
    forward = list(zip(sides, rates, strict=True))
    for number in range(least if most is None else max(least, most)):
        if number >= least and time.perf_counter() > until:
            break
        for side, rates_of_side in reversed(forward) if number % 2 else forward:
            rates_of_side.append(side())
    return rates
