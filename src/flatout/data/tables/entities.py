"""Entities in tags of BIO: from a number for each word to runs of words with a type, whole batches at a time.

Tags are numbered as `TagCensus.names` lists them: 0 is O, then B and I of each type. An I that continues nothing begins
an entity, as the CoNLL tasks count it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MOST_WORDS, _MOST_KINDS = 1 << 18, 1 << 10
NO_TAG = -100
"""Stands where a token begins no word."""


@dataclass(frozen=True, slots=True)
class Entities:
    """Runs of words: the row, the first word, the word after the last, and the type's number from 0."""

    row: NDArray[np.int64]
    start: NDArray[np.int64]
    """Counted within the row."""
    stop: NDArray[np.int64]
    kind: NDArray[np.int64]

    def keys(self) -> NDArray[np.int64]:
        """One number an entity; equal where all of it is equal."""
        return ((self.row * _MOST_WORDS + self.start) * _MOST_WORDS + self.stop) * _MOST_KINDS + self.kind


def find_entities(ids: NDArray[np.integer], offsets: NDArray[np.integer]) -> Entities:
    """The entities of rows; `offsets` say where each row's words begin."""
    lengths = np.diff(offsets)
    row = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(ids)) - np.repeat(offsets[:-1], lengths)
    is_marked = ids > 0
    kind = (ids.astype(np.int64) - 1) // 2
    is_inside = is_marked & (ids % 2 == 0)
    continues = np.zeros(len(ids), np.bool_)
    continues[1:] = is_inside[1:] & is_marked[:-1] & (kind[1:] == kind[:-1]) & (row[1:] == row[:-1])
    begins = np.flatnonzero(is_marked & ~continues)
    # An entity runs until the next word that does not continue it.
    breaks = np.append(np.flatnonzero(~continues), len(ids))
    ends = breaks[np.searchsorted(breaks, begins, side="right")] if len(begins) else begins
    return Entities(row[begins], place[begins], place[begins] + ends - begins, kind[begins])
