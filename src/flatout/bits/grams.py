"""Texts as pairs of neighbouring characters (2-grams), whole columns at once.

A column becomes one run of code points; every neighbouring pair that lies in one row is a gram. A
table looks ASCII pairs up, which is nearly all of them; other pairs go through one search over the
distinct ones. Two kinds of grams are known here. *Labels* are what a model answers: letter-letter,
letter-digit and digit-digit pairs of the plain text, 1,036 in all. *Hashed* grams are what an
encoder took in: every pair of the raw text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from string import ascii_lowercase, digits

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.tables.splits import bytes_of

Ids = NDArray[np.int32]
RaggedIds = tuple[Ids, Ids]  # ids row after row, and how many each row has
FIELD_END = "\x1f"  # stands between the fields of a stored text
_ASCII = 128
_PAIRS = (
    *product(ascii_lowercase, repeat=2),
    *product(ascii_lowercase, digits),
    *product(digits, repeat=2),
)
# every gram a model answers, in the order of outputs: aa … zz, a0 … z9, 00 … 99
LABELS = tuple(map("".join, _PAIRS))


def raw_texts(fields: Sequence[pa.Array]) -> pa.Array:
    """The fields of each record joined as they are and lower-cased: what encoders hash.

    Nulls count as empty.
    """
    filled = [pc.fill_null(field.cast(pa.large_string()), "") for field in fields]
    return pc.utf8_lower(pc.binary_join_element_wise(*filled, pa.scalar("", pa.large_string())))


def padded(raw: pa.Array) -> pa.Array:
    """Texts with a blank at both ends; empty ones stay empty."""
    raw = raw.cast(pa.large_string())
    blank = pa.scalar(" ", pa.large_string())
    with_blanks = pc.binary_join_element_wise(blank, raw, blank, pa.scalar("", pa.large_string()))
    return pc.if_else(pc.equal(pc.binary_length(raw), 0), raw, with_blanks)


def plain_texts(raw: pa.Array) -> pa.Array:
    """Raw texts without quotes, dots and slashes, and without blanks at the ends: what labels are
    read from.
    """
    return pc.utf8_trim_whitespace(pc.replace_substring_regex(raw, r'["./]', ""))


class GramIndex:
    """Numbers grams in the order they are met; a frozen one numbers no more."""

    def __init__(self, names: Sequence[str] = (), *, is_frozen: bool = False) -> None:
        self.names: list[str] = []
        self._numbers: dict[int, int] = {}
        # the numbers of pairs of ASCII, for a quick look
        self._ascii = np.full(_ASCII * _ASCII, -1, dtype=np.int32)
        for name in names:
            self._add(ord(name[0]) << 32 | ord(name[1]))
        self.is_frozen = is_frozen

    def __len__(self) -> int:
        return len(self.names)

    def rows(self, texts: pa.Array) -> RaggedIds:
        """The distinct grams of each text, by number; unnumbered ones are left out."""
        keys, lengths = _pairs(texts)
        ids = self._ids(keys)
        row = np.repeat(np.arange(len(lengths)), lengths)[ids >= 0]
        return distinct(ids[ids >= 0], np.bincount(row, minlength=len(lengths)))

    def _ids(self, keys: NDArray[np.uint64]) -> Ids:
        is_ascii = (keys >> np.uint64(32) < _ASCII) & (keys & np.uint64(0xFFFFFFFF) < _ASCII)
        places = np.where(
            is_ascii, (keys >> np.uint64(32)) * np.uint64(_ASCII) + (keys & np.uint64(0x7F)), 0
        )
        ids = np.where(is_ascii, self._ascii[places.astype(np.int64)], -1)
        found, inverse = np.unique(keys[ids < 0], return_inverse=True)
        for key in [] if self.is_frozen else found.tolist():
            if key not in self._numbers:
                self._add(key)
        ids[ids < 0] = np.array(
            [self._numbers.get(key, -1) for key in found.tolist()], dtype=np.int32
        )[inverse]
        return ids

    def _add(self, key: int) -> None:
        first, second = key >> 32, key & 0xFFFFFFFF
        self._numbers[key] = len(self.names)
        if first < _ASCII and second < _ASCII:
            self._ascii[first * _ASCII + second] = len(self.names)
        self.names.append(chr(first) + chr(second))


# the labels under their numbers; frozen, so one serves all
LABEL_INDEX = GramIndex(LABELS, is_frozen=True)


def distinct(ids: NDArray[np.integer], lengths: NDArray[np.integer]) -> RaggedIds:
    """Each row's ids in rising order, every one once."""
    width = int(ids.max(initial=0)) + 1
    keys = np.sort(np.repeat(np.arange(len(lengths), dtype=np.int64), lengths) * width + ids)
    row, ids = np.divmod(keys[np.diff(keys, prepend=-1) > 0], width)
    return ids.astype(np.int32), np.bincount(row, minlength=len(lengths)).astype(np.int32)


def code_points(texts: pa.Array) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Every character of every text in one run, and `[N+1]` where each text begins."""
    texts = texts.cast(pa.large_string())
    offsets = np.append(
        0, np.cumsum(pc.utf8_length(texts).to_numpy(zero_copy_only=False), dtype=np.int64)
    )
    data, _ = bytes_of(texts)
    if len(data) == offsets[-1]:  # a byte a character: ASCII
        return data.astype(np.uint32), offsets
    return np.frombuffer(data.tobytes().decode().encode("utf-32-le"), dtype="<u4"), offsets


def _pairs(texts: pa.Array) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Both characters of every pair as one number, and how many pairs each text has."""
    points, offsets = code_points(texts)
    lengths = np.maximum(np.diff(offsets) - 1, 0)
    starts = np.ones(len(points), dtype=np.bool_)
    # the last character of a text begins no pair
    starts[offsets[1:][np.diff(offsets) > 0] - 1] = False
    first = np.flatnonzero(starts)
    return points[first].astype(np.uint64) << np.uint64(32) | points[first + 1].astype(
        np.uint64
    ), lengths


def targets_of(raw: pa.Array, hashed: GramIndex) -> RaggedIds:
    """Targets as the store keeps them: answers first, then hashed grams, numbered after
    each other.
    """
    ids, lengths = hashed.rows(padded(raw))
    return joined_rows(LABEL_INDEX.rows(plain_texts(raw)), (ids + len(LABELS), lengths))


def joined_rows(first: RaggedIds, second: RaggedIds) -> RaggedIds:
    """Two ragged columns as one: each row's ids of the first, then of the second."""
    (first_ids, first_lengths), (second_ids, second_lengths) = first, second
    rows = np.concatenate(
        [np.repeat(np.arange(len(each)), each) for each in (first_lengths, second_lengths)]
    )
    ids = np.concatenate([first_ids, second_ids])[np.argsort(rows, kind="stable")]
    return ids.astype(np.int32), (first_lengths + second_lengths).astype(np.int32)
