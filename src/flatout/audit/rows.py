"""The rows of an audit of texts, and the folds they are dealt into.

A row is a labelled text, or an entity of a tagged sentence with the words around it. Rows that must
not be parted (equal texts, rows of one `data.group`) have one group number and share a fold.
`read_rows` fills these classes from the data of a run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Objects = NDArray[np.object_]
LEAST_ROWS = 40  # with fewer rows a fold's score is mostly chance, so there is no audit


@dataclass(frozen=True, slots=True)
class Sentences:
    """Tagged sentences, whose entities are rows."""

    words: Objects  # the list of words of each sentence
    tags: Objects  # the list of tags of each sentence
    groups: NDArray[np.int64]  # group of each sentence, which its rows have as well

    def find_folds(self, rows: AuditRows, folds: NDArray[np.int64]) -> NDArray[np.int64]:
        """The fold of each sentence, given those of the rows; -1: no row of its group is audited.

        Groups of rows [4, 2] in folds [0, 1], sentences of groups [4, 7, 2] → folds [0, -1, 1].
        """
        num_groups = max(rows.groups.max(), self.groups.max()) + 1
        fold_of_group = np.full(num_groups, -1)
        fold_of_group[rows.groups] = folds
        return fold_of_group[self.groups]


@dataclass(frozen=True, slots=True)
class AuditRows:
    """Labelled texts, and where each of them stands. Arrays have an entry for each row."""

    texts: Objects  # as the quick model reads them
    shown: Objects  # as a person reads them
    labels: NDArray[np.int64]  # numbers in `classes`
    files: Objects  # name of the source
    numbers: NDArray[np.int64]  # of the row in its source, from 1
    splits: Objects
    groups: NDArray[np.int64]  # rows of one group stay in one fold
    locations: Objects  # "file:row", as a person looks a row up; of several files the one
    column: Objects  # values of the column by which scores are parted; empty texts without one
    classes: list[str]
    conflicts: int = 0  # rows whose text has another label elsewhere
    is_tagged: bool = False  # whether rows are entities and words like them
    of_splits: dict[str, int] = field(default_factory=dict)  # rows of each split, before drawing
    sentences: Sentences | None = None  # of tagged rows
    # `[N, 3]` of tagged rows: number of the sentence, first word, word behind the last
    spans: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def average_words(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The mean over each tagged row's own words, of `[words, C]` values of all sentences.

        Sentences of 4 and 2 words, span (1, 0, 2) → the mean of the values of words 4 and 5.
        """
        assert self.sentences is not None
        assert self.spans is not None
        begins = np.cumsum([0, *map(len, self.sentences.words)])
        bounds = begins[self.spans[:, :1]] + self.spans[:, 1:]
        # `reduceat` adds up from each bound to the next one. Every other sum is a row's; the ones
        # between lie outside. The row of zeros allows a bound behind the last word.
        padded = np.pad(values, ((0, 1), (0, 0)))
        sums = np.add.reduceat(padded, bounds.ravel())[::2]
        return sums / np.diff(self.spans[:, 1:])


def find_small_classes(rows: AuditRows, num_folds: int) -> list[str]:
    """Classes with fewer rows than folds: a fold lacks them, so the audit knows little of them."""
    counts = np.bincount(rows.labels, minlength=len(rows.classes))
    return [name for name, count in zip(rows.classes, counts, strict=True) if count < num_folds]


def deal_folds(rows: AuditRows, num_folds: int, seed: int = 0) -> NDArray[np.int64]:
    """The fold of each row: whole groups, so that each fold has its share of every class."""
    # Groups of classes [b, a, a, b] in 2 folds: sorted by class a a b b, dealt 0 1 0 1. The order
    # within a class is random, and a group counts as of the class of its first row.
    random = np.random.default_rng(seed)
    groups, first, inverse = np.unique(rows.groups, return_index=True, return_inverse=True)
    order = np.lexsort((random.random(len(groups)), rows.labels[first]))
    fold_of_group = np.empty(len(groups), np.int64)
    fold_of_group[order] = np.arange(len(groups)) % num_folds
    return fold_of_group[inverse]
