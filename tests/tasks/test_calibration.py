"""Probabilities that are as often right as they say."""

from __future__ import annotations

import pytest
import torch

from flatout.tasks.calibration import best_thresholds, calibrated, calibration_error


def drawn(logits: torch.Tensor) -> torch.Tensor:
    """Targets drawn as likely as the logits say."""
    return torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(0)).squeeze(1)


@pytest.mark.parametrize("stretched", [0.4, 1.0, 3.0])
def test_the_temperature_undoes_what_stretched_the_logits(stretched: float) -> None:
    logits = 2 * torch.randn(20_000, 4, generator=torch.Generator().manual_seed(1))
    found = calibrated(logits * stretched, drawn(logits))
    assert found.temperature == pytest.approx(stretched, rel=0.05)
    assert found.error_after < 0.02
    assert found.error_after <= found.error_before + 0.005


def test_the_calibration_error_is_the_distance_of_sureness_from_being_right() -> None:
    shares = torch.tensor([[0.9, 0.1]] * 10)
    targets = torch.tensor([0] * 6 + [1] * 4)
    assert calibration_error(shares, targets) == pytest.approx(0.3)


def test_a_threshold_is_where_f1_is_best_and_one_half_for_what_is_too_rare_to_tell() -> None:
    has = torch.cat([torch.ones(30), torch.zeros(70)])
    shares = torch.cat([torch.linspace(0.3, 0.4, 30), torch.linspace(0.0, 0.2, 70)])
    rare = torch.zeros(100)
    rare[:3] = 1
    found = best_thresholds(torch.stack([shares, shares], 1), torch.stack([has, rare], 1))
    assert 0.2 < found[0] < 0.3
    assert found[1] == 0.5
