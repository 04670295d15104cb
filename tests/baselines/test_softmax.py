"""Logistic regression on vectors: it is the one of the definition, whatever unit a number has."""

from __future__ import annotations

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from flatout.baselines.softmax import classify


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    vectors = torch.randn(300, 4, generator=draw)
    noise = torch.randn(300, 3, generator=draw)
    return vectors, (vectors[:, :3] + noise).argmax(1)


def test_it_answers_as_scikit_learn_does_with_the_same_penalty(rows):
    vectors, classes = rows
    scaled = ((vectors - vectors.mean(0)) / vectors.std(0)).numpy()
    # a penalty of 0.01 on mean losses is one of 300 * 0.01 on their sum
    expected = LogisticRegression(C=1 / 3, tol=1e-8).fit(scaled, classes.numpy()).predict(scaled)
    assert (classify(vectors, classes, vectors).numpy() == expected).all()


def test_the_unit_of_a_number_and_one_that_never_changes_play_no_part(rows):
    vectors, classes = rows
    units = torch.tensor([1.0, 1000.0, 1e-3, 1.0])
    wide = torch.cat([5 + vectors * units, torch.ones(300, 1)], 1)
    are_same = classify(wide, classes, wide) == classify(vectors, classes, vectors)
    assert are_same.float().mean() > 0.98  # rounding moves answers that are near each other
