"""Losses and class weights, against plain arithmetic."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flatout.data.batches.flat_batch import FlatBatch, flat_batch
from flatout.data.problem import Problem
from flatout.engine.optimizer import OptimConfig
from flatout.errors import UserError
from flatout.tasks.class_weights import ClassWeights
from flatout.tasks.classification import ClassificationConfig, Classifier, Labels, class_weights

LABELS = Labels(Problem.single, ["a", "b", "c"], [6, 3, 1], 10)


def task_of(labels: Labels, **settings) -> Classifier:
    return Classifier(
        nn.Linear(1, 1),
        ClassificationConfig(**settings),
        OptimConfig(),
        labels=labels,
        total_steps=1,
    )


def batch_of(targets: torch.Tensor, num_real: int | None = None) -> FlatBatch:
    batch = flat_batch([[1]] * len(targets), targets)
    batch.num_real = len(targets) if num_real is None else num_real
    batch.step_rows = 8
    return batch


def test_the_loss_is_the_sum_over_rows_divided_by_the_rows_of_the_step():
    outputs = torch.randn(4, 3)
    targets = torch.tensor([0, 1, 2, 0])
    loss = task_of(LABELS, label_smoothing=0.1).loss(outputs, batch_of(targets))
    expected = F.cross_entropy(outputs, targets, reduction="sum", label_smoothing=0.1) / 8
    torch.testing.assert_close(loss, expected)


def test_filler_rows_do_not_count():
    outputs = torch.randn(4, 3)
    targets = torch.tensor([0, 1, 2, 0])
    with_filler = task_of(LABELS).loss(outputs, batch_of(targets, num_real=3))
    without = task_of(LABELS).loss(outputs[:3], batch_of(targets[:3]))
    torch.testing.assert_close(with_filler, without)


def test_weights_are_one_on_average_over_the_training_rows():
    weights = class_weights(LABELS)
    assert weights.tolist() == pytest.approx([10 / 18, 10 / 9, 10 / 3])
    assert float((weights * torch.tensor(LABELS.counts)).sum()) / 10 == pytest.approx(1.0)


def test_weights_of_several_labels_balance_present_and_absent():
    labels = Labels(Problem.multi, ["a", "b", "c"], [5, 1, 0], 10)
    assert class_weights(labels).tolist() == [1.0, 9.0, 9.0]


def test_weighted_losses_weigh_each_row_by_its_class():
    outputs = torch.randn(4, 3)
    targets = torch.tensor([0, 1, 2, 0])
    task = task_of(LABELS, class_weights="auto")
    assert task.config.class_weights is ClassWeights.auto
    each = F.cross_entropy(outputs, targets, reduction="none")
    torch.testing.assert_close(
        task.loss(outputs, batch_of(targets)), (each * class_weights(LABELS)[targets]).sum() / 8
    )


def test_numbers_are_learnt_in_their_own_spread_and_answered_in_their_own_unit():
    labels = Labels(Problem.regression, ["value"], [10], 10, mean=100.0, spread=20.0)
    task = task_of(labels)
    outputs = torch.tensor([[0.0], [1.0]])
    targets = torch.tensor([100.0, 140.0])
    assert float(task.loss(outputs, batch_of(targets))) == pytest.approx(1.0 / 8)
    assert task.unscaled(outputs).tolist() == [100.0, 120.0]


def test_smoothing_out_of_range_names_itself():
    with pytest.raises(UserError, match=r"task.label_smoothing: 1.0 \(0 to below 1\)"):
        ClassificationConfig(label_smoothing=1.0)


def test_smoothing_brings_present_and_absent_labels_nearer_to_one_half():
    labels = Labels(Problem.multi, ["a", "b", "c"], [5, 1, 2], 10)
    outputs = torch.randn(4, 3)
    targets = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1]])
    batch = batch_of(torch.zeros(4))
    batch.targets = torch.tensor([0, 0, 1, 2])
    batch.target_offsets = torch.tensor([0, 1, 3, 3, 4])
    expected = F.binary_cross_entropy_with_logits(
        outputs, torch.where(targets == 1, 0.9, 0.1), reduction="sum"
    )
    torch.testing.assert_close(
        task_of(labels, label_smoothing=0.2).loss(outputs, batch), expected / 3 / 8
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"label_smoothing": 0.1},
        {"class_weights": "auto"},
        {"weights": {"value": 2.0}},
    ],
)
def test_a_regression_refuses_what_only_classes_can_have(settings):
    name = next(iter(settings))
    with pytest.raises(UserError, match=rf"task\.{name}: .*, but targets are numbers"):
        task_of(Labels(Problem.regression, ["value"], [10], 10), **settings)


def test_classes_weigh_what_a_person_says_and_one_where_nothing_is_said():
    outputs = torch.randn(4, 3)
    targets = torch.tensor([0, 1, 2, 0])
    each = F.cross_entropy(outputs, targets, reduction="none")
    loss = task_of(LABELS, weights={"c": 4, "a": 0.5}).loss(outputs, batch_of(targets))
    torch.testing.assert_close(loss, (each * torch.tensor([0.5, 1, 4, 0.5])).sum() / 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"weights": {"bb": 2.0}},
            r"task\.weights: no class 'bb' \(a, b, c\)\. Did you mean 'b'\?",
        ),
        ({"weights": {"b": -1.0}}, r"task\.weights\.b: -1\.0 \(0 or more\)"),
        (
            {"weights": {"b": 2.0}, "class_weights": "auto"},
            r"task\.weights: is set with task\.class_weights=auto",
        ),
    ],
)
def test_weights_of_no_class_and_two_ways_at_once_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        task_of(LABELS, **settings)
