"""Differences of seeds, and the sentence on them."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.ladder.compare_runs import Estimate, Group, paired_difference, quality_sentence


@given(st.lists(st.tuples(st.floats(-100, 100), st.floats(-100, 100)), min_size=1, max_size=8))
def test_a_paired_difference_is_the_difference_of_the_means(pairs):
    first, second = (list(each) for each in zip(*pairs, strict=True))
    found = paired_difference(first, second)
    assert found.value == pytest.approx(Group.of(second).mean - Group.of(first).mean, abs=1e-9)
    assert (found.low is None) == (len(pairs) == 1)


def test_the_interval_of_three_pairs_is_student_s():
    # differences 1, 2, 3: mean 2, sd 1, t(2) = 4.30265
    found = paired_difference([10.0, 10.0, 10.0], [11.0, 12.0, 13.0])
    half = 4.302653 / math.sqrt(3)
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0 - half, 2.0 + half))


def test_pairs_that_share_their_luck_have_a_narrow_interval():
    found = paired_difference([80.0, 90.0, 70.0], [80.1, 90.1, 70.1])
    assert found.high - found.low < 1e-6


@pytest.mark.parametrize(
    ("pairs", "t"),
    [
        (2, 12.7062),
        (5, 2.77645),
        (21, 2.08596),
        (200, 1.97196),
    ],
)
def test_the_factor_of_an_interval_is_student_s_for_any_number_of_pairs(pairs, t):
    differences = [float(number % 2) for number in range(pairs)]
    found = paired_difference([0.0] * pairs, differences)
    assert found.high - found.value == pytest.approx(
        t * statistics.stdev(differences) / math.sqrt(pairs), rel=1e-5
    )


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        (
            Estimate(-0.1, -0.3, 0.1),
            "no loss beyond 0.5 points (-0.10 points, 95 % interval -0.30 to +0.10)",
        ),
        (Estimate(-0.1, -0.9, 0.7), "the interval does not rule out a larger loss"),
        (
            Estimate(2.0),
            (
                "no loss beyond 0.5 points (+2.00 points; a single pair does not rule out a larger"
                " loss)"
            ),
        ),
        (Estimate(-0.8, -1.0, -0.6), "a loss beyond 0.5 points (-0.80 points"),
    ],
)
def test_the_sentence_on_quality_states_a_loss_or_none(difference, words):
    assert words in quality_sentence(difference)
    assert quality_sentence(difference).startswith("a loss") == (difference.value < -0.5)
