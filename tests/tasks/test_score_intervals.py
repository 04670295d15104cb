"""An interval holds the score that the rows' whole population has, whatever the kind of metric and
the batches.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from flatout.bits.scores import GramMetrics
from flatout.data.problem import Problem
from flatout.tasks.metrics import TaskMetrics
from flatout.tasks.score_intervals import RowSums, bootstrap
from flatout.tasks.sequence_scores import SequenceScores
from flatout.tasks.tagging import EntityScores
from tests.params import at_once

SIMULATED = 40


def judged(
    problem: Problem,
    outputs: torch.Tensor,
    targets: torch.Tensor,
    classes: int,
    batch: int = 0,
) -> TaskMetrics:
    metrics = TaskMetrics.build(problem, [f"class {i}" for i in range(classes)])
    for rows in torch.arange(len(targets)).split(batch or len(targets)):
        metrics.update(outputs[rows], targets[rows], rows)
    return metrics


def drawn(problem: Problem, rows: int, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers that are right more often than not."""
    if problem is Problem.regression:
        targets = 3 + torch.randn(rows)
        noise = 0.5 * torch.randn(rows)
        return targets + noise, targets
    if problem is Problem.multi:
        targets = (torch.rand(rows, classes) < 0.3).float()
        noise = torch.randn(rows, classes)
        return 2 * targets - 1 + noise, targets
    targets = (classes * torch.rand(rows) ** 2).long()
    noise = torch.randn(rows, classes)
    return noise + 1.5 * torch.nn.functional.one_hot(targets, classes), targets


PROBLEMS = [
    (Problem.single, 2),
    (Problem.single, 4),
    (Problem.multi, 4),
    (Problem.regression, 1),
]


@pytest.mark.parametrize(("problem", "classes"), PROBLEMS)
def test_the_sums_of_the_rows_make_the_metrics_themselves(problem, classes):
    metrics = judged(problem, *drawn(problem, 300, classes), classes)
    values = metrics.compute()
    total = metrics.sums.gathered().sum(0)
    for name, value in metrics.values_of(total).items():
        assert float(value) == pytest.approx(values[name], rel=1e-5)
    assert set(metrics.intervals()) == set(values)


@pytest.mark.parametrize(("problem", "classes"), at_once(PROBLEMS[0], of=PROBLEMS, seconds=1))
def test_intervals_hold_the_score_of_the_whole_population(problem, classes):
    whole = judged(problem, *drawn(problem, 30_000, classes), classes).compute()
    held = dict.fromkeys(whole, 0)
    for _ in range(SIMULATED):
        sample = judged(problem, *drawn(problem, 300, classes), classes)
        for name, (low, high) in sample.intervals().items():
            held[name] += low <= whole[name] <= high
    assert all(count >= 0.86 * SIMULATED for count in held.values()), held
    assert sum(held.values()) < len(held) * SIMULATED  # 95 %, not all of them


@pytest.mark.parametrize("rows", [500, 9000])
def test_batches_and_their_order_change_no_interval(rows):
    outputs, targets = drawn(Problem.single, rows)
    shuffled = torch.randperm(rows)
    metrics = TaskMetrics.build(Problem.single, list("abcd"))
    for part in shuffled.split(77):
        metrics.update(outputs[part], targets[part], part)
    whole = judged(Problem.single, outputs, targets, 4).intervals()
    for name, ends in metrics.intervals().items():
        assert ends == pytest.approx(whole[name], abs=1e-9)


def test_many_rows_added_up_in_groups_have_the_interval_of_single_rows():
    outputs, targets = drawn(Problem.single, 50_000)
    low, high = judged(Problem.single, outputs, targets, 4).intervals()["accuracy"]
    is_right = outputs.argmax(1) == targets
    accuracy = float(is_right.double().mean())
    variance = accuracy * (1 - accuracy) / 50_000
    half = 1.96 * variance**0.5
    assert low == pytest.approx(accuracy - half, abs=half / 8)
    assert high == pytest.approx(accuracy + half, abs=half / 8)


def test_the_interval_of_an_auroc_is_that_of_resampled_rows():
    outputs, targets = drawn(Problem.single, 400, 2)
    scores = outputs.softmax(-1)[:, 1].numpy()
    random = np.random.default_rng(1)
    picks = random.integers(0, 400, (300, 400))
    resampled = [sk.roc_auc_score(targets.numpy()[pick], scores[pick]) for pick in picks]
    ends = np.quantile(resampled, [0.025, 0.975])
    found = judged(Problem.single, outputs, targets, 2).intervals()["auroc"]
    assert found == pytest.approx(ends, abs=0.01)


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_few_rows_have_no_interval(rows):
    assert judged(Problem.single, *drawn(Problem.single, rows), 4).intervals() == {}


def test_rows_that_are_all_right_or_of_one_class_say_nothing_of_their_spread():
    targets = torch.ones(50, dtype=torch.long)
    sure = torch.nn.functional.one_hot(targets, 3).float()
    assert judged(Problem.single, sure, targets, 3).intervals() == {}
    sure[:9] = 0.0
    found = judged(Problem.single, sure, targets, 3).intervals()
    assert found["accuracy"][0] < 41 / 50 < found["accuracy"][1]
    assert "auroc" not in found  # one class alone has no curve


