"""The intervals of an audit hold the true score as often as they say."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import ndtri

from flatout.audit.findings import describe_span
from flatout.audit.measure import bootstrap_mean

ACCURACY = 0.8


@pytest.mark.parametrize("alike", [0.0, 0.2, 0.4])
def test_an_interval_over_groups_holds_the_true_score_however_alike_their_rows_are(
    alike: float,
) -> None:
    random = np.random.default_rng(3)
    groups = np.repeat(np.arange(40), 25)
    holds = []
    for _ in range(150):
        shared = np.sqrt(alike) * random.normal(size=40)[groups]
        alone = np.sqrt(1 - alike) * random.normal(size=len(groups))
        is_right = shared + alone < ndtri(ACCURACY)
        _, low, high = bootstrap_mean(is_right.astype(float), groups)
        holds.append(low <= ACCURACY <= high)
    assert 0.89 <= np.mean(holds) <= 0.99


def test_rows_that_stand_alone_have_the_interval_of_single_rows() -> None:
    is_right = np.random.default_rng(4).random(400) < ACCURACY
    mean, low, high = bootstrap_mean(is_right.astype(float), np.arange(400))
    half_width = 1.96 * np.sqrt(mean * (1 - mean) / 400)
    assert (low, high) == pytest.approx((mean - half_width, mean + half_width), abs=0.006)


def test_there_is_no_interval_of_fewer_than_ten_groups() -> None:
    is_right = np.arange(90) % 3 > 0
    mean, low, high = bootstrap_mean(is_right.astype(float), np.arange(90) % 9)
    assert mean == pytest.approx(2 / 3)
    assert np.isnan([low, high]).all()
    assert describe_span(low, high) == "no interval: fewer than 10 rows or groups"
