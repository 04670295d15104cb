"""Losses over 2-grams are what their formulas say, however a batch is cut; recombined texts teach
the composer.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.nn import functional as F

from flatout import (
    BitMLPConfig,
    BitsDataConfig,
    EncodingConfig,
    GramsConfig,
    OptimConfig,
    PeopleConfig,
)
from flatout.bits.grams import FIELD_END, LABELS
from flatout.bits.info import GramLabels
from flatout.bits.task import (
    GramDecoder,
    GramLoss,
    Recombined,
    gram_loss,
    gram_weights,
    recombined_texts,
)
from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import multi_hot
from flatout.data.batches.plan import PlanSettings
from tests.stores import open_store


@pytest.fixture
def data():
    return open_store(
        BitsDataConfig(sample=PeopleConfig(rows=120), encoding=EncodingConfig(size=64, hashes=2))
    )


def make_task(data, **settings) -> GramDecoder:
    torch.manual_seed(0)
    labels = GramLabels(
        LABELS, data.facts["hashed"], data.facts["class_counts"], data.summary()["rows"]["train"]
    )
    model = BitMLPConfig(widths=[8], start="random").build(
        num_inputs=64, is_set=False, **labels.network_sizes()
    )
    return GramDecoder(model, GramsConfig(**settings), OptimConfig(), labels=labels, total_steps=10)


def feed(data, **settings) -> Feed:
    return Feed(data.store.splits["train"], PlanSettings(**settings))


@pytest.mark.parametrize("kind", list(GramLoss))
def test_each_loss_is_its_formula(kind):
    torch.manual_seed(0)
    logits = torch.randn(5, 7)
    targets = (torch.rand(5, 7) < 0.4).float()
    weights = torch.rand(7) + 1
    p = logits.sigmoid()
    plain = {
        GramLoss.bce: -(targets * p.log() + (1 - targets) * (1 - p).log()),
        GramLoss.weighted: -(weights * targets * p.log() + (1 - targets) * (1 - p).log()),
        GramLoss.soft_margin: (1 + (1 - logits * (2 * targets - 1)).exp()).log(),
        GramLoss.focal: -(targets * (1 - p) ** 2 * p.log() + (1 - targets) * p**2 * (1 - p).log()),
    }[kind]
    found = gram_loss(kind, logits, targets, weights if kind is GramLoss.weighted else None)
    torch.testing.assert_close(found, plain.sum())


def test_rare_grams_weigh_more_up_to_a_limit():
    labels = GramLabels(("aa", "bb", "cc", "dd"), [], [100, 4, 0, 400], 400)
    assert gram_weights(labels).tolist() == pytest.approx(
        [3**0.5, 99**0.5, 399**0.5, 1.0], rel=1e-3
    )


def test_micro_batches_add_up_to_the_full_batch(data):
    def gradients(**settings) -> list[torch.Tensor]:
        task = make_task(data, recombine=0)
        for batch in feed(data, shuffle=False, **settings):
            task.loss(task.model(batch), batch).backward()
            if batch.ends_step:
                break
        return [
            parameter.grad for parameter in task.model.parameters() if parameter.grad is not None
        ]

    whole, parts = gradients(rows_per_batch=48), gradients(rows_per_batch=12, accumulate=4)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_answers_and_trained_detectors_both_have_a_loss(data):
    task = make_task(data, recombine=0, detector_weight=0.5)
    batch = next(iter(feed(data, rows_per_batch=16)))
    outputs = task.model(batch)
    hot = batch.multi_hot(task.labels.num_targets)
    count = len(LABELS)
    answers = F.binary_cross_entropy_with_logits(
        outputs[:, :count], hot[:, :count], reduction="sum"
    )
    detections = F.binary_cross_entropy_with_logits(
        outputs[:, count:], hot[:, count:], reduction="sum"
    )
    torch.testing.assert_close(task.loss(outputs, batch), (answers + 0.5 * detections) / count / 16)


def test_ids_beyond_the_classes_are_left_out_of_zeros_and_ones():
    ids, offsets = torch.tensor([0, 3, 5, 2, 9]), torch.tensor([0, 2, 2, 5])
    assert multi_hot(ids, offsets, 4).tolist() == [[1, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 0]]
    assert multi_hot(ids, offsets, 10).sum() == 5


def test_recombined_people_take_each_field_from_somebody():
    texts = pa.array(
        [FIELD_END.join(fields) for fields in (["ann", "lee", "1/2"], ["bob", "fox", "3/4"])]
    )
    made = set(recombined_texts(texts, 200, seed=1).to_pylist())
    assert made == {
        a + b + c for a in ("ann", "bob") for b in ("lee", "fox") for c in ("1/2", "3/4")
    }
    assert recombined_texts(texts, 5, seed=1).equals(recombined_texts(texts, 5, seed=1))


def test_recombined_rows_come_round_and_round():
    pool = Recombined(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2, 3]), 3)
    rows = [pool.take(2).argmax(1).tolist() for _ in range(3)]
    assert rows == [[0, 1], [0, 1], [0, 1]]
    assert pool.take(99).shape == (3, 3)


def test_recombined_texts_train_the_composer_and_not_the_detectors(data):
    task = make_task(data)
    hashed = len(LABELS) + np.arange(3)
    pool = Recombined(torch.tensor([*hashed, 5]), torch.tensor([0, 4]), task.labels.num_targets)
    batch = next(iter(feed(data, rows_per_batch=16)))
    outputs = task.model(batch)
    without = task.loss(outputs, batch)
    task.recombined.append(pool)
    more = task.loss(outputs.detach(), batch) - without.detach()
    more.backward()
    assert more > 0
    # the layer before waits for it: it starts at zero
    assert task.model.composer[-1].weight.grad.abs().sum() > 0
    assert task.model.detectors.weight.grad is None


def test_the_test_records_are_judged_at_the_validation_threshold(data):
    task = make_task(data)
    batch = next(iter(feed(data, rows_per_batch=64)))
    task.metrics.threshold = 0.125
    task.on_test_epoch_start()
    task.validation_step(batch, 0)
    values = task.metrics.compute()
    assert task.threshold == 0.125
    probabilities = task.answers(batch).sigmoid()
    answered = probabilities >= 0.125
    there = batch.multi_hot(len(LABELS)) > 0
    both = (answered & there).sum(1)
    dice = 2 * both / (answered.sum(1) + there.sum(1))
    assert values["dice"] == pytest.approx(float(dice.mean()), abs=1e-5)
