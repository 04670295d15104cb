"""Texts as pairs of neighbouring characters (2-grams), whole columns at once.

A column becomes one array of code points. Every two neighbours that lie in one row are a gram. A
gram's number comes from a table for pairs of ASCII characters, which are nearly all, and from a
dictionary for the others.

There are two kinds of grams. *Labels* are what a model answers: letter-letter, letter-digit and
digit-digit pairs of the plain text, 1,036 in all. *Hashed* grams are what an encoder took in: every
pair of the raw text. A record with the fields `Ann`, `O'Lee` and `2/5` has the raw text
`anno'lee2/5`:

    labels     an nn no le ee e2 25                        of `anno'lee25`

    hashed     ' a' an nn no o' 'l le ee e2 2/ /5 '5 '     of the raw text with blanks at its ends

Open this file to change what counts as a gram or how grams are numbered.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from string import ascii_lowercase, digits

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.ragged import row_bounds
from flatout.data.tables.splits import bytes_of

Ids = NDArray[np.int32]
Keys = NDArray[np.uint64]  # pairs: first character in the upper 32 bits, second in the lower
RaggedIds = tuple[Ids, Ids]  # ids row after row, and how many each row has
FIELD_END = "\x1f"  # stands between the fields of a stored text
_ASCII = 128  # code points below are ASCII
_HALF = np.uint64(32)  # bits of a key that hold one character
_LOWER_HALF = np.uint64(0xFFFFFFFF)
_UNNUMBERED = -1
_PAIRS = (
    *product(ascii_lowercase, repeat=2),
    *product(ascii_lowercase, digits),
    *product(digits, repeat=2),
)
# every gram a model answers, in the order of outputs: aa … zz, a0 … z9, 00 … 99
LABELS = tuple(map("".join, _PAIRS))


def join_fields(fields: Sequence[pa.Array]) -> pa.Array:
    """Join the fields of each record without a separator, in lower case: the raw text.

    Encoders hash raw texts. Nulls count as empty.
    """
    filled = [pc.fill_null(field.cast(pa.large_string()), "") for field in fields]
    joined = pc.binary_join_element_wise(*filled, _large(""))
    return pc.utf8_lower(joined)


def pad_with_blanks(raw: pa.Array) -> pa.Array:
    """Put a blank at both ends of each text; empty texts stay empty."""
    raw = raw.cast(pa.large_string())
    blank = _large(" ")
    with_blanks = pc.binary_join_element_wise(blank, raw, blank, _large(""))
    is_empty = pc.equal(pc.binary_length(raw), 0)
    return pc.if_else(is_empty, raw, with_blanks)


def strip_punctuation(raw: pa.Array) -> pa.Array:
    """Turn raw texts into plain texts, which labels are read from.

    Quotes, dots and slashes go, and blanks at the ends.
    """
    letters = pc.replace_substring_regex(raw, r'["./]', "")
    return pc.utf8_trim_whitespace(letters)


def _large(text: str) -> pa.Scalar:
    return pa.scalar(text, pa.large_string())


class GramIndex:
    """Numbers grams in the order in which they first occur.

    A frozen index adds no grams: it leaves those without a number out.
    """

    def __init__(self, names: Sequence[str] = (), *, is_frozen: bool = False) -> None:
        self.names: list[str] = []
        self._numbers: dict[int, int] = {}  # by key
        # the same numbers for ASCII pairs, at first * 128 + second: a look-up for a whole array
        self._ascii = np.full(_ASCII * _ASCII, _UNNUMBERED, dtype=np.int32)
        for name in names:
            self._add(ord(name[0]) << 32 | ord(name[1]))
        self.is_frozen = is_frozen

    def __len__(self) -> int:
        return len(self.names)

    def rows(self, texts: pa.Array) -> RaggedIds:
        """The numbers of each text's distinct grams, in rising order."""
        keys, lengths = _pair_keys(texts)
        ids = self._number(keys)
        is_numbered = ids >= 0
        row = np.repeat(np.arange(len(lengths)), lengths)
        numbered_of_row = np.bincount(row[is_numbered], minlength=len(lengths))
        return sort_distinct(ids[is_numbered], numbered_of_row)

    def _number(self, keys: Keys) -> Ids:
        """The number of each key, -1 where a frozen index has none."""
        # All ASCII pairs are one look into a table. Other pairs read its first cell, and their
        # answer is thrown away.
        first = keys >> _HALF
        second = keys & _LOWER_HALF
        is_ascii = (first < _ASCII) & (second < _ASCII)
        cells = np.where(is_ascii, first * np.uint64(_ASCII) + second, 0)
        numbers_in_table = self._ascii[cells.astype(np.int64)]
        ids = np.where(is_ascii, numbers_in_table, _UNNUMBERED)
        # Each key that the table does not know is looked up once, however many rows hold it.
        is_missing = ids < 0
        missing_keys, place_of_key = np.unique(keys[is_missing], return_inverse=True)
        numbers = [self._look_up(key) for key in missing_keys.tolist()]
        ids[is_missing] = np.array(numbers, dtype=np.int32)[place_of_key]
        return ids

    def _look_up(self, key: int) -> int:
        """The number of one gram; a new gram gets the next number unless the index is frozen."""
        if key not in self._numbers and not self.is_frozen:
            self._add(key)
        return self._numbers.get(key, _UNNUMBERED)

    def _add(self, key: int) -> None:
        number = len(self.names)
        first = key >> 32
        second = key & 0xFFFFFFFF
        self._numbers[key] = number
        if first < _ASCII and second < _ASCII:
            self._ascii[first * _ASCII + second] = number
        self.names.append(chr(first) + chr(second))


