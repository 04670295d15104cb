"""The tables of words and tags: their columns found, their tags read in whatever scheme they are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flatout.data.checks.findings import Level, Remark, counted
from flatout.data.checks.survey import Surveyed
from flatout.data.checks.tagged_table import COLUMNS, LISTS, TaggedTable
from flatout.data.checks.tags import TagCensus
from flatout.data.tables.find_roles import find_roles
from flatout.data.tables.roles import Roles
from flatout.data.tables.table import Table, require_columns
from flatout.data.text import TextDataConfig, splitting_of
from flatout.data.text_source import TextBlock, TextSource, fingerprints_of


class TagSource(TextSource):
    """The tables of a TextDataConfig whose rows are words and tags."""

    def __init__(self, config: TextDataConfig, tables: Mapping[str, Table]) -> None:
        first = tables["train"]
        given = find_roles(first, text=config.text, label=config.label, tags=True)
        for table in tables.values():
            require_columns(table, {"data.text": given.texts[0], "data.label": given.label})
        self.fingerprints = fingerprints_of(tables)
        self.census = TagCensus(first.name)
        self.tagged = {split: TaggedTable(table, given, split, self.census) for split, table in tables.items()}
        super().__init__(
            tables=self.tagged,
            roles=Roles(COLUMNS[:1], COLUMNS[1]),
            splitting=splitting_of(config, tables, None),
            problem=config.problem,
            is_sample=config.is_sample,
        )
        self.columns = given

    def tag_remarks(self, surveyed: Surveyed) -> list[Remark]:
        """The scheme, the entities, and what was found in the tags."""
        scheme = self.census.scheme()
        for split, table in self.tagged.items():
            findings = surveyed.findings[split]
            table.tell(findings, scheme)
            findings.rows_repaired += findings.found["repaired_tag"].count if "repaired_tag" in findings.found else 0
        train = self.census.entities.get("train", {})
        kinds = ", ".join(f"{name} {count:,}" for name, count in train.items())
        what = f"{scheme.value}, {counted(len(self.census.types), 'type')}, {self.census.tokens:,} words"
        return [
            Remark(Level.note, "tags", what),
            Remark(Level.note, "training entities", kinds or "none"),
            *_unseen_types(self.census),
        ]

    def remarks(self) -> list[Remark]:
        how = self.tables["train"].how() or "lists of words and tags"
        return [] if self.is_sample else [Remark(Level.note, self.name, how)]

    def _columns_read_again(self) -> list[str]:
        return list(LISTS)

    def _text_block(self, name: str, block: pa.RecordBatch, rows: NDArray[np.int64]) -> TextBlock:
        words, tags = (block.column(column) for column in LISTS)
        return TextBlock(words, tags, rows, block)


def _unseen_types(census: TagCensus) -> Iterator[Remark]:
    train = census.entities.get("train", {})
    for split, counts in census.entities.items():
        if unseen := [name for name in counts if name not in train]:
            yield Remark(Level.warning, split, f"entities that no training row has: {', '.join(unseen)}")
    if not train:
        yield Remark(Level.error, "tags", "the training rows mark nothing", "data.label=COLUMN")
