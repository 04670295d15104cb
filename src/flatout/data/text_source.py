"""The tables of some texts: opened, their columns found, their rows surveyed and read again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.checks.assignment import Splitting
from flatout.data.checks.cleaning import read_texts
from flatout.data.checks.findings import Findings, Level, Remark
from flatout.data.checks.labels import normalise_labels
from flatout.data.checks.survey import Survey, Surveyed
from flatout.data.feeding import require_other_content
from flatout.data.tables.find_roles import find_roles
from flatout.data.tables.sources import open_splits
from flatout.data.tables.splits import SPLITS
from flatout.data.tables.table import Table, changed, require_columns, require_unchanged
from flatout.data.tokens.subwords import PAIR

if TYPE_CHECKING:
    from flatout.data.text import TextDataConfig

TOPIC = "topic"
"""The column of the built-in headlines that knows what a row is about."""


class TextSource:
    """The tables of a TextDataConfig, and which of their columns hold what."""

    def __init__(self, config: TextDataConfig) -> None:
        self.config = config
        self.is_sample = config.train is None and config.source is None
        """The built-in sample knows the clean topic of each row."""
        self.tables: Mapping[str, Table] = self._open_tables()
        join = PAIR if config.pair else config.join
        self.roles = find_roles(self.tables["train"], text=config.text, label=config.label, join=join)
        self.columns = self.roles
        """The columns as they are given."""
        validation_share, test_share = config.taken_shares(self.tables)
        self.splitting = Splitting(config.split_by, config.group, validation_share, test_share, config.split_seed)
        for table in self.tables.values():
            wanted = {
                f"data.text[{number}]" if number else "data.text": name for number, name in enumerate(self.roles.texts)
            }
            require_columns(table, {**wanted, "data.label": self.roles.label})
        if config.group is not None and self.splitting.is_made:
            require_columns(self.tables["train"], {"data.group": config.group})
        self.fingerprints = {split: table.fingerprint() for split, table in self.tables.items()}
        require_other_content(self.fingerprints, {split: table.name for split, table in self.tables.items()})

    @property
    def name(self) -> str:
        return self.tables["train"].name

    def survey(self, told: Callable[[int], None]) -> Surveyed:
        """Look at every row, and decide its fate."""
        config = self.config
        return Survey(
            tables=self.tables,
            roles=self.roles,
            problem=config.problem,
            splitting=self.splitting,
            cleaning=config.clean,
            label_delimiter=config.label_delimiter,
            max_classes=config.max_classes,
        ).run(told)

    def texts_and_labels(
        self, surveyed: Surveyed, told: Callable[[int], None], *, splits: tuple[str, ...] = SPLITS
    ) -> Iterator[tuple[str, TextBlock]]:
        """The rows of some splits, read again."""
        for name, table in self.tables.items():
            fates, first_row = surveyed.fates[name], 0
            for block in table.blocks(self._columns_read_again()):
                fate = fates[first_row : first_row + block.num_rows]
                self._require_same(len(fate) == block.num_rows, table)
                rows = np.arange(first_row, first_row + block.num_rows)
                first_row += block.num_rows
                for split in splits:
                    mask = fate == SPLITS.index(split)
                    if mask.any():
                        yield split, self._text_block(name, block.filter(pa.array(mask)), rows[mask])
                told(block.num_rows)
            self._require_same(first_row == len(fates), table)

    def require_unchanged(self) -> None:
        """What was read three times must have been the same each time."""
        require_unchanged(self.tables, self.fingerprints)

    def _require_same(self, is_same: bool, table: Table) -> None:
        if not is_same:
            raise changed(table.name)

    def _columns_read_again(self) -> list[str]:
        return [*self.roles.columns, *([TOPIC] if self.is_sample else [])]

    def _text_block(self, name: str, block: pa.RecordBatch, rows: NDArray[np.int64]) -> TextBlock:
        config, source = self.config, self.tables[name].name
        texts, _ = read_texts(block, self.roles, rows, Findings(source), escapes=config.clean.escapes)
        labels = normalise_labels(
            block.column(self.roles.label),
            rows,
            problem=config.problem,
            delimiter=config.label_delimiter,
            source=source,
        )
        return TextBlock(pc.fill_null(texts, ""), labels, rows, block)

    def _open_tables(self) -> dict[str, Table]:
        config = self.config
        if self.is_sample:
            return {split: config.sample_table(split) for split in SPLITS}
        given = {split: getattr(config, split) for split in SPLITS}
        return open_splits(config.source, given, config.read)

    def remarks(self) -> list[Remark]:
        """How the tables are written, and which columns are used."""
        by_how: dict[str, list[str]] = {}
        for table in self.tables.values():
            by_how.setdefault(table.how(), []).append(table.name)
        told = [Remark(Level.note, ", ".join(names), how) for how, names in by_how.items() if how]
        if self.config.text is None or self.config.label is None:
            others = [name for name in self.tables["train"].columns if name not in self.roles.columns]
            more = f" (left alone: {', '.join(others[:8])}{', …' if len(others) > 8 else ''})" if others else ""
            what = f"texts from {' and '.join(self.roles.texts)}, labels from {self.roles.label}{more}"
            told.append(Remark(Level.note, "columns", what))
        return [] if self.is_sample else told


@dataclass(frozen=True, slots=True)
class TextBlock:
    """Rows that are used: their texts, labels and numbers in the source, and the block they came from."""

    texts: pa.Array
    labels: pa.Array
    rows: NDArray[np.int64]
    block: pa.RecordBatch
