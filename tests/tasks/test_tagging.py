"""Entities are found and scored as seqeval does, and what was cut off counts as missed."""

from __future__ import annotations

import itertools
import json
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flatout.data.batches.flat_batch import flat_batch
from flatout.data.checks.tags import find_entities
from flatout.data.problem import NO_TAG, Problem
from flatout.data.samples.tagged_tweets import ENTITY_TYPES, TaggedTweetsConfig, TaggedTweetsTable
from flatout.data.tags.data import TagData
from flatout.data.texts.settings import TextDataConfig
from flatout.data.tokens.vocabulary import VocabularyConfig, VocabularyKind
from flatout.engine.optimizer import OptimConfig
from flatout.tasks.tagging import EntityScores, Tagger, TaggingConfig, TagLabels

TYPES = ["person", "place"]
NAMES = ["O", "B-person", "I-person", "B-place", "I-place"]
rows_of_tags = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12), min_size=1, max_size=8
)


def flat(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = [len(row) for row in rows]
    return np.array([tag for row in rows for tag in row], np.int64), np.append(
        0, np.cumsum(lengths)
    ).astype(np.int64)


def scored(
    given_rows: list[list[int]], answers: list[list[int]], cut: list[bool] | None = None
) -> dict[str, float]:
    scores = EntityScores(TYPES)
    tags, offsets = flat(given_rows)
    scores.add(flat(answers)[0], tags, offsets, np.array(cut or [False] * len(given_rows)))
    return scores.values()


def words_of_tags(rows: list[list[int]], names: Sequence[str]) -> list[list[str]]:
    return [list(map(names.__getitem__, row)) for row in rows]


def ids_of_tags(rows: list[list[str]], names: list[str]) -> list[list[int]]:
    return [list(map(names.index, row)) for row in rows]


def replace_some(
    row: list[str], names: list[str], random: np.random.Generator, *, share: float
) -> list[str]:
    """A row of tags, a share of them replaced by any tag."""
    replaced = []
    for tag in row:
        is_replaced = random.random() < share
        replaced.append(names[random.integers(len(names))] if is_replaced else tag)
    return replaced


@given(rows_of_tags)
def test_scores_equal_those_of_seqeval(rows: list[list[tuple[int, int]]]) -> None:
    from seqeval.metrics import f1_score, precision_score, recall_score

    tags = []
    answers = []
    for row in rows:
        tags.append([tag for tag, _ in row])
        answers.append([answer for _, answer in row])
    named = [words_of_tags(tags, NAMES), words_of_tags(answers, NAMES)]
    found = scored(tags, answers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # seqeval warns where nothing is marked
        assert found["f1"] == pytest.approx(float(f1_score(*named)))
        assert found["precision"] == pytest.approx(float(precision_score(*named)))
        assert found["recall"] == pytest.approx(float(recall_score(*named)))


def test_scores_of_whole_sentences_equal_those_of_seqeval() -> None:
    """The built-in tagged tweets, answered with a tenth of the tags wrong."""
    from seqeval.metrics import classification_report

    kinds = list(ENTITY_TYPES)
    names = ["O", *(f"{letter}-{kind}" for kind in kinds for letter in "BI")]
    blocks = TaggedTweetsTable(TaggedTweetsConfig(rows=300, eval_rows=300), "test").blocks(["tags"])
    given_rows = [row for block in blocks for row in block.column("tags").to_pylist()]
    random = np.random.default_rng(0)
    answers = [replace_some(row, names, random, share=0.1) for row in given_rows]
    tags, offsets = flat(ids_of_tags(given_rows, names))
    answered, _ = flat(ids_of_tags(answers, names))
    scores = EntityScores(kinds)
    scores.add(answered, tags, offsets, np.zeros(300, np.bool_))
    expected = classification_report(given_rows, answers, output_dict=True)
    for row in scores.per_type():
        theirs = expected[row["class"]]
        assert row["support"] == theirs["support"]
        for ours, name in (
            ("precision", "precision"),
            ("recall", "recall"),
            ("f1", "f1-score"),
        ):
            assert row[ours] == pytest.approx(float(theirs[name]))
    assert scores.values()["macro_f1"] == pytest.approx(float(expected["macro avg"]["f1-score"]))


PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "wnut17" / "test.jsonl"


@pytest.mark.skipif(
    not PUBLISHED.exists(), reason="the published tweets do not lie beside the checkout"
)
@pytest.mark.parametrize("wrong", [0.02, 0.2])
def test_scores_of_published_tweets_equal_those_of_seqeval(wrong: float) -> None:
    """Answers are the given tags with a share of them replaced: entities are cut, joined, moved and
    renamed.
    """
    from seqeval.metrics import classification_report

    given_rows = [
        json.loads(line)["tags"] for line in PUBLISHED.read_text(encoding="utf-8").splitlines()
    ]
    kinds = sorted({tag[2:] for row in given_rows for tag in row if tag != "O"})
    names = ["O", *(f"{letter}-{kind}" for kind in kinds for letter in "BI")]
    random = np.random.default_rng(0)
    answers = [replace_some(row, names, random, share=wrong) for row in given_rows]
    tags, offsets = flat(ids_of_tags(given_rows, names))
    scores = EntityScores(kinds)
    answered, _ = flat(ids_of_tags(answers, names))
    scores.add(answered, tags, offsets, np.zeros(len(given_rows), np.bool_))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # seqeval warns where a row has no tags
        expected = classification_report(given_rows, answers, output_dict=True)
    found = scores.values()
    overall = expected["micro avg"]
    assert overall["support"] > 1_000
    assert 0 < overall["f1-score"] < 1
    for ours, name in (
        ("precision", "precision"),
        ("recall", "recall"),
        ("f1", "f1-score"),
    ):
        assert found[ours] == pytest.approx(float(overall[name]))
        for row in scores.per_type():
            assert row[ours] == pytest.approx(float(expected[row["class"]][name]))


def test_an_entity_ends_with_its_row_and_where_another_begins() -> None:
    tags, offsets = flat([[1, 2, 1, 4], [2, 2, 0, 3]])
    found = find_entities(tags, offsets)
    runs = list(zip(found.row, found.start, found.stop, found.kind, strict=True))
    assert runs == [
        (0, 0, 2, 0),
        (0, 2, 3, 0),
        (0, 3, 4, 1),
        (1, 0, 2, 0),
        (1, 3, 4, 1),
    ]


def test_an_entity_that_was_cut_in_two_is_never_found() -> None:
    tags = [[0, 1, 2], [0, 1, 2]]
    assert scored(tags, tags)["f1"] == 1.0
    assert scored(tags, tags, [False, True])["recall"] == 0.5
    assert scored(tags, tags, [False, True])["precision"] == 0.5


def test_entities_beyond_the_longest_row_count_as_missed() -> None:
    scores = EntityScores(TYPES)
    scores.restart({"place": 3}, words_lost=10)
    tags, offsets = flat([[3, 0]])
    scores.add(tags, tags, offsets, np.array([False]))
    values = scores.values()
    assert (values["recall"], values["precision"]) == (0.25, 1.0)
    assert values["word_accuracy"] == pytest.approx(2 / 12)
    assert scores.per_type()[0] == {
        "class": "place",
        "precision": 1.0,
        "recall": 0.25,
        "f1": 0.4,
        "support": 4,
    }


def test_scores_of_all_short_rows_equal_those_of_seqeval() -> None:
    """Every pair of rows of three words."""
    from seqeval.metrics.sequence_labeling import get_entities

    for row in itertools.product(range(5), repeat=3):
        tags, offsets = flat([list(row)])
        found = find_entities(tags, offsets)
        expected = get_entities([NAMES[tag] for tag in row])
        runs = zip(found.kind, found.start, found.stop, strict=True)
        mine = [(TYPES[kind], int(start), int(stop) - 1) for kind, start, stop in runs]
        assert mine == expected, row


LABELS = TagLabels(NAMES, 2.0, {}, counts=[6, 2, 1, 1, 0])
OUTPUTS = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
TAGS = torch.tensor([0, 1, 0, NO_TAG, 3])
"""Of two rows of two and three tokens; the fourth token begins no word."""


def task_of(**settings: Any) -> Tagger:
    return Tagger(
        nn.Linear(1, 1), TaggingConfig(**settings), OptimConfig(), labels=LABELS, total_steps=1
    )


def loss_of(**settings: Any) -> torch.Tensor:
    batch = flat_batch([[1, 1], [1, 1, 1]])
    batch.targets = TAGS
    return task_of(**settings).loss(OUTPUTS, batch)


def of_each_word() -> torch.Tensor:
    """What each tag would lose at each word."""
    return -OUTPUTS.log_softmax(-1)[TAGS != NO_TAG]


def test_each_word_weighs_by_how_rare_its_tag_is():
    right = of_each_word()[range(4), [0, 1, 0, 3]]
    weights = torch.tensor([10 / (5 * 6), 10 / (5 * 2), 10 / (5 * 6), 10 / 5])
    torch.testing.assert_close(loss_of(class_weights="auto"), (right * weights).sum() / (2 * 2.0))


def test_tags_weigh_what_a_person_says_and_one_where_nothing_is_said():
    right = of_each_word()[range(4), [0, 1, 0, 3]]
    weights = torch.tensor([0.1, 1.0, 0.1, 3.0])
    torch.testing.assert_close(
        loss_of(weights={"O": 0.1, "B-place": 3}), (right * weights).sum() / (2 * 2.0)
    )


def test_smoothing_spreads_a_share_of_each_tag_over_all():
    each = of_each_word()
    right = each[range(4), [0, 1, 0, 3]]
    torch.testing.assert_close(
        loss_of(label_smoothing=0.2), (0.8 * right + 0.2 * each.mean(1)).sum() / (2 * 2.0)
    )


def test_tags_are_counted_in_the_training_words(tmp_path):
    sample = TaggedTweetsConfig(rows=120, eval_rows=40)
    config = TextDataConfig(
        problem=Problem.tags,
        sample=sample,
        max_length=200,
        vocabulary=VocabularyConfig(kind=VocabularyKind.wordpiece),
        cache=str(tmp_path),
    )
    data = TagData.of(config)
    data.setup()
    task = Tagger(nn.Linear(1, 1), TaggingConfig(class_weights="auto"))
    task.build(data.info)
    blocks = TaggedTweetsTable(sample, "train").blocks(["tags"])
    counts = Counter(
        tag for block in blocks for row in block.column("tags").to_pylist() for tag in row
    )
    names = task.labels.names
    expected = [counts.total() / (len(names) * counts[name]) for name in names]
    assert task.weights_C.tolist() == pytest.approx(expected)
