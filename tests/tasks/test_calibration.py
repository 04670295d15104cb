"""Probabilities that are as often right as they say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flatout.tasks.calibration import (
    _first_half,
    as_two_classes,
    best_thresholds,
    calibrated,
    calibration_error,
)


def drawn(logits: torch.Tensor) -> torch.Tensor:
    """Targets drawn as likely as the logits say."""
    random = torch.Generator().manual_seed(0)
    shares = logits.softmax(-1)
    return torch.multinomial(shares, 1, generator=random).squeeze(1)


def spread_logits(rows: int = 20_000) -> torch.Tensor:
    """Logits of four classes, of rows that are sure and of rows that are not."""
    random = torch.Generator().manual_seed(1)
    return 2 * torch.randn(rows, 4, generator=random)


@pytest.mark.parametrize("stretched", [0.4, 1.0, 3.0])
def test_the_temperature_undoes_what_stretched_the_logits(stretched: float) -> None:
    logits = spread_logits()
    found = calibrated(logits * stretched, drawn(logits))
    assert found.temperature == pytest.approx(stretched, rel=0.05)
    assert found.error_after < 0.02
    assert found.error_after <= found.error_before + 0.005


def test_a_temperature_that_does_not_help_on_the_other_half_is_left_out():
    logits = spread_logits()
    targets = drawn(logits)
    rows = torch.arange(20_000)
    is_fitted = _first_half(rows)
    of_two_kinds = torch.where(is_fitted.unsqueeze(1), 3 * logits, logits)
    found = calibrated(of_two_kinds, targets, rows)
    assert found.fitted == pytest.approx(3.0, rel=0.05)
    assert found.temperature == 1.0
    assert found.error_after == found.error_before < 0.03 < found.error_fitted
    said: list[str] = []
    found.report(SimpleNamespace(decision=lambda *parts: said.extend(parts)))
    assert "did not lower the held-out loss" in said[2]


def test_a_temperature_is_judged_on_rows_it_has_not_seen():
    logits = spread_logits()
    targets = drawn(logits)
    rows = torch.arange(20_000)
    others = ~_first_half(rows)
    found = calibrated(3 * logits, targets, rows)
    shares = (3 * logits / found.temperature).softmax(-1)
    held_out_error = calibration_error(shares[others], targets[others])
    assert found.error_after == pytest.approx(held_out_error)
    spoilt = torch.where(others, (targets + 1) % 4, targets)
    assert calibrated(3 * logits, spoilt, rows).fitted == found.fitted


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 10, 1024])
def test_halves_are_halves_whatever_pattern_the_numbers_of_rows_have(stride):
    for start in range(3):
        rows = torch.arange(start, 1000 * stride, stride)
        share = _first_half(rows).double().mean()
        assert 0.45 < share < 0.55


def test_several_labels_a_row_are_calibrated_each_as_present_or_absent():
    random = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(6000, 3, generator=random)
    targets = (torch.rand(6000, 3, generator=random) < logits.sigmoid()).float()
    choices, answers, rows = as_two_classes(3 * logits, targets, torch.arange(6000))
    present = choices.softmax(-1)[:, 1].view(6000, 3)
    torch.testing.assert_close(present, (3 * logits).sigmoid())
    assert rows[:4].tolist() == [0, 0, 0, 1]
    assert torch.equal(answers.view(6000, 3), targets.long())
    found = calibrated(choices, answers, rows)
    assert found.temperature == pytest.approx(3.0, rel=0.05)
    assert found.error_after < 0.02 < found.error_before


def test_a_single_row_is_left_as_it_is():
    logits = torch.tensor([[2.0, 0.0]])
    targets = torch.tensor([1])
    assert calibrated(logits, targets).temperature == 1.0


def test_the_calibration_error_is_the_distance_of_sureness_from_being_right() -> None:
    shares = torch.tensor([[0.9, 0.1]] * 10)
    targets = torch.tensor([0] * 6 + [1] * 4)
    assert calibration_error(shares, targets) == pytest.approx(0.3)


def test_a_threshold_is_where_f1_is_best_and_one_half_for_what_is_too_rare_to_tell() -> None:
    has = torch.cat([torch.ones(30), torch.zeros(70)])
    shares = torch.cat([torch.linspace(0.3, 0.4, 30), torch.linspace(0.0, 0.2, 70)])
    rare = torch.zeros(100)
    rare[:3] = 1
    labels = torch.stack([has, rare], 1)
    found = best_thresholds(torch.stack([shares, shares], 1), labels)
    assert 0.2 < found[0] < 0.3
    assert found[1] == 0.5


def test_a_threshold_lies_where_f1_is_best_among_equal_probabilities_too() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        shares = (torch.rand(200, 1, generator=generator) * 4).round() / 4
        has = (torch.rand(200, 1, generator=generator) < shares / 2 + 0.05).float()

        def f1(least: float, shares: torch.Tensor = shares, has: torch.Tensor = has) -> float:
            answers = shares >= least
            right = (answers * has).sum()
            return float(2 * right / (answers.sum() + has.sum()))

        threshold = best_thresholds(shares, has)[0]
        assert f1(threshold) == max(map(f1, shares.unique().tolist()))


def sure_rows(count: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of five classes, right in some 96 of 100 rows, and targets drawn as likely as they
    say.
    """
    logits = 3 * torch.randn(count, 5, generator=random)
    tops = torch.randint(0, 5, (count, 1), generator=random)
    logits.scatter_add_(1, tops, torch.full((count, 1), 9.0))
    targets = torch.multinomial(logits.softmax(-1), 1, generator=random).squeeze(1)
    return logits, targets


def loss(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> float:
    return float(torch.nn.functional.cross_entropy(logits / temperature, targets))


@pytest.mark.parametrize("rows", [40, 60, 100, 200])
def test_few_rows_without_an_error_do_not_make_a_model_absurdly_sure(rows: int) -> None:
    random = torch.Generator().manual_seed(rows)
    logits, targets = sure_rows(20_000, random)
    used = [calibrated(*sure_rows(rows, random)) for _ in range(60)]
    assert all(0.1 < found.fitted < 10 for found in used)
    losses = [loss(logits, targets, found.temperature) for found in used]
    mean_loss = sum(losses) / len(losses)
    assert mean_loss <= loss(logits, targets, 1.0) + 0.005


@pytest.mark.parametrize("stretched", [0.5, 3.0])
def test_400_rows_suffice_for_a_model_that_is_far_too_sure_or_unsure(stretched: float) -> None:
    random = torch.Generator().manual_seed(5)
    for _ in range(10):
        logits, targets = sure_rows(400, random)
        found = calibrated(stretched * logits, targets)
        assert 0.6 < found.temperature / stretched < 1.6
