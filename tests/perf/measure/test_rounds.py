"""Sides are measured in turn, forwards and backwards, until there is enough."""

from __future__ import annotations

import time

from flatout.perf.measure.intervals import speedup, take_turns


def test_each_side_works_once_a_round_and_every_second_round_goes_backwards():
    seen = []
    sides = [lambda name=name: seen.append(name) or 1.0 for name in "ab"]
    assert take_turns(sides, least=3) == [[1.0] * 3] * 2
    assert "".join(seen) == "abbaab"


def test_a_machine_that_slows_down_evenly_leaves_the_ratio_alone():
    clock = iter(range(100))
    sides = [lambda speed=speed: speed * 0.9 ** next(clock) for speed in (100.0, 150.0)]
    assert abs(speedup(*take_turns(sides, least=4)).value - 1.5) < 1e-9


def test_more_rounds_are_measured_while_there_is_time_and_no_more_than_asked():
    assert len(take_turns([lambda: 1.0], least=2, most=5, until=time.perf_counter() + 60)[0]) == 5
    assert len(take_turns([lambda: 1.0], least=2, most=5, until=time.perf_counter() - 1)[0]) == 2
