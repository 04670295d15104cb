"""The quick model: probabilities for other texts, for every kind of label that texts can have."""

import numpy as np
import pytest
from sklearn.naive_bayes import MultinomialNB

from flatout.baselines.linear_text import QuickModel
from flatout.data.problem import Problem
from flatout.data.samples.headlines import HeadlinesConfig, HeadlinesTable
from flatout.data.tokens.subwords import PAIR


def rows(num_rows: int, split: str = "train"):
    """Built-in headlines, and the numbers of their topics."""
    config = HeadlinesConfig(rows=num_rows, eval_rows=num_rows, noise=0.0)
    block = next(HeadlinesTable(config, split).blocks(["text", "label"]))
    names, targets = np.unique(block["label"].to_pylist(), return_inverse=True)
    return block["text"].to_pylist(), targets, len(names)


def test_it_learns_the_built_in_headlines_and_gives_the_same_answers_each_time():
    texts, targets, num_classes = rows(1_500)
    others, truths, _ = rows(300, "test")
    found = QuickModel(Problem.single, num_classes).fit(texts, targets).predict(others)
    assert (found.argmax(axis=1) == truths).mean() > 0.8
    assert found.sum(axis=1) == pytest.approx(np.ones(300))
    assert (
        QuickModel(Problem.single, num_classes).fit(texts, targets).predict(others) == found
    ).all()


def test_two_classes_have_one_model_and_two_columns():
    texts = ["soup oven", "recipe oven", "goal match", "striker match"]
    found = (
        QuickModel(Problem.single, 2)
        .fit(texts, np.array([0, 0, 1, 1]))
        .predict(["soup recipe", "goal", ""])
    )
    assert found.shape == (3, 2)
    assert found.sum(axis=1) == pytest.approx(np.ones(3))
    assert found[0, 0] > 0.5 > found[1, 0]


def test_a_class_without_rows_is_all_but_impossible():
    model = QuickModel(Problem.single, 4).fit(["soup", "goal", "goal match"], np.array([0, 2, 2]))
    found = model.predict(["soup", "goal"])
    assert found.argmax(axis=1).tolist() == [0, 2]
    assert found[:, [1, 3]].max() < 0.01


def test_one_class_alone_is_certain():
    assert (
        QuickModel(Problem.single, 2).fit(["a", "b"], np.array([1, 1])).predict(["c"])[0, 1] > 0.99
    )


@pytest.mark.parametrize(
    "texts",
    [
        ["!" * n for n in range(1, 61)],
        [str(1000 + 37 * n) for n in range(60)],
    ],
)
def test_texts_that_share_no_word_leave_it_unsure(texts):
    found = QuickModel(Problem.single, 2).fit(texts, np.arange(60) % 2).predict(["some words"])
    assert found[0] == pytest.approx([0.5, 0.5], abs=0.05)


def test_several_labels_have_a_probability_each():
    texts = ["soup goal", "soup", "goal", "weather"] * 3
    targets = np.array([[1, 1], [1, 0], [0, 1], [0, 0]] * 3)
    found = QuickModel(Problem.multi, 2).fit(texts, targets).predict(["soup goal", "rain"])
    assert found[0].min() > 0.5 > found[1].max()


def test_a_pair_is_read_as_two_sides_and_what_they_share():
    words = "soup goal rain snow match oven".split()
    pairs = [
        f"{word}{PAIR}{words[(place + shift) % 6]}"
        for shift in (0, 1, 2)
        for place, word in enumerate(words)
    ]
    model = QuickModel(Problem.single, 2).fit(pairs, np.repeat([1, 0, 0], 6))
    found = model.predict(
        [
            f"{word}{PAIR}{words[(place + shift) % 6]}"
            for shift in (0, 3)
            for place, word in enumerate(words)
        ]
    )
    assert found[:6, 1].min() > found[6:, 1].max()


def test_numbers_are_predicted_by_a_ridge_regression():
    texts = [f"{'good ' * n}film".strip() + f" {n}" for n in range(12)]
    found = (
        QuickModel(Problem.regression)
        .fit(texts, np.arange(12) * 10.0)
        .predict(["film", "good good good film"])
    )
    assert found[0] < found[1]
    assert found.shape == (2,)


