"""Texts longer than an encoder reads at once: which tokens become rows, and what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refused

from flatout.data.texts.data import TextData
from flatout.data.texts.settings import TextDataConfig
from flatout.data.tokens.long_texts import Long, LongTexts
from flatout.data.tokens.subwords import Subwords
from flatout.data.tokens.vocabulary import VocabularyConfig, VocabularyKind
from flatout.errors import UserError

WORDS = [f"w{number}" for number in range(60)]


@pytest.fixture(scope="module")
def encoder() -> Subwords:
    return Subwords.train(
        [pa.array([" ".join(WORDS)] * 2)], VocabularyConfig(kind=VocabularyKind.wordpiece)
    )


def rows_of(
    encoder: Subwords, counts: list[int], max_length: int, long: LongTexts
) -> list[list[int]]:
    """Ids of texts of so many words, each word one token."""
    texts = pa.array([" ".join(WORDS[:count]) for count in counts], pa.large_string())
    found = encoder.encode(texts, max_length=max_length, long=long)
    return [row.tolist() for row in np.split(found.tokens, np.cumsum(found.lengths)[:-1])]


def framed(encoder: Subwords, words: list[str]) -> list[int]:
    return encoder.encode(pa.array([" ".join(words)]), max_length=1_000).tokens.tolist()


@given(
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=5),
    window=st.integers(6, 30),
    overlap=st.integers(0, 3),
    most=st.integers(31, 70),
)
def test_windows_hold_every_token_in_order_and_share_what_was_asked_for(
    encoder, counts, window, overlap, most
):
    rows = rows_of(encoder, counts, most, LongTexts(Long.windows, window, overlap))
    room = window - 2
    for count, row in zip(counts, rows, strict=True):
        words = WORDS[: min(count, most - 2)]
        starts = [0, *range(room - overlap, max(1, len(words) - overlap), room - overlap)]
        assert row == [
            id for start in starts for id in framed(encoder, words[start : start + room])
        ]
        sizes = [len(row[at : at + window]) for at in range(0, len(row), window)]
        assert (
            len(sizes)
            == len(starts)
            == LongTexts(Long.windows, window, overlap).count_windows(np.array([len(row)]))
        )


def words_around(word: int, window: range) -> int:
    """How many words of its window the word has on its shorter side; -1 of a window without it."""
    if word not in window:
        return -1
    return min(word - window[0], window[-1] - word)


def test_no_rows_of_words_have_no_windows(encoder):
    empty = pa.array([], pa.list_(pa.string()))
    for long in (LongTexts(), LongTexts(Long.windows, 12, 4)):
        assert len(encoder.encode_words(empty, max_length=40, long=long).firsts) == 0


@given(
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    window=st.integers(6, 30),
    overlap=st.integers(0, 24),
    most=st.integers(31, 70),
)
def test_each_word_is_answered_once_in_the_window_where_it_has_most_context(
    encoder, counts, window, overlap, most
):
    room = window - 2
    overlap = min(overlap, room - 1)
    rows = pa.array([WORDS[:count] for count in counts], pa.list_(pa.string()))
    found = encoder.encode_words(
        rows, max_length=most, long=LongTexts(Long.windows, window, overlap)
    )
    assert found.word_counts.tolist() == [min(count, most - 2) for count in counts]
    expected = []
    for kept in found.word_counts.tolist():
        starts = [0, *range(room - overlap, max(1, kept - overlap), room - overlap)]
        windows = [range(start, min(start + room, kept)) for start in starts]
        nearest = []
        for word in range(kept):
            contexts = [words_around(word, words) for words in windows]
            nearest.append(contexts.index(max(contexts)))
        for number, words in enumerate(windows):
            expected += [False, *(nearest[word] == number for word in words), False]
    assert found.firsts.tolist() == expected
    assert len(found.block.tokens) == len(expected)


def test_both_ends_of_a_text_are_read_a_quarter_from_its_beginning(encoder):
    rows = rows_of(encoder, [8, 10, 40], 10, LongTexts(Long.head_tail))
    assert rows[0] == framed(encoder, WORDS[:8])
    assert rows[1] == framed(encoder, [*WORDS[:2], *WORDS[4:10]])
    assert rows[2] == framed(encoder, [*WORDS[:2], *WORDS[34:40]])


@pytest.mark.parametrize("kind", list(Long))
def test_what_is_lost_is_counted_the_same_in_each_way(encoder, kind):
    texts = pa.array([" ".join(WORDS[:count]) for count in (3, 50)], pa.large_string())
    found = encoder.encode(
        texts, max_length=22, long=LongTexts(kind, *([8, 2] if kind is Long.windows else []))
    )
    assert (found.truncated_rows, found.truncated_tokens, found.whole_lengths.tolist()) == (
        1,
        30,
        [5, 52],
    )


WINDOWS: dict[str, Any] = {
    "long": "windows",
    "window": 8,
    "max_length": 32,
    "overlap": 2,
}
PIECES = VocabularyConfig(kind=VocabularyKind.wordpiece, min_frequency=1)
TABLE = {"text": [" ".join(WORDS[: 5 + row % 30]) for row in range(60)], "label": ["a", "b"] * 30}


@pytest.mark.parametrize(
    ("changed", "where", "named"),
    [
        ({"overlap": 8}, "data.overlap", "below data.window=8"),
        ({"max_length": 8}, "data.max_length", "data.window=8"),
        ({"pair": True, "text": ["a", "b"]}, "data.long", "windows with pairs"),
        ({"problem": "none"}, "data.long", "windows with data.problem=none"),
        ({"long": "head_tail", "problem": "tags"}, "data.long", "head_tail with data.problem=tags"),
    ],
)
def test_settings_of_windows_that_do_not_fit_are_refused(changed, where, named):
    with pytest.raises(UserError) as caught:
        TextDataConfig(**{**WINDOWS, "train": "x.csv", **changed})
    assert caught.value.where == where
    assert named in str(caught.value)
    assert "problem" not in changed or "data.long=cut" in caught.value.hint


@pytest.mark.parametrize(
    ("changed", "where", "allowed"),
    [
        ({"window": 2, "overlap": 0}, "data.window", "more than 2"),
        ({"window": 8, "overlap": 6}, "data.window", "more than 8"),
        ({"long": "head_tail", "max_length": 3}, "data.max_length", "more than 3"),
        ({"long": "cut", "max_length": 2}, "data.max_length", "more than 2"),
    ],
)
def test_rows_without_room_beside_special_tokens_are_refused(changed, where, allowed, tmp_path):
    own_tokens = changed.get("window") or changed["max_length"]
    with refused(where, f"{own_tokens} tokens, 2 of them special", allowed=allowed):
        data_of_windows(tmp_path, **changed).setup()


def test_pairs_without_a_token_of_each_text_are_refused(tmp_path):
    table = {**TABLE, "other": [f"w{row}" for row in range(60)]}
    pairs = {"train": table, "pair": True, "text": ["text", "other"], "label": "label"}
    with refused("data.max_length", "4 tokens, 3 of them special", allowed="more than 4"):
        data_of_windows(tmp_path, **pairs, long="cut", max_length=4).setup()


def test_windows_without_an_encoder_are_refused(tmp_path):
    with refused("data.long", "windows", fix="model=transformer"):
        data_of_windows(tmp_path, vocabulary=VocabularyConfig()).setup()


def data_of_windows(cache: Path, **changed: Any) -> TextData:
    given = {
        "train": TABLE,
        "vocabulary": PIECES,
        "cache": str(cache),
    }
    return TextData(**(WINDOWS | given | changed))


def test_a_text_of_a_million_characters_is_cut_and_counted(encoder):
    found = encoder.encode(
        pa.array(["w1 " * 340_000]), max_length=100, long=LongTexts(Long.windows, 30, 4)
    )
    assert found.lengths.tolist() == [3 * 30 + 28]
    assert (found.truncated_rows, found.truncated_tokens) == (1, 340_000 - 98)
