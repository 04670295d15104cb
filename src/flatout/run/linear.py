"""The linear model of a run's texts: the texts of its splits, read again, and a fit within a time.

A store has tokens and no texts, so the source is read once more, as the run has split it. The rival
of a run and the linear model that may answer with its network (`run/mixing.py`) come from here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.checks.cleaning import read_texts
from flatout.data.checks.findings import Findings
from flatout.data.problem import Problem
from flatout.data.tables.table import changed
from flatout.data.texts.source import TextSource
from flatout.distributed.limits import free_bytes

if TYPE_CHECKING:
    from flatout.baselines.linear_text import QuickModel
    from flatout.data.tags.data import TagData
    from flatout.data.texts.data import TextData

Learned = TypeVar("Learned")
_TRIED_ROWS = 2_048  # rows whose training is timed
_SLOWER = 1.5  # a row of the whole training takes up to so many times a timed row


class TooSlow(Exception):
    """Raised by a rival that would take longer than it may, with the seconds it would take."""


def require_time(needed_s: float, limit_s: float) -> None:
    if needed_s > limit_s:
        raise TooSlow(needed_s)


@dataclass(frozen=True, slots=True)
class RunTexts:
    """The texts of some splits of a run, and a linear model on those of training."""

    data: TextData
    texts: dict[str, list[str]]  # by split

    @classmethod
    def read(cls, source: TextSource, data: TextData, splits: Iterable[str]) -> RunTexts:
        return cls(data, {split: texts_of(source, data, split) for split in splits})

    def fit(self, limit_s: float) -> QuickModel:
        """Learn from the training rows; `TooSlow` if some rows show that it would be."""
        return self._learn(lambda model, texts, targets: model.fit(texts, targets), limit_s)

    def fit_with_counts(self, limit_s: float) -> tuple[QuickModel, QuickModel]:
        """The same, and beside it the model to which Naive Bayes was added."""

        def learn(
            model: QuickModel, texts: Sequence[str], targets: NDArray[Any]
        ) -> tuple[QuickModel, QuickModel]:
            return model, model.fit_with_counts(texts, targets)

        return self._learn(learn, limit_s)

    def fit_counts(self, limit_s: float) -> QuickModel:
        """Naive Bayes alone, which learns faster."""
        return self._learn(lambda model, texts, targets: model.fit_counts(texts, targets), limit_s)

    def _learn(
        self,
        learn: Callable[[QuickModel, Sequence[str], NDArray[Any]], Learned],
        limit_s: float,
    ) -> Learned:
        """What `learn` makes of the training rows.

        `TooSlow` if some rows show that it would be, `MemoryError` if it would take more than half
        of what is free. The rows of the other splits are counted, too: the model is to answer them.
        """
        started = time.perf_counter()
        # scikit-learn takes a second to import
        from flatout.baselines.linear_text import QuickModel, needed_bytes

        labels = self.data.info.labels
        texts = self.texts["train"]
        targets = targets_of(self.data, "train")
        _require_memory(needed_bytes(texts, labels.num_outputs))
        if len(texts) > 2 * _TRIED_ROWS:
            # Rows from all over the split are timed: neighbours may be alike.
            read = time.perf_counter()
            some = slice(0, None, len(texts) // _TRIED_ROWS)
            learn(QuickModel(labels.problem, labels.num_outputs), texts[some], targets[some])
            now = time.perf_counter()
            row_s = (now - read) / len(texts[some])
            num_rows = sum(map(len, self.texts.values()))
            require_time(now - started + _SLOWER * num_rows * row_s, limit_s)
        return learn(QuickModel(labels.problem, labels.num_outputs), texts, targets)


def _require_memory(needed: float) -> None:
    """Refuse a linear model that would fill the memory of a run that has trained to its end."""
    free = free_bytes()
    if needed > free / 2:
        raise MemoryError(
            f"n-grams would take {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB is free"
        )


def rows_of(
    source: TextSource, columns: Sequence[str], data: TextData | TagData, split: str
) -> Iterator[tuple[NDArray[np.int64], pa.RecordBatch]]:
    """The rows of a split, read again block by block: their numbers in the table, and columns.

    The store has tokens and no texts. It has the number of each row, so that the source is read as
    the run has split it.
    """
    if data.store.manifest["recipe"]["source"] != source.fingerprints:
        raise changed(source.name)
    table = source.tables.get(split, source.tables["train"])
    wanted = data.store.splits[split].fixed("rows")
    for rows, block in table.numbered(columns):
        is_wanted = np.isin(rows, wanted)
        yield rows[is_wanted], block.filter(pa.array(is_wanted))


def texts_of(source: TextSource, data: TextData, split: str) -> list[str]:
    texts: list[str] = []
    for rows, block in rows_of(source, source.roles.texts, data, split):
        # dropped: the run has reported them
        findings = Findings(source.name)
        escapes = data.config.clean.escapes
        texts_of_block, _ = read_texts(block, source.roles, rows, findings, escapes=escapes)
        texts += pc.fill_null(texts_of_block, "").to_pylist()
    return texts


def targets_of(data: TextData, split: str) -> NDArray[Any]:
    """Class numbers, or numbers; for several labels 0 or 1 for each: [[0, 2], [1]] → 101, 010."""
    store = data.store.splits[split]
    problem = data.info.problem
    if problem is Problem.regression:
        return store.fixed("targets").astype(np.float32)
    if problem is Problem.single:
        return store.fixed("targets").astype(np.int64)
    ragged = store.ragged("targets")
    hot = np.zeros((store.num_rows, len(data.info.classes)), np.int64)
    hot[np.repeat(np.arange(len(hot)), ragged.lengths), ragged.values] = 1
    return hot
