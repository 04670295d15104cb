"""2-grams of whole columns are those that a plain loop finds, in any alphabet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from flatout.bits.grams import (
    LABEL_INDEX,
    LABELS,
    GramIndex,
    code_points,
    join_fields,
    sort_distinct,
    strip_punctuation,
)

TEXTS = st.lists(st.text(max_size=12), max_size=20)
CLOSE = st.lists(st.text(alphabet="ab1 é/\U0001f600", max_size=12), max_size=20)


def split(ids: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    if not len(lengths):
        return []
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


def grams_of_rows(rows: list[list[int]], names: Sequence[str]) -> list[set[str]]:
    """The pairs of letters of each row, by the names of their numbers."""
    return [set(map(names.__getitem__, row)) for row in rows]


def plain_grams(text: str) -> set[str]:
    return {text[place : place + 2] for place in range(len(text) - 1)}


def test_the_labels_are_the_published_ones():
    assert len(LABELS) == 26 * 26 + 26 * 10 + 10 * 10 == len(set(LABELS))
    assert (LABELS[0], LABELS[675], LABELS[676], LABELS[935], LABELS[936], LABELS[-1]) == (
        "aa",
        "zz",
        "a0",
        "z9",
        "00",
        "99",
    )


@given(TEXTS | CLOSE)
def test_an_index_numbers_the_pairs_that_a_plain_loop_finds(texts):
    index = GramIndex()
    rows = split(*index.rows(pa.array(texts, pa.large_string())))
    assert grams_of_rows(rows, index.names) == [plain_grams(text) for text in texts]
    assert all(row == sorted(set(row)) for row in rows)


@given(TEXTS | CLOSE)
def test_a_frozen_index_leaves_out_what_it_does_not_know(texts):
    rows = split(*LABEL_INDEX.rows(pa.array(texts, pa.large_string())))
    expected = [plain_grams(text) & set(LABELS) for text in texts]
    assert grams_of_rows(rows, LABELS) == expected


@given(TEXTS)
def test_numbers_do_not_depend_on_how_a_column_is_cut(texts):
    whole = GramIndex()
    cut = GramIndex()
    column = pa.array(["xx", *texts, "yy"], pa.large_string())
    expected = split(*whole.rows(column.slice(1, len(texts))))
    found = [row for text in texts for row in split(*cut.rows(pa.array([text], pa.large_string())))]
    assert grams_of_rows(expected, whole.names) == grams_of_rows(found, cut.names)


@given(TEXTS)
def test_code_points_are_those_of_python(texts):
    points, offsets = code_points(pa.array(texts, pa.string()))
    assert points.tolist() == [ord(letter) for text in texts for letter in text]
    assert np.diff(offsets).tolist() == [len(text) for text in texts]


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=8))
def test_distinct_keeps_each_number_of_a_row_once(rows):
    flat = np.array([number for row in rows for number in row], dtype=np.int64)
    ids, lengths = sort_distinct(flat, np.array([len(row) for row in rows], dtype=np.int64))
    assert split(ids, lengths) == [sorted(set(row)) for row in rows]


def test_labels_are_read_off_the_text_without_quotes_dots_and_slashes():
    fields = [pa.array(["Ann", None, "O'Neil "]), pa.array(["St. John", "Li", '"X"'])]
    raw = join_fields([*fields, pa.array(["2/5/1994", "", "1/1/2000"])])
    assert raw.to_pylist() == ["annst. john2/5/1994", "li", 'o\'neil "x"1/1/2000']
    assert strip_punctuation(raw).to_pylist() == ["annst john251994", "li", "o'neil x112000"]
    ids, lengths = LABEL_INDEX.rows(strip_punctuation(raw))
    second = ids[lengths[0] : lengths[0] + lengths[1]]
    assert [LABELS[number] for number in second] == ["li"]
    assert "t " not in {LABELS[number] for number in ids}
