"""The tables of some texts whose columns are known: their rows read block by block, for the splits they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.checks.assignment import Splitting
from flatout.data.checks.cleaning import labels_of, read_texts
from flatout.data.checks.cleaning_settings import Escapes
from flatout.data.checks.findings import Findings, Level, Remark
from flatout.data.checks.labels import normalise_labels
from flatout.data.feeding import require_other_content
from flatout.data.problem import Problem
from flatout.data.tables.roles import Roles
from flatout.data.tables.splits import SPLITS
from flatout.data.tables.table import Table, changed, require_unchanged

TOPIC = "topic"
"""The column of the built-in headlines that knows what a row is about."""


@dataclass(kw_only=True)
class TextSource:
    """The tables of some texts, and which of their columns hold what."""

    tables: Mapping[str, Table]
    roles: Roles
    splitting: Splitting
    problem: Problem
    escapes: Escapes = Escapes.keep
    label_delimiter: str | None = None
    is_sample: bool = False
    """Whether it is a built-in sample, which knows the clean topic of each row."""
    names_columns: bool = True
    """Whether settings name the columns of texts and labels."""

    def __post_init__(self) -> None:
        self.columns = self.roles
        """The columns as they are given."""
        self.fingerprints = fingerprints_of(self.tables)

    @property
    def name(self) -> str:
        return self.tables["train"].name

    def texts_and_labels(
        self, fates: Mapping[str, NDArray[np.int8]], advance: Callable[[int], None], *, splits: tuple[str, ...] = SPLITS
    ) -> Iterator[tuple[str, TextBlock]]:
        """The rows of some splits, read again; `fates` say for each table which row belongs to which."""
        for name, table in self.tables.items():
            own, first_row = fates[name], 0
            for block in table.blocks(self._columns_read_again()):
                fate = own[first_row : first_row + block.num_rows]
                self._require_same(len(fate) == block.num_rows, table)
                rows = np.arange(first_row, first_row + block.num_rows)
                first_row += block.num_rows
                for split in splits:
                    mask = fate == SPLITS.index(split)
                    if mask.any():
                        yield split, self._text_block(name, block.filter(pa.array(mask)), rows[mask])
                advance(block.num_rows)
            self._require_same(first_row == len(own), table)

    def require_unchanged(self) -> None:
        """What was read three times must have been the same each time."""
        require_unchanged(self.tables, self.fingerprints)

    def _require_same(self, is_same: bool, table: Table) -> None:
        if not is_same:
            raise changed(table.name)

    def _columns_read_again(self) -> list[str]:
        return [*self.roles.columns, *([TOPIC] if self.is_sample and self.roles.label else [])]

    def _text_block(self, name: str, block: pa.RecordBatch, rows: NDArray[np.int64]) -> TextBlock:
        source = self.tables[name].name
        texts, _ = read_texts(block, self.roles, rows, Findings(source), escapes=self.escapes)
        labels = normalise_labels(
            labels_of(block, self.roles),
            rows,
            problem=self.problem,
            delimiter=self.label_delimiter,
            source=source,
        )
        return TextBlock(pc.fill_null(texts, ""), labels, rows, block)

    def remarks(self) -> list[Remark]:
        """How the tables are written, and which columns are used."""
        by_how: dict[str, list[str]] = {}
        for table in self.tables.values():
            by_how.setdefault(table.how(), []).append(table.name)
        remarks = [Remark(Level.note, ", ".join(names), how) for how, names in by_how.items() if how]
        if not self.names_columns:
            others = [name for name in self.tables["train"].columns if name not in self.roles.columns]
            more = f" (left alone: {', '.join(others[:8])}{', …' if len(others) > 8 else ''})" if others else ""
            labels = f", labels from {self.roles.label}" if self.roles.label else ""
            what = f"texts from {' and '.join(self.roles.texts)}{labels}{more}"
            remarks.append(Remark(Level.note, "columns", what))
        return [] if self.is_sample else remarks


def fingerprints_of(tables: Mapping[str, Table]) -> dict[str, str]:
    """The fingerprint of each split's table; two splits may not have the same content."""
    found = {split: table.fingerprint() for split, table in tables.items()}
    require_other_content(found, {split: table.name for split, table in tables.items()})
    return found


@dataclass(frozen=True, slots=True)
class TextBlock:
    """Rows that are used: their texts, labels and numbers in the source, and the block they came from."""

    texts: pa.Array
    labels: pa.Array
    rows: NDArray[np.int64]
    block: pa.RecordBatch
