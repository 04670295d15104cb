"""How often a 95 % interval holds the true score: of groups whose rows are alike, and of few
recordings.

ICC is the share of what decides a row's answer that all rows of its group have in common.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from torch import Tensor

from flatout.tasks.score_intervals import bootstrap

pytestmark = pytest.mark.soak(seconds=45)
SIMULATED = 1_500
ACCURACY = 0.8
ANSWERS = 200  # of a recording
Floats = NDArray[np.float64]


def draw_groups(random: np.random.Generator, groups: int, icc: float, spread: float) -> Floats:
    """Right answers and rows of each group; `spread`: of the logarithm of its rows, around 25."""
    sizes = np.exp(np.log(25) + spread * random.standard_normal(groups))
    rows = np.maximum(1, sizes.round()).astype(int)
    shared = np.sqrt(icc) * random.standard_normal(groups)
    chances = ndtr((ndtri(ACCURACY) - shared) / np.sqrt(1 - icc))
    return np.stack([random.binomial(rows, chances), rows], 1).astype(float)


def draw_recordings(random: np.random.Generator, recordings: int, spread: float) -> Floats:
    """Squared errors and answers of each recording; `spread`: of the logarithm of its RMSE."""
    squares = np.exp(2 * spread * random.standard_normal(recordings))
    return np.stack(
        [squares * random.chisquare(ANSWERS, recordings), np.full(recordings, ANSWERS)], 1
    )


def mean_of(sums: Tensor) -> Tensor:
    return sums[..., 0] / sums[..., 1]


@pytest.mark.parametrize(
    ("groups", "icc", "spread"),
    [(groups, icc, 0.0) for groups in (10, 40) for icc in (0.0, 0.2, 0.4)]
    + [(40, icc, 1.0) for icc in (0.0, 0.2, 0.4)],
)
def test_intervals_over_groups_hold_the_true_accuracy(groups, icc, spread):
    random = np.random.default_rng(1)
    holds = []
    for _ in range(SIMULATED):
        sums = torch.from_numpy(draw_groups(random, groups, icc, spread))
        low, high = bootstrap(sums, lambda sums: {"accuracy": mean_of(sums)})["accuracy"]
        holds.append(low <= ACCURACY <= high)
    print(f"{groups} groups, ICC {icc}, spread {spread}: {np.mean(holds):.1%}")
    assert 0.92 <= np.mean(holds) <= 0.98


@pytest.mark.parametrize("recordings", [10, 30])
@pytest.mark.parametrize(("spread", "least"), [(0.2, 0.92), (0.4, 0.92), (0.8, 0.8)])
def test_intervals_over_few_recordings_hold_the_true_error(recordings, spread, least):
    # With a spread of 0.8 one recording in six has 2.2 times the usual error or more, and few of
    # these are among ten recordings: no interval can know of those that are missing.
    random = np.random.default_rng(2)
    truth = np.exp(spread**2)
    holds = []
    for _ in range(SIMULATED):
        sums = torch.from_numpy(draw_recordings(random, recordings, spread))
        low, high = bootstrap(sums, lambda sums: {"rmse": mean_of(sums).sqrt()})["rmse"]
        holds.append(low <= truth <= high)
    print(f"{recordings} recordings, spread {spread}: {np.mean(holds):.1%}")
    assert least <= np.mean(holds) <= 0.98