# Numbers of the labels. It is frozen and has no other state, so everybody shares it.
LABEL_INDEX = GramIndex(LABELS, is_frozen=True)


def sort_distinct(ids: NDArray[np.integer], lengths: NDArray[np.integer]) -> RaggedIds:
    """Sort the ids of each row and drop repeats; `lengths` says how many ids each row has."""
    # Row and id together are one number, so that one sort orders all rows:
    #
    #     ids              2 0 2   1      lengths 3 and 1; width 3, one more than the largest id
    #     row * 3 + id     2 0 2   4
    #     sorted           0 2 2   4
    #     each once        0 2     4      rows 0 0 1, ids 0 2 1
    width = int(ids.max(initial=0)) + 1
    row = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    keys = np.sort(row * width + ids)
    is_new = np.diff(keys, prepend=-1) > 0
    new_row, new_ids = np.divmod(keys[is_new], width)
    counts = np.bincount(new_row, minlength=len(lengths))
    return new_ids.astype(np.int32), counts.astype(np.int32)


def code_points(texts: pa.Array) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """All characters of all texts as one array, and `[N+1]` where each text begins in it."""
    texts = texts.cast(pa.large_string())
    lengths = pc.utf8_length(texts).to_numpy(zero_copy_only=False)
    offsets = row_bounds(lengths)
    data, _ = bytes_of(texts)
    # As many bytes as characters means that all are ASCII: then bytes are code points already.
    if len(data) == offsets[-1]:
        return data.astype(np.uint32), offsets
    utf32 = data.tobytes().decode().encode("utf-32-le")
    return np.frombuffer(utf32, dtype="<u4"), offsets


def _pair_keys(texts: pa.Array) -> tuple[Keys, NDArray[np.int64]]:
    """The key of every pair of neighbours, and how many pairs each text has."""
    points, offsets = code_points(texts)
    lengths = np.diff(offsets)
    # The last character of a text begins no pair: "abc", "de" -> ab, bc, de, but not cd.
    begins_pair = np.ones(len(points), dtype=np.bool_)
    last = offsets[1:][lengths > 0] - 1
    begins_pair[last] = False
    begins = np.flatnonzero(begins_pair)
    first = points[begins].astype(np.uint64)
    second = points[begins + 1].astype(np.uint64)
    return first << _HALF | second, np.maximum(lengths - 1, 0)


def encode_targets(raw: pa.Array, hashed: GramIndex) -> RaggedIds:
    """Targets of each raw text as the store holds them: its labels, then its hashed grams.

    Numbers of hashed grams begin where those of labels end.
    """
    labels = LABEL_INDEX.rows(strip_punctuation(raw))
    ids, lengths = hashed.rows(pad_with_blanks(raw))
    return join_rows(labels, (ids + len(LABELS), lengths))


def join_rows(first: RaggedIds, second: RaggedIds) -> RaggedIds:
    """Two ragged columns as one: each row's ids of the first, then of the second.

    [7 8 | 9] and [5 | 6 4] become [7 8 5 | 9 6 4].
    """
    first_ids, first_lengths = first
    second_ids, second_lengths = second
    numbers = np.arange(len(first_lengths))
    rows = np.concatenate([np.repeat(numbers, first_lengths), np.repeat(numbers, second_lengths)])
    # A stable sort leaves ids of the first column before those of the second.
    order = np.argsort(rows, kind="stable")
    ids = np.concatenate([first_ids, second_ids])[order]
    return ids.astype(np.int32), (first_lengths + second_lengths).astype(np.int32)
