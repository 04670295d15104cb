"""Long rows of tagged words in windows: a tag for every word, in training, scores and answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.encoders import calm_encoder
from tests.verbs import verb

from flatout import OptimConfig, fit
from flatout.data.problem import NO_TAG
from flatout.data.tags.data import TagData
from flatout.data.texts.settings import TextDataConfig
from flatout.data.tokens.vocabulary import VocabularyConfig, VocabularyKind
from flatout.errors import UserError
from flatout.inference.folder_predictors import predictors_of_folder
from flatout.inference.forms import through_library
from flatout.inference.tags import TagPredictor, words_of
from flatout.models.encoder.transformer import Outputs
from flatout.tasks.tagging import Tagger

WORDS = np.array("oak fern rose slate flint basalt of the and".split())
WINDOWS: dict[str, Any] = {
    "long": "windows",
    "window": 12,
    "overlap": 3,
    "max_length": 96,
}
PIECES = VocabularyConfig(kind=VocabularyKind.wordpiece, min_frequency=1)
SMALL = calm_encoder(hidden=32)


def rows_of(counts: Sequence[int] | np.ndarray, seed: int = 0) -> dict[str, Any]:
    """Words of plants, of stones and of neither."""
    random = np.random.default_rng(seed)
    numbers = [random.integers(9, size=count) for count in counts]
    tags = np.array(["B-plant"] * 3 + ["B-stone"] * 3 + ["O"] * 3)
    return {
        "words": [WORDS[row].tolist() for row in numbers],
        "tags": [tags[row].tolist() for row in numbers],
    }


TABLE = rows_of(np.random.default_rng(1).integers(1, 60, size=90))
TEST = rows_of(range(20, 60), seed=2)


def settings(**changed: Any) -> TextDataConfig:
    given: dict[str, Any] = {
        "train": TABLE,
        "test": TEST,
        "problem": "tags",
        "text": "words",
        "label": "tags",
    }
    return TextDataConfig(
        **{
            **given,
            "batch_size": 16,
            "vocabulary": PIECES,
            **WINDOWS,
            **changed,
        }
    )


def test_the_store_holds_a_tag_for_every_word_of_a_long_row_and_none_twice(tmp_path: Path) -> None:
    data = opened(tmp_path)
    targets = data.info.store.splits["test"].ragged("targets")
    names = data.info.labels.names
    for at, tags in enumerate(TEST["tags"]):
        row = targets.values[targets.offsets[at] : targets.offsets[at + 1]]
        assert [names[number] for number in row[row != NO_TAG]] == tags
    assert not any(lost["words_lost"] for lost in data.info.labels.lost.values())


def test_a_run_on_windows_of_tags_answers_every_word_and_scores_as_its_test_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = fit(settings(), SMALL, optim=OptimConfig(lr=0.01), epochs=4, folder=tmp_path / "run")
    predictor = TagPredictor.load(tmp_path / "run")
    answers = predictor.predict(TEST["words"])
    right = [
        one == other
        for row, tags in zip(answers, TEST["tags"], strict=True)
        for one, other in zip(row.tags, tags, strict=True)
    ]
    assert np.mean(right) == pytest.approx(result.metrics["test/word_accuracy"])
    assert np.mean(right) > 0.95
    words = pa.array(TEST["words"])
    ours = predictor.tags(words)
    theirs = through_library(predictor).tags(words)
    assert ours.lost == 0
    np.testing.assert_array_equal(ours.ids, theirs.ids)
    np.testing.assert_allclose(ours.probabilities, theirs.probabilities, atol=1e-5)
    assert verb("export", tmp_path / "run") == 0
    said = (
        "it answers one window of 12 tokens; a word has the tag of the window with most words"
        " around it"
    )
    assert said in capsys.readouterr().out
    with pytest.raises(
        UserError, match=r"its tokenizer cuts the texts that the run reads with data\.long=windows"
    ):
        predictors_of_folder(predictor, tmp_path / "run" / "export")


@pytest.mark.soak(seconds=2)
def test_rows_no_longer_than_a_window_train_as_cut_ones_do(tmp_path: Path) -> None:
    short = rows_of(np.random.default_rng(3).integers(1, 10, size=60))
    found = []
    for name, how in {"cut": {"long": "cut", "max_length": 12}, "windows": {}}.items():
        data = settings(train=short, test=rows_of([4] * 12, seed=4), **how)
        found.append(fit(data, SMALL, epochs=2, folder=tmp_path / name).metrics)
    assert found[0] == found[1]


def opened(folder: Path) -> TagData:
    given = {
        "train": TABLE,
        "test": TEST,
        "text": "words",
        "label": "tags",
        "cache": str(folder),
    }
    data = TagData(**given, vocabulary=PIECES, **WINDOWS)
    data.setup()
    return data


def test_windows_of_tags_are_refused_where_the_network_is_given(tmp_path: Path) -> None:
    model = SMALL.build(
        Outputs(["O", "B-x", "I-x"], "tags"), vocabulary_size=99, padding_id=0, separator_id=None
    )
    message = (
        r"^data\.long: windows, which a network of your own does not read\. Set data\.long=cut\.$"
    )
    with pytest.raises(UserError, match=message):
        Tagger(model).build(opened(tmp_path).info)


def test_a_batch_counts_each_word_of_its_long_rows_once(tmp_path: Path) -> None:
    data = opened(tmp_path)
    batch = next(iter(data.train_dataloader()))
    rows = data.info.store.splits["train"].fixed("rows")[batch.rows.numpy()]
    assert batch.targets is not None
    assert int(batch.targets.ne(NO_TAG).sum()) == sum(len(TABLE["words"][row]) for row in rows)


@given(st.text("a.(\"' ”)x…«", max_size=30))
def test_words_are_those_between_marks(text):
    mark = r"""[(\[{"'«“]"""
    closing = r""".,;:!?)\]}"'»”…"""
    plainly = re.findall(rf"""{mark}|[^\s]+?(?=[{closing}]*(?:\s|$))|\S""", text)
    assert words_of(text) == plainly


def test_the_words_of_a_long_row_of_marks_are_found_in_one_pass():
    # an expression that begins anew at each mark would take hours here
    assert len(words_of("." * 400_000 + "x")) == 1
