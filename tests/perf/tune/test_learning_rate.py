"""The range test: a rate that rises, and what is read off the losses."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch

from flatout.data.feeding import FeedKind
from flatout.engine.precision import Precision
from flatout.perf.tune.probe import ProbedSetting, range_test
from flatout.perf.tune.reading import LEAST_RATE, MOST_RATE, RANGE_STEPS, smoothed, suggested
from tests.perf.tune.planted import small_parts

RATES = np.geomspace(LEAST_RATE, MOST_RATE, RANGE_STEPS).tolist()


def test_a_smoothed_constant_is_that_constant():
    assert smoothed([2.0] * 5) == pytest.approx([2.0] * 5)


@pytest.mark.parametrize("steepest", [1e-4, 1e-3, 1e-2])
def test_the_steepest_fall_is_found(steepest):
    # falls around the steepest rate, and explodes a hundred times above it
    losses = [
        2.0 - math.tanh(math.log10(rate / steepest) * 2) + (rate / steepest / 100) ** 2
        for rate in RATES
    ]
    found = suggested(RATES, losses)
    assert found is not None
    assert steepest / 2 < found[0] < steepest * 10  # smoothing lags
    assert "smoothed loss" in found[1]


@pytest.mark.parametrize(
    "losses",
    [
        [1.0] * RANGE_STEPS,
        [1.0 + number for number in range(RANGE_STEPS)],
        [math.nan] * RANGE_STEPS,
        [1.0] * 3,
    ],
)
def test_no_rate_is_suggested_where_the_loss_does_not_fall(losses):
    assert suggested(RATES[: len(losses)], losses) is None


def test_a_real_test_raises_the_rate_until_the_loss_rises_and_leaves_the_settings():
    parts = small_parts()
    before = parts.task.optim
    setting = ProbedSetting(feed=FeedKind.resident, precision=Precision.fp32, rows=32, accumulate=1)
    found = range_test(parts, setting, until=time.time() + 60)
    assert parts.task.optim is before
    assert len(found["rates"]) == len(found["losses"]) > 30
    assert found["rates"] == sorted(found["rates"])
    assert found["rates"][0] == LEAST_RATE
    suggestion = suggested(found["rates"], found["losses"])
    assert suggestion is not None
    assert 1e-4 < suggestion[0] < 1
    assert torch.isfinite(torch.tensor(found["losses"][:20])).all()
