"""The rows of an audit: texts and labels as a run reads them, of all splits, and the folds they are
dealt into.

Of tagged words a row is an entity with its type, or a word outside that is like one: one with a
capital inside a sentence, or part of an entity elsewhere. Each is read with the words around it,
which are marked, so that a linear model tells them from its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Objects = NDArray[np.object_]
LEAST_ROWS = 40  # rows below which no fold says anything


@dataclass(frozen=True, slots=True)
class Sentences:
    """Tagged sentences, whose parts are rows."""

    words: Objects
    tags: Objects
    groups: NDArray[np.int64]  # numbers as those of the rows

    def folds(self, rows: AuditRows, folds: NDArray[np.int64]) -> NDArray[np.int64]:
        """The fold of each, that of all rows of its group; -1 where none of these is looked at."""
        of_groups = np.full(max(rows.groups.max(), self.groups.max()) + 1, -1)
        of_groups[rows.groups] = folds
        return of_groups[self.groups]


@dataclass(frozen=True, slots=True)
class AuditRows:
    """Labelled texts, and where each of them stands: arrays with an entry for each row."""

    texts: Objects
    shown: Objects  # the same as a person reads them
    labels: NDArray[np.int64]
    files: Objects
    rows: NDArray[np.int64]  # numbers in their files, from 1
    splits: Objects
    # rows of one group stay in one fold: equal texts, or those of `data.group`
    groups: NDArray[np.int64]
    places: Objects  # file and row, as a person looks them up
    # what the rows have in the column by which scores are parted; empty texts without one
    column: Objects
    classes: list[str]
    conflicts: int = 0  # rows whose text has another label elsewhere
    is_tagged: bool = False  # whether they are entities, and words like them
    # rows of each split, before some were drawn
    of_splits: dict[str, int] = field(default_factory=dict)
    sentences: Sentences | None = None
    # `[N, 3]`: each row's sentence, its first word and the word after its last
    spans: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def of_spans(self, of_words: NDArray[np.float64]) -> NDArray[np.float64]:
        """The mean of each row's words, of values of all words of all sentences."""
        assert self.sentences is not None and self.spans is not None
        begins = np.cumsum([0, *map(len, self.sentences.words)])[self.spans[:, :1]]
        sums = np.add.reduceat(
            np.pad(of_words, ((0, 1), (0, 0))), (begins + self.spans[:, 1:]).ravel()
        )[::2]
        return sums / np.diff(self.spans[:, 1:])


def choose(rows: AuditRows, places: NDArray[np.int64]) -> AuditRows:
    """The rows at some places."""
    values = {each.name: getattr(rows, each.name) for each in fields(rows)}
    chosen: dict[str, Any] = {
        name: each[places] for name, each in values.items() if isinstance(each, np.ndarray)
    }
    return replace(rows, **chosen)


def small_classes(rows: AuditRows, num_folds: int) -> list[str]:
    """Classes with fewer rows than folds: some fold learns or judges them from nothing."""
    counts = np.bincount(rows.labels, minlength=len(rows.classes))
    return [name for name, count in zip(rows.classes, counts, strict=True) if count < num_folds]


def deal(rows: AuditRows, num_folds: int, seed: int = 0) -> NDArray[np.int64]:
    """The fold of each row: whole groups, class by class, so that each fold has its
    share of each.
    """
    random = np.random.default_rng(seed)
    groups, first, inverse = np.unique(rows.groups, return_index=True, return_inverse=True)
    order = np.lexsort((random.random(len(groups)), rows.labels[first]))
    folds = np.empty(len(groups), np.int64)
    folds[order] = np.arange(len(groups)) % num_folds
    return folds[inverse]
