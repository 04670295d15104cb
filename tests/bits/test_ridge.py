"""Ridge regression in closed form is ridge regression; scores are those of a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge as SklearnRidge
from tests.stores import open_store

from flatout import BitsDataConfig, EncodingConfig, PeopleConfig
from flatout.bits.grams import LABELS
from flatout.bits.ridge import PENALTIES, GramSums
from flatout.bits.scores import NAMES, GramMetrics
from flatout.data.batches.feed import Feed
from flatout.data.batches.plan import PlanSettings


@pytest.fixture(params=["bloom", "twostep"])
def feeds(request) -> tuple[Feed, Feed, tuple]:
    encoding = EncodingConfig(kind=request.param, size=64, hashes=2)
    data = open_store(
        BitsDataConfig(sample=PeopleConfig(rows=300), encoding=encoding, vocabulary=80)
    )
    made = (
        Feed(data.store.splits[name], PlanSettings(rows_per_batch=64))
        for name in ("train", "validation")
    )
    return (*made, (data, data.labels, torch.device("cpu")))


def test_the_closed_form_is_that_of_scikit_learn(feeds):
    train, _, about = feeds
    sums = GramSums(*about)
    next(sums.read(train))
    blocks = list(sums.blocks(train))
    inputs, grams = (torch.cat(parts).numpy() for parts in zip(*blocks, strict=True))
    expected = SklearnRidge(alpha=3.0).fit(inputs, grams)
    weight, bias = sums.solve(3.0)
    np.testing.assert_allclose(weight.numpy(), expected.coef_.T, atol=1e-4)
    np.testing.assert_allclose(bias.numpy(), expected.intercept_, atol=1e-4)
    assert sums.num_records == len(inputs)


def test_records_are_added_up_to_each_size_and_the_feed_stays_where_it_was(feeds):
    train, _, about = feeds
    next(iter(train))
    before = train.state_dict()
    sums = GramSums(*about)
    assert list(sums.read(train, [10, 64, 65, 5_000])) == [10, 64, 65, train.split.num_rows]
    assert train.state_dict() == before
    at_ten = GramSums(*about)
    first_ten = GramSums(*about)
    next(at_ten.read(train, [10]))
    inputs, grams = next(first_ten.blocks(train))
    assert torch.equal(at_ten.sums.inputs_DD, inputs[:10].T @ inputs[:10])
    assert torch.equal(at_ten.sums.crossed_DO, inputs[:10].T @ grams[:10])


def test_the_best_penalty_is_the_one_that_validation_records_like_best(feeds):
    train, validation, about = feeds
    sums = GramSums(*about)
    next(sums.read(train))
    (best,) = sums.best(validation, [slice(0, len(LABELS))])
    for penalty in PENALTIES[:4]:
        (other,) = sums.best(validation, [slice(0, len(LABELS))], [penalty])
        assert other.dice <= best.dice
    assert best.penalty in best.penalties_near()


def plain_scores(scores: np.ndarray, targets: np.ndarray, threshold: float) -> dict[str, float]:
    found = dict.fromkeys(NAMES, 0.0)
    for row, wanted in zip(scores, targets, strict=True):
        answered = set(np.flatnonzero(row >= threshold))
        there = set(np.flatnonzero(wanted))
        both = len(answered & there)
        is_empty = not answered and not there
        precision = 1.0 if is_empty else both / max(1, len(answered))
        recall = 1.0 if is_empty else both / max(1, len(there))
        found["dice"] += 1.0 if is_empty else 2 * both / (len(answered) + len(there))
        found["precision"] += precision
        found["recall"] += recall
        found["f1"] += 2 * precision * recall / (precision + recall) if both or is_empty else 0.0
        found["exact"] += answered == there
    return {name: value / len(scores) for name, value in found.items()}


@settings(max_examples=40)
@given(
    st.integers(1, 9),
    st.integers(1, 12),
    st.integers(0, 10_000),
    st.sampled_from([0.25, 0.5, 0.75]),
)
def test_scores_are_those_of_a_plain_loop_over_records(rows, grams, seed, threshold):
    random = np.random.default_rng(seed)
    scores = random.random((rows, grams)).astype(np.float32)
    targets = (random.random((rows, grams)) < 0.3).astype(np.float32)
    metrics = GramMetrics(threshold)
    for part in np.array_split(np.arange(rows), 2):
        if len(part):
            metrics.update(torch.from_numpy(scores[part]), torch.from_numpy(targets[part]))
    assert metrics.compute() == pytest.approx(plain_scores(scores, targets, threshold), abs=1e-5)


def test_the_best_threshold_is_found_among_all():
    random = np.random.default_rng(1)
    targets = (random.random((40, 30)) < 0.3).astype(np.float32)
    scores = np.clip(0.3 * targets + 0.25 * random.random((40, 30)), 0, 1).astype(np.float32)
    metrics = GramMetrics()
    metrics.update(torch.from_numpy(scores), torch.from_numpy(targets))
    values = metrics.compute()
    tried = [plain_scores(scores, targets, place / 256)["dice"] for place in range(256)]
    assert values["dice"] == pytest.approx(max(tried), abs=1e-6)
    assert plain_scores(scores, targets, metrics.threshold)["dice"] == pytest.approx(
        values["dice"], abs=1e-6
    )


def test_scores_beyond_the_ends_count_as_the_nearer_end():
    metrics = GramMetrics(0.5)
    metrics.update(torch.tensor([[-3.0, 7.0]]), torch.tensor([[0.0, 1.0]]))
    assert metrics.compute()["exact"] == 1.0
