"""Which answers are left out: bounds, sets and intervals hold for fresh rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from flatout.errors import UserError
from flatout.tasks.abstention import (
    HeldOutAnswers,
    WordAnswers,
    sureness_of,
)


def draw_answers(rows: int, seed: int) -> HeldOutAnswers:
    """Answers with a sureness of 0 to 1, of which one at 0.3 is wrong at 0.4 * 0.7."""
    random = np.random.default_rng(seed)
    sureness = random.random(rows)
    wrong = random.random(rows) < 0.4 * (1 - sureness)
    truth = np.where(wrong, (1 - sureness) / 2, sureness)
    return HeldOutAnswers(sureness, wrong, truth, np.arange(rows))


def test_all_bounds_hold_at_once_in_95_of_100_draws_and_are_close():
    true_errors = []
    held = 0
    for seed in range(100):
        cuts = draw_answers(400, seed).cuts()
        true_errors = [0.2 * (1 - max(cut["above"], 0)) for cut in cuts]
        bounds = [cut["at_most"] for cut in cuts]
        held += all(np.array(bounds) >= true_errors)
    assert held >= 95
    assert cuts[0]["at_most"] < 0.2 + 0.08


def test_of_fresh_rows_those_answered_are_wrong_at_most_as_often_as_asked_for():
    fresh = draw_answers(100_000, 1000)
    errors = []
    missed = []
    for seed in range(20):
        chosen = draw_answers(3_000, seed).choose(0.1)
        is_given = fresh.sureness > chosen.above
        errors.append(fresh.wrong[is_given].mean())
        missed.append((fresh.truth[~is_given] < chosen.possible_from).mean())
    assert max(errors) <= 0.1
    assert np.mean(errors) > 0.05
    assert max(missed) <= 0.1
    assert np.mean(missed) > 0.05


def test_too_few_rows_are_refused_with_how_many_it_takes():
    right = HeldOutAnswers.of_rows(torch.rand(116), torch.zeros(116), torch.rand(116))
    with pytest.raises(
        UserError,
        match=r"0.05 cannot be promised by 116 answers .* takes 117 rows",
    ):
        right.choose(0.05)
    more = HeldOutAnswers.of_rows(torch.rand(117), torch.zeros(117), torch.rand(117))
    assert more.choose(0.05).above == -1


def test_several_answers_of_a_row_count_as_one_row():
    # 200 rows of five equal answers know no more than 200 rows
    once = draw_answers(200, 0)
    parts = (once.sureness, once.wrong, once.truth, once.rows)
    repeated = HeldOutAnswers(*(part.repeat(5) for part in parts))
    for cut, other in zip(once.cuts(), repeated.cuts(), strict=True):
        assert cut["error"] == other["error"]
        assert cut["at_most"] <= other["at_most"]
    twice = HeldOutAnswers.joined([once, once])
    assert len(np.unique(twice.rows)) == 400


def test_a_row_of_labels_is_right_when_all_its_labels_are():
    shares = torch.tensor([[0.9, 0.2], [0.9, 0.2], [0.3, 0.4]])
    least = torch.tensor([0.5, 0.3])
    found = HeldOutAnswers.of_classes(shares, torch.tensor([[1, 0], [1, 1], [0, 1]]), least)
    assert found.wrong.tolist() == [False, True, False]
    assert found.truth.tolist() == pytest.approx([0.9, 0.2, 0.4])
    assert found.sureness.tolist() == pytest.approx([0.72, 0.72, 0.28])
    assert sureness_of(shares).tolist() == pytest.approx([0.9, 0.9, 0.4])


def test_the_interval_of_a_number_holds_most_fresh_numbers():
    random = torch.Generator().manual_seed(0)
    values = torch.randn(1000, generator=random)
    targets = values + torch.randn(1000, generator=random)
    chosen = HeldOutAnswers.of_numbers(values, targets).choose(0.1)
    assert chosen.above == -1
    # 90 % of normal numbers lie within 1.64, and 1,000 rows leave room for chance
    assert 1.64 < -chosen.possible_from < 2.1


def test_an_entity_is_right_with_its_words_and_its_type():
    # tags 1 and 2 are B and I of one type, 3 and 4 of another; two rows of three words
    answers = WordAnswers(
        ids=np.array([1, 2, 0, 3, 0, 1]),
        probabilities=np.array([0.9, 0.7, 0.9, 0.8, 1.0, 0.6], np.float32),
        offsets=np.array([0, 3, 6]),
        types=np.array(
            [
                [0.1, 0.9, 0],
                [0.2, 0.8, 0],
                [1, 0, 0],
                [0, 0.1, 0.9],
                [1, 0, 0],
                [0.3, 0.7, 0],
            ],
            np.float32,
        ),
        is_plain=False,
    )
    # the first is right, the second has another type, the third is none
    found = HeldOutAnswers.of_words(answers, np.array([1, 2, 0, 1, 0, 0]))
    assert found.wrong.tolist() == [False, True, True]
    assert found.sureness.tolist() == pytest.approx([0.7, 0.8, 0.6])
    assert found.truth.tolist() == pytest.approx([0.8, 0.1, 0.3])
    assert found.rows.tolist() == [0, 1, 1]


def test_a_plain_tag_is_right_word_by_word_and_a_word_without_one_is_no_answer():
    shares = torch.tensor([[0.9, 0.1], [0.3, 0.7], [0.6, 0.4], [0.5, 0.5]])
    seen = WordAnswers.of_tags(shares, np.array([0, 3, 4]), is_plain=True)
    answers = replace(seen, ids=np.array([0, 1, 0, -1]))
    found = HeldOutAnswers.of_words(answers, np.array([0, 1, 1, 0]))
    assert found.wrong.tolist() == [False, False, True]
    assert found.sureness.tolist() == pytest.approx([0.9, 0.7, 0.6])
    assert found.truth.tolist() == pytest.approx([0.9, 0.7, 0.4])
    assert found.rows.tolist() == [0, 0, 0]