def test_entities_are_resampled_by_rows():
    given = [[0, 1, 0, 0], [1, 2, 0, 3]] * 100
    answers = list(given)
    answers[::5] = [[0] * 4] * 40
    offsets = np.arange(0, 801, 4)
    scores = EntityScores(["person", "place"])
    scores.add(np.ravel(answers), np.ravel(given), offsets, np.zeros(200, np.bool_))
    found = scores.intervals()
    values = scores.values()
    assert values["recall"] == pytest.approx(0.8)
    for name in ("f1", "recall", "macro_f1", "word_accuracy"):
        assert found[name][0] < values[name] < found[name][1]
    assert "precision" not in found  # all that was found is right
    assert found["recall"][1] - found["recall"][0] == pytest.approx(0.11, abs=0.03)


def test_entities_of_a_document_are_drawn_together():
    given = [[0, 1, 0, 0], [1, 2, 0, 3]] * 20
    answers = [*given[:30], *[[0] * 4] * 10]
    offsets = np.arange(0, 161, 4)

    def interval(documents: torch.Tensor) -> tuple[float, float] | None:
        scores = EntityScores(["person", "place"])
        scores.add(
            np.ravel(answers),
            np.ravel(given),
            offsets,
            np.zeros(40, np.bool_),
            documents,
        )
        return scores.intervals().get("recall")

    alone = interval(torch.arange(40))
    together = interval(torch.arange(40) // 4)
    assert together[1] - together[0] > 1.5 * (alone[1] - alone[0])
    assert interval(torch.arange(40) // 5) is None


def test_recordings_are_resampled_whole():
    scores = SequenceScores(40, ["a", "b"], [2.0, 10.0])
    offsets = torch.randn(30)
    # a recording's errors are nearly all alike
    answers = (offsets[:, None] + 0.01 * torch.randn(30, 500)).flatten()
    both = torch.stack([answers, answers + 0.001], 1)
    scores.add(
        both,
        torch.zeros_like(both),
        torch.arange(30).repeat_interleave(500),
    )
    values = scores.values()
    found = scores.intervals()
    # what all resamples leave below, and truths without spread
    assert set(values) - set(found) <= {"max_error", "r2"}
    for name in ("rmse", "mae", "mse_scaled", "rmse_b"):
        assert found[name][0] < 0.9 * values[name] < 1.1 * values[name] < found[name][1]
    few = SequenceScores(5, ["a"], [1.0])
    few.add(
        answers[:2500, None],
        torch.zeros(2500, 1),
        torch.arange(5).repeat_interleave(500),
    )
    assert few.intervals() == {}


def test_records_of_grams_have_intervals_at_the_threshold_that_is_given():
    targets = (torch.rand(300, 20) < 0.3).float()
    scores = (targets + 0.4 * torch.randn(300, 20)).clamp(0, 1)
    metrics = GramMetrics(0.5)
    metrics.update(scores, targets, torch.arange(300))
    values = metrics.compute()
    found = metrics.intervals()
    assert set(found) == set(values)
    assert all(low < values[name] < high for name, (low, high) in found.items())
    metrics.reset()
    assert metrics.intervals() == {}


def test_a_hundred_thousand_rows_take_less_than_two_seconds():
    metrics = judged(Problem.single, *drawn(Problem.single, 100_000, 8), 8, batch=4096)
    started = time.process_time()
    assert len(metrics.intervals()) == 5
    assert time.process_time() - started < 2


def test_the_sums_of_very_many_classes_stay_small():
    assert RowSums(30_001).gathered().numel() < 10_000_000
    assert (
        bootstrap(
            torch.ones(20, 2),
            lambda sums: {"mean": sums[:, 0] / sums[:, 1]},
        )
        == {}
    )


def test_few_recordings_of_unlike_errors_have_a_wider_interval_than_resamples_of_them_span():
    squares = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 9.0]).double()
    sums = torch.stack([squares, torch.ones(10)], 1)

    def values_of(sums):
        return {"rmse": (sums[..., 0] / sums[..., 1]).sqrt()}

    low, high = bootstrap(sums, values_of)["rmse"]
    rmse = float(values_of(sums.sum(0))["rmse"])
    drawn = np.random.default_rng(0).integers(0, 10, (1_000, 10))
    resampled = np.sqrt(squares.numpy()[drawn].mean(1))
    # A large error may be missing among so few, so the interval reaches up further than down.
    assert high > np.quantile(resampled, 0.975)
    assert high - rmse > 1.5 * (rmse - low)
    assert high <= 3.0  # the error of the worst recording alone


def test_groups_that_score_nearly_alike_have_an_interval_that_ends_at_the_best_score():
    right = torch.tensor([20.0] * 9 + [17.0]).double()
    sums = torch.stack([right, torch.full((10,), 20.0)], 1)
    with torch.inference_mode():  # as in a predictor
        found = bootstrap(sums, lambda sums: {"accuracy": sums[..., 0] / sums[..., 1]})
    low, high = found["accuracy"]
    assert low < 0.985 < high <= 1.0
