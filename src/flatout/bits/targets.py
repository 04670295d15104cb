"""Targets of records: the grams that a model answers, then the grams that were hashed, as one ragged column."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from flatout.bits.encodings import padded
from flatout.bits.grams import LABELS, GramIndex, Rows, label_index, plain_texts


def targets_of(raw: pa.Array, hashed: GramIndex) -> Rows:
    """Targets as the store keeps them: answers first, then hashed grams, numbered after each other."""
    ids, lengths = hashed.rows(padded(raw))
    return joined_rows(label_index().rows(plain_texts(raw)), (ids + len(LABELS), lengths))


def joined_rows(first: Rows, second: Rows) -> Rows:
    """Two ragged columns as one: each row's ids of the first, then of the second."""
    (first_ids, first_lengths), (second_ids, second_lengths) = first, second
    lengths = first_lengths + second_lengths
    ends = np.cumsum(lengths, dtype=np.int64)
    ids = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.int32)
    is_first = np.zeros(len(ids), dtype=np.bool_)
    starts = np.repeat(ends - lengths, first_lengths)
    within = np.arange(len(first_ids)) - np.repeat(np.cumsum(first_lengths) - first_lengths, first_lengths)
    is_first[starts + within] = True
    ids[is_first], ids[~is_first] = first_ids, second_ids
    return ids, lengths.astype(np.int32)
