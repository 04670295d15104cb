"""Sides are measured in turn, forwards and backwards, until there is enough."""

from __future__ import annotations

import time
from functools import partial

from flatout.perf.measure.intervals import speedup, take_turns


def test_each_side_works_once_a_round_and_every_second_round_goes_backwards():
    seen = []
    sides = [lambda name=name: seen.append(name) or 1.0 for name in "ab"]
    times_of_first, times_of_second = take_turns(sides, least=3)
    assert times_of_first == [1.0] * 3
    assert times_of_second == [1.0] * 3
    assert "".join(seen) == "abbaab"


def test_a_machine_that_slows_down_evenly_leaves_the_ratio_alone():
    clock = iter(range(100))

    def measure(speed: float) -> float:
        return speed * 0.9 ** next(clock)

    sides = [partial(measure, 100.0), partial(measure, 150.0)]
    ratio = speedup(*take_turns(sides, least=4)).value
    assert abs(ratio - 1.5) < 1e-9


def test_more_rounds_are_measured_while_there_is_time_and_no_more_than_asked():
    now = time.perf_counter()
    (with_time,) = take_turns([lambda: 1.0], least=2, most=5, until=now + 60)
    assert len(with_time) == 5
    (without_time,) = take_turns([lambda: 1.0], least=2, most=5, until=now - 1)
    assert len(without_time) == 2
