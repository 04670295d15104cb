"""Several sides measured in turn: the one way in which speeds are compared here.

A side is a function that works for a while and returns its rate. All sides work once a round, and every second round
goes backwards, so a machine that gets slower or faster treats them alike. The rates of two sides make an interval:

>>> from flatout.perf.measure.intervals import speedup
>>> rates = take_turns([lambda: 100.0, lambda: 150.0], least=3)
>>> str(speedup(*rates))
'1.5× (1.5–1.5)'

The verdict's tries, `tune=auto`, `doctor --confirm` and the benches all use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

MOST_ROUNDS = 12
"""More rounds make an interval hardly narrower."""


def take_turns(
    sides: Sequence[Callable[[], float]], *, least: int, most: int | None = None, until: float = 0.0
) -> list[list[float]]:
    """The rates of each side: `least` rounds, and more up to `most` before `until` (of `time.perf_counter`)."""
    rates: list[list[float]] = [[] for _ in sides]
    for number in range(least if most is None else max(least, most)):
        if number >= least and time.perf_counter() > until:
            break
        order = range(len(sides)) if number % 2 == 0 else reversed(range(len(sides)))
        for side in order:
            rates[side].append(sides[side]())
    return rates
