"""Ridge regression from sums: parts add up, and the weights are those of the definition."""

from __future__ import annotations

import pytest
import torch

from flatout.baselines.ridge import RidgeSums


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    inputs_ND = torch.randn(40, 3, generator=draw).double() + 5
    noise_NO = 0.1 * torch.randn(40, 2, generator=draw).double()
    return inputs_ND, inputs_ND @ torch.tensor([[1.0, 0], [0, 2], [3, 0]]).double() + noise_NO


def test_the_error_and_the_penalty_pull_equally_at_the_weights(rows):
    inputs_ND, answers_NO = rows
    weight_DO, mean_D, mean_O = RidgeSums.of(inputs_ND, answers_NO).solve(2.0)
    errors_NO = (inputs_ND - mean_D) @ weight_DO + mean_O - answers_NO
    pull_DO = (inputs_ND - mean_D).T @ errors_NO
    torch.testing.assert_close(pull_DO, -2.0 * weight_DO)
    torch.testing.assert_close(mean_O, answers_NO.mean(0))


def test_sums_of_parts_give_the_model_of_all_rows(rows):
    inputs_ND, answers_NO = rows
    whole = RidgeSums.of(inputs_ND, answers_NO)
    parts = RidgeSums.of(inputs_ND[:9], answers_NO[:9])
    parts += RidgeSums.of(inputs_ND[9:], answers_NO[9:])
    assert parts.num_rows == whole.num_rows == 40
    for of_parts, of_whole in zip(parts.solve(1.0), whole.solve(1.0), strict=True):
        torch.testing.assert_close(of_parts, of_whole)


def test_a_growing_penalty_is_the_same_up_to_a_thousand_rows(rows):
    sums = RidgeSums.of(*rows)
    assert sums.growing(3.0) == 3.0
    assert RidgeSums.of(*(part.repeat(100, 1) for part in rows)).growing(3.0) == 12.0
