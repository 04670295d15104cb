"""Metrics equal scikit-learn's, whole or in batches, also where a class never occurs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torchmetrics.classification import MulticlassAUROC

from flatout.data.problem import Problem
from flatout.tasks.metrics import (
    TaskMetrics,
    monitored_metric,
    require_metric,
)
from tests.refusals import refused


def measured(
    problem: Problem,
    classes: int,
    outputs: torch.Tensor,
    targets: torch.Tensor,
    batch: int = 7,
):
    metrics = TaskMetrics.build(problem, [f"class {i}" for i in range(classes)])
    for start in range(0, len(targets), batch):
        metrics.update(outputs[start : start + batch], targets[start : start + batch])
    return metrics


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("missing", [False, True])
def test_one_class_a_row_equals_scikit_learn(classes, missing):
    outputs = torch.randn(200, classes)
    targets = torch.randint(0, classes - missing, (200,))
    if missing:
        outputs[:, -1] = -50.0  # neither answered nor true
    values = measured(Problem.single, classes, outputs, targets).compute()
    true = targets.numpy()
    answer = outputs.argmax(-1).numpy()
    assert values["accuracy"] == pytest.approx(sk.accuracy_score(true, answer))
    assert values["micro_f1"] == pytest.approx(sk.f1_score(true, answer, average="micro"))
    assert values["macro_f1"] == pytest.approx(
        sk.f1_score(true, answer, average="macro", zero_division=0)
    )
    assert values["macro_recall"] == pytest.approx(
        sk.recall_score(true, answer, average="macro", zero_division=0)
    )
    if classes == 2:
        assert values["f1"] == pytest.approx(sk.f1_score(true, answer, zero_division=0))
    if not missing:
        probabilities = outputs.softmax(-1).numpy()
        scores = probabilities[:, 1] if classes == 2 else probabilities
        assert values["auroc"] == pytest.approx(
            sk.roc_auc_score(true, scores, multi_class="ovr"), abs=0.01
        )
    elif classes == 2:
        assert np.isnan(values["auroc"])  # one class alone has no curve


def test_several_classes_a_row_equal_scikit_learn():
    outputs = torch.randn(150, 4)
    targets = (torch.rand(150, 4) < 0.3).float()
    values = measured(Problem.multi, 4, outputs, targets).compute()
    true = targets.numpy().astype(int)
    answer = (outputs.sigmoid() >= 0.5).numpy().astype(int)
    assert values["micro_f1"] == pytest.approx(sk.f1_score(true, answer, average="micro"))
    assert values["macro_f1"] == pytest.approx(sk.f1_score(true, answer, average="macro"))
    assert values["macro_recall"] == pytest.approx(sk.recall_score(true, answer, average="macro"))
    assert values["subset_accuracy"] == pytest.approx(sk.accuracy_score(true, answer))
    assert values["auroc"] == pytest.approx(sk.roc_auc_score(true, outputs.numpy()), abs=0.01)


def test_a_class_that_every_row_has_takes_no_part_in_the_auroc():
    outputs = torch.randn(150, 4)
    targets = (torch.rand(150, 4) < 0.3).float()
    targets[:, 1] = 1.0
    targets[:, 3] = 0.0
    values = measured(Problem.multi, 4, outputs, targets).compute()
    mixed = [0, 2]
    assert values["auroc"] == pytest.approx(
        sk.roc_auc_score(targets[:, mixed], outputs[:, mixed].numpy()),
        abs=0.01,
    )
    assert np.isnan(
        measured(
            Problem.single,
            5,
            outputs.repeat(1, 2)[:, :5],
            torch.full((150,), 3),
        ).compute()["auroc"]
    )


def test_batches_and_the_whole_give_the_same_values():
    outputs = torch.randn(64, 5)
    targets = torch.randint(0, 5, (64,))
    in_batches, whole = (
        measured(Problem.single, 5, outputs, targets, batch).compute() for batch in (7, 64)
    )
    assert in_batches == whole


def test_of_two_classes_f1_is_that_of_the_second():
    outputs = torch.randn(80, 2)
    targets = torch.randint(0, 2, (80,))
    found = measured(Problem.single, 2, outputs, targets).compute()["f1"]
    assert found == pytest.approx(sk.f1_score(targets, outputs.argmax(-1), pos_label=1))


def test_the_confusion_matrix_has_true_classes_down_and_answers_across():
    outputs = torch.randn(60, 4)
    targets = torch.randint(0, 4, (60,))
    found = measured(Problem.single, 4, outputs, targets).counted().confusion
    assert (
        found.tolist() == sk.confusion_matrix(targets, outputs.argmax(-1), labels=range(4)).tolist()
    )
    assert measured(Problem.regression, 1, torch.randn(5, 1), torch.randn(5)).counted() is None


@pytest.mark.soak(seconds=3)
@pytest.mark.parametrize("problem", [Problem.single, Problem.multi])
def test_metrics_of_many_rows_at_once_are_the_same_where_torch_is_deterministic(
    problem,
):
    outputs = torch.randn(2_000, 40)
    classes = 40
    targets = (
        torch.randint(0, 40, (2_000,))
        if problem is Problem.single
        else torch.randint(0, 2, (2_000, 40))
    )
    expected = measured(problem, classes, outputs, targets).compute()
    torch.use_deterministic_algorithms(True)
    try:
        found = measured(problem, classes, outputs, targets, batch=2_000).compute()
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == expected


@pytest.mark.parametrize("classes", [2, 5])
def test_the_area_under_the_curve_is_that_of_torchmetrics_at_the_same_thresholds(
    classes,
):
    outputs = 4 * torch.randn(300, classes)
    targets = torch.randint(0, classes, (300,))
    metrics = measured(Problem.single, classes, outputs, targets)
    edges = metrics.auroc.edges.double().sigmoid()
    edges[-1] = 2.0  # reached by no score
    plain = MulticlassAUROC(classes, average="none", thresholds=edges, validate_args=False)
    plain.thresholds = edges
    plain.update(outputs.double().softmax(-1), targets)
    counted = slice(int(classes == 2), None)  # of two classes one is
    torch.testing.assert_close(metrics.auroc.compute().flatten(), plain.compute()[counted])
    assert torch.equal(
        torch.from_numpy(metrics.counted().binned)[:, counted],
        plain.confmat[:, counted],
    )


def test_scores_that_are_no_numbers_reach_no_threshold():
    outputs = torch.randn(200, 4)
    targets = torch.arange(200) % 4
    outputs[::9] = float("nan")
    metrics = measured(Problem.single, 4, outputs, targets)
    is_finite = outputs.isfinite().all(1)
    others = measured(Problem.single, 4, outputs[is_finite], targets[is_finite])
    assert np.array_equal(metrics.counted().binned[..., 1], others.counted().binned[..., 1])


def test_of_two_classes_one_is_answered_where_the_other_is_not():
    outputs = 4 * torch.randn(300, 2)
    targets = torch.randint(0, 2, (300,))
    binned = measured(Problem.single, 2, outputs, targets).counted().binned
    assert binned.shape[1] == 2
    assert binned.sum() == 2 * len(binned) * 300
    assert np.array_equal(binned[:, 0], np.flip(binned[:, 1], (0, 1, 2)))


def test_very_many_classes_have_no_auroc():
    assert "auroc" not in TaskMetrics.build(Problem.single, [str(i) for i in range(51)]).names()


def test_numbers_that_are_all_alike_or_alone_have_no_correlation():
    alike = measured(Problem.regression, 1, torch.randn(9, 1), torch.ones(9)).compute()
    alone = measured(Problem.regression, 1, torch.randn(1, 1), torch.ones(1)).compute()
    assert np.isnan([alike["pearson"], alone["pearson"], alone["r2"]]).all()
    assert alone["mae"] == pytest.approx(alone["rmse"])


def test_numbers_equal_scikit_learn():
    outputs = torch.randn(90, 1)
    targets = torch.randn(90)
    values = measured(Problem.regression, 1, outputs, targets).compute()
    true = targets.numpy()
    answer = outputs[:, 0].numpy()
    assert values["mae"] == pytest.approx(sk.mean_absolute_error(true, answer), rel=1e-5)
    assert values["rmse"] == pytest.approx(sk.root_mean_squared_error(true, answer), rel=1e-5)
    assert values["r2"] == pytest.approx(sk.r2_score(true, answer), rel=1e-4)
    assert values["pearson"] == pytest.approx(np.corrcoef(true, answer)[0, 1], abs=1e-5)


@pytest.mark.parametrize("problem", [Problem.single, Problem.multi, Problem.regression])
def test_names_are_exactly_what_is_computed(problem):
    targets = {
        Problem.single: torch.arange(12) % 3,
        Problem.multi: torch.eye(3).repeat(4, 1),
        Problem.regression: torch.randn(12),
    }[problem]
    outputs = torch.randn(12, 1 if problem is Problem.regression else 3)
    metrics = measured(problem, 3, outputs, targets)
    assert list(metrics.compute()) == metrics.names() or set(metrics.compute()) == set(
        metrics.names()
    )
    assert monitored_metric(problem) in metrics.names()


def test_a_reset_forgets_everything():
    metrics = measured(
        Problem.single,
        3,
        torch.randn(9, 3),
        torch.zeros(9, dtype=torch.long),
    )
    metrics.reset()
    outputs = torch.eye(3)
    targets = torch.arange(3)
    metrics.update(outputs, targets)
    assert metrics.compute()["accuracy"] == 1.0


def test_the_class_table_counts_rows_and_puts_the_commonest_first():
    outputs = torch.tensor([[5.0, 0, 0], [5.0, 0, 0], [0, 5.0, 0]])
    rows = measured(Problem.single, 3, outputs, torch.tensor([0, 1, 1])).per_class()
    assert [(row["class"], row["support"], row["precision"], row["recall"]) for row in rows] == [
        ("class 1", 2, 1.0, 0.5),
        ("class 0", 1, 0.5, 1.0),
        ("class 2", 0, 0.0, 0.0),
    ]
    assert [row["answered"] for row in rows] == [
        {"class 0": 1, "class 1": 1},
        {"class 0": 1},
        {},
    ]


def test_an_unknown_metric_names_the_nearest():
    with refused("checkpoint.metric", "'acuracy'", fix="'accuracy'"):
        require_metric("acuracy", ["accuracy", "macro_f1"], "checkpoint.metric")


@pytest.mark.parametrize("classes", [2, 20])
@pytest.mark.parametrize("scale", [1, 4, 8, 15])
def test_the_auroc_is_that_of_exact_ranks_however_sure_a_model_is(classes: int, scale: int) -> None:
    random = torch.Generator().manual_seed(classes)
    outputs = 2 * torch.randn(3_000, classes, generator=random)
    targets = torch.randint(0, classes, (3_000,), generator=random)
    outputs[torch.arange(3_000), targets] += 3
    outputs *= scale
    areas = []
    for place in range(classes):
        others = torch.cat([outputs[:, :place], outputs[:, place + 1 :]], 1).double().logsumexp(1)
        areas.append(sk.roc_auc_score(targets == place, outputs[:, place].double() - others))
    values = measured(Problem.single, classes, outputs, targets, batch=500).compute()
    assert values["auroc"] == pytest.approx(np.mean(areas), abs=0.001)


def test_the_auroc_of_several_labels_is_that_of_exact_ranks_for_a_sure_model() -> None:
    random = torch.Generator().manual_seed(7)
    targets = torch.randint(0, 2, (2_000, 3), generator=random)
    outputs = 15 * (torch.randn(2_000, 3, generator=random) + targets)
    values = measured(Problem.multi, 3, outputs, targets, batch=500).compute()
    assert values["auroc"] == pytest.approx(sk.roc_auc_score(targets, outputs), abs=0.001)


def test_equal_scores_count_half_in_the_auroc_of_a_sure_model() -> None:
    outputs = torch.tensor([[0.0, 200.0], [0.0, 200.0], [0.0, 200.0], [0.0, -200.0]])
    values = measured(Problem.single, 2, outputs, torch.tensor([1, 0, 1, 0])).compute()
    assert values["auroc"] == 0.75


def test_the_auroc_of_a_confident_model_is_seen():
    outputs = torch.randn(3_000, 2)
    targets = torch.randint(0, 2, (3_000,))
    outputs[torch.arange(3_000), targets] += 1.5
    values = measured(Problem.single, 2, 8 * outputs, targets, batch=3_000).compute()
    exact = sk.roc_auc_score(targets.numpy(), (outputs[:, 1] - outputs[:, 0]).numpy())
    assert values["auroc"] == pytest.approx(exact, abs=0.005)


@pytest.mark.parametrize("scale", [12, 30, 80])
def test_the_auroc_of_a_model_that_is_sure_where_it_errs_is_that_of_its_probabilities(
    scale,
):
    targets = torch.arange(2_000) % 2
    is_right = torch.rand(2_000) < 0.8
    logits = scale * torch.where(is_right, 1.0, -1.0) * torch.where(targets == 1, 1.0, -1.0)
    outputs = torch.stack([torch.zeros(2_000), logits], 1)
    metrics = TaskMetrics.build(Problem.single, ["a", "b"])
    metrics.update(outputs, targets, torch.arange(2_000))
    exact = sk.roc_auc_score(targets.numpy(), outputs.softmax(-1)[:, 1].numpy())
    low, high = metrics.intervals()["auroc"]
    assert metrics.compute()["auroc"] == pytest.approx(exact, abs=1e-6)
    assert low < exact < high


def test_numbers_far_from_zero_have_the_r2_of_their_rows():
    truths = 1e6 + torch.arange(40.0)
    answers = truths + torch.tensor([1.0, -2.0] * 20)
    metrics = TaskMetrics.build(Problem.regression, [])
    for rows in torch.arange(40).split(8):
        metrics.update(answers[rows], truths[rows])
    expected = (
        1
        - ((answers - truths).double() ** 2).sum()
        / ((truths.double() - truths.double().mean()) ** 2).sum()
    )
    assert metrics.compute()["r2"] == pytest.approx(float(expected), abs=1e-3)


def test_the_area_of_scores_that_lie_close_together_is_that_of_their_ranks():
    logits = torch.linspace(-1.05, -1.0, 200)
    targets = (torch.arange(200) % 3 + torch.arange(200) // 100 > 1).long()
    metrics = TaskMetrics.build(Problem.single, ["a", "b"])
    metrics.update(torch.stack([torch.zeros(200), logits], 1), targets)
    assert metrics.compute()["auroc"] == pytest.approx(sk.roc_auc_score(targets, logits), abs=0.03)
