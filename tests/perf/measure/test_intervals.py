"""A ratio's bounds hold its value, do not depend on units, and turn over when the sides are
swapped.
"""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as some

from flatout.perf.measure.intervals import SpeedupInterval, median_of, speedup
from flatout.perf.verdict.findings import carried_over

RATES = some.lists(
    some.tuples(some.floats(0.01, 1e6), some.floats(0.01, 1e6)), min_size=1, max_size=15
)


@given(RATES)
def test_the_bounds_are_ratios_that_were_measured_and_hold_the_value(rates):
    found = speedup(*zip(*rates, strict=True))
    ratios = [after / before for before, after in rates]
    assert found.low <= found.value * (1 + 1e-12)
    assert found.value <= found.high * (1 + 1e-12)
    assert min(ratios) <= found.low * (1 + 1e-12)
    assert found.high <= max(ratios) * (1 + 1e-12)


@given(RATES, some.floats(0.1, 10), some.floats(0.1, 10))
def test_units_do_not_matter_and_a_faster_side_moves_all_three_alike(rates, unit, faster):
    before, after = zip(*rates, strict=True)
    found = speedup(before, after)
    other = speedup([unit * each for each in before], [unit * faster * each for each in after])
    expected = [faster * each for each in (found.value, found.low, found.high)]
    assert [other.value, other.low, other.high] == pytest.approx(expected, rel=1e-9)


@given(RATES)
def test_swapped_sides_give_the_inverse(rates):
    before, after = zip(*rates, strict=True)
    there = speedup(before, after)
    back = speedup(after, before)
    assert [back.value, back.low, back.high] == pytest.approx(
        [1 / there.value, 1 / there.high, 1 / there.low]
    )


@given(RATES)
def test_a_gain_of_a_run_holds_that_of_its_steps_around_the_same_value(rates):
    found = speedup(*zip(*rates, strict=True))
    wide = carried_over(found.value, found.low, found.high)
    assert wide.value == found.value
    assert wide.low <= found.low <= found.high <= wide.high


def test_few_rounds_give_the_smallest_and_the_largest_many_leave_the_outermost_out():
    assert (median_of([1.0, 2.0, 4.0]).low, median_of([1.0, 2.0, 4.0]).high) == pytest.approx(
        (1.0, 4.0)
    )
    many = median_of([float(each) for each in range(1, 13)])
    assert (many.low, many.high) == pytest.approx((3.0, 10.0))


def test_the_bounds_hold_the_true_ratio_in_nine_of_ten_noisy_measurements():
    noise = random.Random(0)
    hits = 0
    for _ in range(400):
        first = draw_times(noise, 8)
        second = draw_times(noise, 8)
        hits += 1.5 in speedup(first, [1.5 * time for time in second])
    assert hits / 400 > 0.88


def draw_times(noise: random.Random, rounds: int) -> list[float]:
    """Times around 1 with a spread of a tenth."""
    return [math.exp(noise.gauss(0, 0.1)) for _ in range(rounds)]


@pytest.mark.parametrize(
    ("rounds", "share"),
    [
        (2, 0.5),
        (3, 0.75),
        (5, 0.94),
    ],
)
def test_few_rounds_hold_the_true_ratio_as_often_as_the_docs_say(rounds: int, share: float) -> None:
    noise = random.Random(rounds)
    measured = [median_of(draw_times(noise, rounds)) for _ in range(2_000)]
    assert statistics.fmean(1.0 in interval for interval in measured) == pytest.approx(
        share, abs=0.04
    )


def test_an_interval_reads_as_in_a_verdict():
    assert str(SpeedupInterval(1.62, 1.41, 1.94)) == "1.6× (1.4–1.9)"
    assert str(SpeedupInterval(1.18, 1.07, 1.31)) == "1.18× (1.07–1.31)"