@pytest.mark.parametrize("problem", [Problem.single, Problem.multi])
@pytest.mark.parametrize("num_classes", [2, 3])
def test_a_model_of_arrays_answers_as_the_one_that_learned_them(problem, num_classes):
    texts = [f"{word} rest {number % 7}" for number, word in enumerate(["sun", "rain"] * 20)]
    targets = np.array([0, 1] * 20)
    if problem is Problem.multi:
        targets = np.eye(num_classes, dtype=np.int64)[targets]
    model = QuickModel(problem, num_classes).fit(texts, targets)
    again = QuickModel.of_arrays(problem, num_classes, model.arrays())
    asked = ["sun and rain", "rest", ""]
    assert np.allclose(again.predict(asked), model.predict(asked), atol=1e-6)
    twice = QuickModel.of_arrays(problem, num_classes, again.arrays())
    assert np.array_equal(twice.predict(asked), again.predict(asked))


def test_arrays_know_that_texts_are_pairs():
    texts = [
        f"cat{PAIR}cat",
        f"dog{PAIR}dog",
        f"cat{PAIR}dog",
        f"dog{PAIR}cat",
    ] * 10
    model = QuickModel(Problem.single, 2).fit(texts, np.array([1, 1, 0, 0] * 10))
    again = QuickModel.of_arrays(Problem.single, 2, model.arrays())
    assert np.allclose(again.predict(texts[:4]), model.predict(texts[:4]), atol=1e-6)


def test_counts_help_where_rows_are_few():
    texts, targets, num_classes = rows(60)
    others, truths, _ = rows(400, "test")
    plain = QuickModel(Problem.single, num_classes)
    with_counts = plain.fit_with_counts(texts, targets)
    shares = with_counts.predict(others)
    right = np.mean(shares.argmax(axis=1) == truths)
    assert right > np.mean(plain.predict(others).argmax(axis=1) == truths)
    assert shares.sum(axis=1) == pytest.approx(np.ones(400))


def test_counts_move_a_word_by_how_much_oftener_its_class_has_it():
    texts = ["soup"] * 3 + ["goal"] * 3
    plain = QuickModel(Problem.single, 2)
    with_counts = plain.fit_with_counts(texts, np.array([0, 0, 0, 1, 1, 1]))
    sides = with_counts.predict(["soup", "goal", "rain"])
    assert sides[0, 0] > plain.predict(["soup"])[0, 0] > 0.5
    assert sides[1, 1] == pytest.approx(sides[0, 0])
    assert sides[2] == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    ("texts", "targets", "problem", "num_classes"),
    [
        (["soup", "goal", "goal match"], [0, 2, 2], Problem.single, 4),
        (["a", "b"], [1, 1], Problem.single, 2),
        ([str(1000 + 37 * n) for n in range(60)], [0, 1] * 30, Problem.single, 2),
        (["soup goal", "soup"], [[1, 1], [1, 0]], Problem.multi, 2),
    ],
    ids=["class without rows", "one class", "no word twice", "label of all rows"],
)
def test_counts_leave_a_class_of_all_rows_or_none_as_it_is(texts, targets, problem, num_classes):
    plain = QuickModel(problem, num_classes)
    with_counts = plain.fit_with_counts(texts, np.array(targets))
    found = with_counts.predict([*texts, "some words"])
    assert np.isfinite(found).all()
    counted = QuickModel(problem, num_classes).fit_counts(texts, np.array(targets))
    assert np.isfinite(counted.predict([*texts, "some words"])).all()
    expected = plain.predict(["some words"]).argmax(axis=1)
    assert found[-1:].argmax(axis=1) == expected
    again = QuickModel.of_arrays(problem, num_classes, plain.arrays())
    assert again.predict(["some words"]).argmax(axis=1) == expected


def test_counts_alone_of_two_classes_are_naive_bayes():
    texts, topics, _ = rows(300)
    targets = (topics % 3 == 0).astype(np.int64)
    model = QuickModel(Problem.single, 2).fit_counts(texts, targets)
    features = model.features.read(texts)
    theirs = MultinomialNB(alpha=0.3 * features.data.mean()).fit(features, targets)
    others, _, _ = rows(400, "test")
    expected = theirs.predict_proba(model.features.read(others))
    assert model.predict(others) == pytest.approx(expected, abs=1e-9)
