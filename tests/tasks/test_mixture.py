"""The weights by which a network and a linear model answer together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.data.problem import Problem
from flatout.tasks.mixture import Mixture, fit_mixture, log_shares


def scores(targets_B: Tensor, right: float, seed: int, classes: int = 3) -> Tensor:
    """Log-probabilities that have such a share of the targets right, and are sure of it."""
    draw = torch.Generator().manual_seed(seed)
    is_right_B = torch.rand(len(targets_B), generator=draw) < right
    others_B = (targets_B + 1) % classes
    answers_B = torch.where(is_right_B, targets_B, others_B)
    return (3 * F.one_hot(answers_B, classes).float()).log_softmax(-1)


def targets(rows: int) -> Tensor:
    return torch.randint(3, (rows,), generator=torch.Generator().manual_seed(0))


def share_right(outputs_BC: Tensor, targets_B: Tensor) -> float:
    return float((outputs_BC.argmax(-1) == targets_B).float().mean())


def test_the_better_model_gets_the_greater_weight():
    rows = targets(400)
    good = scores(rows, 0.9, seed=1)
    poor = scores(rows, 0.4, seed=2)
    network_is_good = fit_mixture(good, poor, rows)
    linear_is_good = fit_mixture(poor, good, rows)
    assert network_is_good.mixture.network > 2 * network_is_good.mixture.linear
    assert linear_is_good.mixture.linear > 2 * linear_is_good.mixture.network


def test_both_together_are_right_more_often_than_each_alone():
    rows = targets(2_000)
    network = scores(rows, 0.7, seed=1) + 0.5 * scores(rows, 0.7, seed=3)
    linear = scores(rows, 0.75, seed=2) + 0.5 * scores(rows, 0.7, seed=4)
    fitted = fit_mixture(network[:1_000], linear[:1_000], rows[:1_000])
    mixed = share_right(fitted.mixture.mix(network[1_000:], linear[1_000:]), rows[1_000:])
    assert fitted.loss < min(fitted.loss_of_network, fitted.loss_of_linear)
    assert mixed > share_right(network[1_000:], rows[1_000:])
    assert mixed > share_right(linear[1_000:], rows[1_000:])


@pytest.mark.parametrize("rows", [1, 3])
def test_a_few_rows_leave_the_answers_to_the_linear_model(rows):
    held_out = targets(rows)
    fitted = fit_mixture(
        scores(held_out, 1.0, seed=1),
        scores(held_out, 0.0, seed=2),
        held_out,
    )
    others = targets(50)
    linear = scores(others, 0.8, seed=3)
    mixed = fitted.mixture.mix(scores(others, 0.3, seed=4), linear)
    assert torch.equal(mixed.argmax(-1), linear.argmax(-1))
    assert fitted.helps


def test_a_linear_model_that_adds_nothing_to_many_rows_is_left_out():
    rows = targets(1_000)
    says_nothing = torch.zeros(1_000, 3).log_softmax(-1)
    assert not fit_mixture(scores(rows, 0.8, seed=1), says_nothing, rows).helps


def test_a_mixture_adds_what_both_say():
    mixed = Mixture(0.5, 2.0).mix(torch.tensor([[2.0, 4.0]]), torch.tensor([[1.0, 0.0]]))
    assert mixed.tolist() == [[3.0, 2.0]]


@pytest.mark.parametrize(
    ("problem", "back"),
    [(Problem.single, torch.softmax), (Problem.multi, None)],
)
def test_probabilities_become_what_gives_them_back(problem, back):
    shares = np.array([[0.25, 0.75], [0.5, 0.5]])
    outputs = log_shares(shares, problem)
    again = torch.sigmoid(outputs) if back is None else back(outputs, -1)
    assert np.allclose(again.numpy(), shares, atol=1e-6)


def test_a_class_that_is_impossible_to_the_linear_model_stays_possible():
    outputs = log_shares(np.array([[0.0, 1.0]]), Problem.single)
    assert torch.isfinite(outputs).all()
