"""Losses over 2-grams are what their formulas say, however a batch is cut; recombined texts teach
the composer.
"""

from __future__ import annotations

from dataclasses import replace

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


def make_task(data, start="random", **settings) -> GramDecoder:
    torch.manual_seed(0)
    labels = GramLabels(
        LABELS, data.facts["hashed"], data.facts["class_counts"], data.summary()["rows"]["train"]
    )
    model = BitMLPConfig(widths=[8], start=start).build(
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

    whole = gradients(rows_per_batch=48)
    parts = gradients(rows_per_batch=12, accumulate=4)
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
    ids = torch.tensor([0, 3, 5, 2, 9])
    offsets = torch.tensor([0, 2, 2, 5])
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


@pytest.mark.parametrize("chooses_on_device", [False, True])
def test_recombined_rows_come_round_and_round(chooses_on_device):
    pool = Recombined(torch.tensor([0, 1, 1, 2]), torch.tensor([1, 2, 1]), torch.device("cpu"))
    if chooses_on_device:
        pool.choose_on_device()
    taken = [pool.take(count) for count in (2, 2, 1, 99)]
    rows = [texts.ids.view(-1, 2).tolist() for texts in taken]
    none = torch.iinfo(torch.int32).max
    assert rows[0] == rows[1] == [[0, none], [1, 1]]
    assert rows[2:] == [[[2, none]], [[0, none], [1, 1], [2, none]]]
    assert [texts.counts.tolist() for texts in taken] == [[2, 2], [2, 2], [2], [2, 2, 2]]


def some_texts(num_targets: int) -> Recombined:
    counts = torch.arange(1, 42) % 5 + 1
    ids = torch.arange(int(counts.sum())) * 211 % num_targets
    return Recombined(ids, counts, torch.device("cpu"))


def test_recombined_texts_train_the_composer_and_not_the_detectors(data):
    batch = next(iter(feed(data, rows_per_batch=16)))
    gradients = []
    for num_texts in (0, 1):
        task = make_task(data)
        if num_texts:
            task.recombined.append(some_texts(task.labels.num_targets))
        task.training_loss(batch).backward()
        gradients.append({name: weight.grad for name, weight in task.model.named_parameters()})
    without, more = gradients
    name = f"composer.{len(task.model.composer) - 1}.weight"
    # the layer before waits for it: it starts at zero
    assert not torch.equal(more[name], without[name])
    assert torch.equal(more["detectors.weight"], without["detectors.weight"])


@pytest.mark.parametrize("start", ["ridge", "random"])
@pytest.mark.parametrize("num_real", [16, 13])
def test_rows_joined_with_recombined_texts_have_the_loss_of_two_passes(
    data, monkeypatch, start, num_real
):
    batch = replace(next(iter(feed(data, rows_per_batch=16))), num_real=num_real)
    found = []
    for joins in (False, True):
        monkeypatch.setattr(GramDecoder, "_may_join_rows", lambda *unused, joins=joins: joins)
        task = make_task(data, start, detector_weight=0.5)
        for weight in task.model.composer.parameters():
            torch.nn.init.normal_(weight)
        task.recombined.append(some_texts(task.labels.num_targets))
        loss = task.training_loss(batch)
        loss.backward()
        trained = [weight for weight in task.model.parameters() if weight.requires_grad]
        found.append([loss.detach(), *(weight.grad for weight in trained)])
        assert task.recombined[0].place == 8 * num_real // 16
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_rows_are_joined_on_a_gpu_unless_means_are_taken_over_them(data):
    task = make_task(data)
    assert task._may_join_rows(task.model, torch.device("cuda"))
    assert not task._may_join_rows(task.model, torch.device("cpu"))
    task.model.normalises_over_rows = True
    assert not task._may_join_rows(task.model, torch.device("cuda"))


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
