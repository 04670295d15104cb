"""Confident learning, the rate of noise and the forecast, on numbers whose answer is known."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from flatout.audit.findings import describe_rare_suspects
from flatout.audit.forecast import forecast, round_number
from flatout.audit.labels import (
    Suspects,
    count_mixed_pairs,
    estimate_noise,
    find_margins,
    find_rare_suspects,
    find_suspects,
    plant_errors,
)
from flatout.audit.rows import AuditRows
from flatout.audit.text_folds import TextFolds

TWO_CLASSES = np.array(
    [
        [0.9, 0.1],
        [0.8, 0.2],
        [0.3, 0.7],
        [0.2, 0.8],
        [0.1, 0.9],
        [0.95, 0.05],
    ]
)
"""Probabilities of six rows."""


def test_rows_that_the_model_gives_to_another_class_are_suspects_the_surest_first():
    labels = np.array([0, 0, 0, 1, 1, 1])
    found = find_suspects(TWO_CLASSES, labels)
    assert found.rows.tolist() == [5, 2]
    assert found.likely.tolist() == [0, 1]
    assert found.sure == pytest.approx([0.95, 0.7])
    assert found.joint.sum() == pytest.approx(1)
    assert count_mixed_pairs(labels, found) == [
        (0, 1, 1),
        (1, 0, 1),
    ]


def test_suspects_that_pile_up_in_a_rare_class_are_found():
    labels = np.repeat([0, 1, 2], [400, 400, 16])
    at_its_end = [*range(0, 16), *range(400, 416), *range(809, 816)]
    rows = np.array(at_its_end)
    suspects = Suspects(rows, labels[rows], np.ones(len(rows)), np.eye(3))
    assert find_rare_suspects(labels, suspects) == [(2, 7, 16)]
    names = "texts shown files numbers splits groups locations column".split()
    read = AuditRows(
        **dict.fromkeys(names, labels), labels=labels, classes=["question", "place", "short"]
    )
    assert describe_rare_suspects(read, suspects) == (
        "Suspects pile up in rare classes (7 of the 16 rows of short): most of these may be right"
    )
    # as many as of other rows
    few = Suspects(rows[:34], labels[rows[:34]], np.ones(34), np.eye(3))
    assert find_rare_suspects(labels, few) == []


def test_suspects_can_be_put_in_the_order_of_another_model():
    found = find_suspects(TWO_CLASSES, np.array([0, 0, 0, 1, 1, 1])).in_order_of(
        np.linspace(0.9, 0.4, 6)
    )
    assert found.rows.tolist() == [2, 5]
    assert found.likely.tolist() == [1, 0]
    assert found.sure == pytest.approx([0.7, 0.4])


def test_rows_below_every_threshold_are_no_suspects():
    probabilities = np.array([[0.9, 0.1], [0.9, 0.1], [0.1, 0.9], [0.1, 0.9], [0.51, 0.49]])
    assert len(find_suspects(probabilities, np.array([0, 0, 1, 1, 1])).rows) == 0


def test_a_class_without_rows_has_no_suspects():
    probabilities = np.array([[0.6, 0.0, 0.4], [0.3, 0.0, 0.7], [0.1, 0.0, 0.9]])
    assert 1 not in find_suspects(probabilities, np.array([0, 0, 2])).likely


def test_a_class_of_fewer_rows_than_folds_takes_no_part():
    labels = np.repeat([0, 1, 2], [60, 60, 2])
    probabilities = np.where(np.eye(3)[labels] > 0, 0.75, 0.1)
    probabilities[:, 2] = 0.15  # above the mean of its own two rows
    probabilities[labels == 2] = [0.8, 0.15, 0.05]
    probabilities[0] = [0.1, 0.75, 0.15]
    found = find_suspects(probabilities, labels, least=5)
    assert found.rows.tolist() == [0]
    assert found.likely.tolist() == [1]
    assert len(find_suspects(probabilities, labels).rows) > 1
    planted, places = plant_errors(labels, found.joint, 0.3, least=5)
    assert len(places) == 37
    assert (labels[places] != 2).all()
    assert (planted[places] != 2).all()


def test_the_rate_of_noise_is_that_share_of_rows_that_look_like_planted_errors():
    random = np.random.default_rng(0)
    wrong = random.normal(0.6, 0.2, 4_000)
    right = random.normal(-0.6, 0.2, 4_000)
    rate, low, high = estimate_noise(np.append(wrong[:300], right[:2_700]), wrong[1_000:1_200])
    assert low < 0.1 < high
    assert rate == pytest.approx(0.1, abs=0.02)
    assert estimate_noise(right[:2_700], wrong[:200])[0] < 0.01


def test_the_interval_of_the_rate_has_room_for_errors_unlike_planted_ones_at_any_number_of_rows():
    random = np.random.default_rng(0)
    wrong = random.normal(0.6, 0.1, 200_000)
    right = random.normal(-0.6, 0.1, 900_000)
    rate, low, high = estimate_noise(np.append(wrong[:100_000], right), wrong[100_000:100_200])
    assert rate == pytest.approx(0.1, abs=0.02)
    assert low < rate / 1.6
    assert high > rate * 1.6


def test_wrong_labels_that_are_left_out_of_the_second_model_look_less_likely_to_it():
    random = np.random.default_rng(0)
    truth = np.repeat([0, 1], 200)
    features = csr_matrix(np.eye(2)[truth] + random.normal(0, 0.3, (400, 2)))
    is_wrong = random.random(400) < 0.2
    labels = np.where(is_wrong, 1 - truth, truth)
    trained = TextFolds(features, np.arange(400) % 4, 2)
    first = trained.answer(labels)
    second = trained.answer_without_suspects(labels, first)
    own = [answers[np.arange(400), labels] for answers in (first, second)]
    assert own[1][is_wrong].mean() < 0.5 * own[0][is_wrong].mean()
    assert own[1][~is_wrong].mean() > own[0][~is_wrong].mean()


def test_planted_labels_are_wrong_and_drawn_from_the_pairs_that_suspects_lie_between():
    labels = np.repeat([0, 1, 2], 200)
    joint = np.diag([1 / 3] * 3)
    joint[0, 1] = 0.2  # given 0, likely 1: what is really 1 is called 0
    planted, places = plant_errors(labels, joint, 0.5)
    assert (planted[places] != labels[places]).all()
    assert (planted != labels).sum() == len(places) == 300
    of_one = planted[places][labels[places] == 1]
    assert (of_one == 0).mean() > 0.7


def test_margins_compare_the_given_class_with_the_best_other():
    assert find_margins(np.array([[0.7, 0.2, 0.1]]), np.array([1])) == pytest.approx([0.5])


@pytest.mark.soak(seconds=3)
def test_a_falling_error_promises_a_gain_and_a_flat_one_none():
    sizes = np.array([500.0, 1_000, 2_000, 4_000])
    falling = np.array([2.0 * sizes**-0.4] * 5)
    found = forecast(sizes, falling, 4_000, 4_000, 1_000)
    truth = 2.0 * (4_000**-0.4 - 8_000**-0.4)
    assert found.low < truth < found.high
    assert found.low > 0
    assert found.line().startswith("4,000 more rows: +")
    flat = forecast(sizes, np.full((5, 4), 0.2), 4_000, 4_000, 100_000)
    assert flat.is_useless
    assert flat.line().startswith("more rows of this kind will not help")


def test_numbers_of_rows_are_round():
    assert [round_number(each) for each in (0, 3, 24, 999, 2_400)] == [
        1,
        2,
        20,
        500,
        2_000,
    ]
