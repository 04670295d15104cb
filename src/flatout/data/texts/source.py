"""The tables of texts, or of words and tags, whose columns are known.

They are read block by block, split by split, as often as it takes: each pass of a build reads them
again. Fingerprints make sure that each pass sees the same bytes. Open this file to change what a
build reads of a row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.checks.cleaning import TextBlock, labels_of, read_texts
from flatout.data.checks.findings import Findings, Level, Remark, counted
from flatout.data.checks.labels import normalise_labels
from flatout.data.checks.tags import COLUMNS, LISTS, TagCensus, TaggedTable
from flatout.data.store.cache import Cache
from flatout.data.tables.prints import SourceTables, fingerprints_of, prints_of
from flatout.data.tables.roles import Roles, find_roles
from flatout.data.tables.splits import SPLITS, Splitting, hash_texts, reseeded
from flatout.data.tables.table import (
    Entries,
    Table,
    as_texts,
    changed,
    decoded,
    join_names,
    mask_of,
    require_columns,
)
from flatout.data.texts.settings import TextDataConfig
from flatout.errors import require

Tables = Mapping[str, Table]
Fates = Mapping[str, NDArray[np.int8]]  # for each table the split of each row, or below 0: none
# The name of a table, the numbers of some of its rows, and a table that reads just these.
Piece = tuple[str, range, Table]
Pieces = Sequence[Piece]
TOPIC = "topic"  # the column of the built-in headlines with the true label of each row
_LONG_SENTENCE = 200  # words; more in the only sentence of a file are many sentences
_COLUMNS_LISTED = 8


class TextSource(SourceTables):
    """The tables of some texts, and which of their columns hold what."""

    def __init__(
        self, config: TextDataConfig, tables: Tables, roles: Roles, group: str | None = None
    ) -> None:
        """`group`: the column whose equal values stay in one split."""
        self.config = config
        self.tables = tables
        self.roles = roles
        self.splitting = Splitting(
            config.split_by, group, *config.taken_shares(tables), config.split_seed
        )
        self.columns = roles  # the columns by their names in the files
        self.cache = Cache(config.cache).folder
        self.fingerprints = fingerprints_of(tables, self.cache)

    @property
    def name(self) -> str:
        return self.tables["train"].name

    def pieces(self, fates: Fates, least: int) -> Pieces:
        """Pieces of whole files, each with `least` rows but for the last piece of a table."""
        return [
            (name, rows, piece)
            for name, table in self.tables.items()
            for rows, piece in table.pieces(len(fates[name]), least)
        ]

    def texts_and_labels(
        self,
        fates: Fates,
        advance: Callable[[int], None],
        *,
        splits: Sequence[str] = SPLITS,
        pieces: Pieces = (),
    ) -> Iterator[tuple[str, TextBlock]]:
        """Read rows again: of some splits, of all tables or of some pieces.

        `fates` has the split of each row; `advance` is called with the number of rows read.
        """
        for name, numbers, table in pieces or self.pieces(fates, sys.maxsize):
            num_rows = 0
            for rows, block in table.numbered(self._columns_read_again(table)):
                num_rows += len(rows)
                if num_rows > len(numbers):
                    raise changed(self.tables[name].name)
                rows += numbers.start
                for split in splits:
                    is_of_split = fates[name][rows] == SPLITS.index(split)
                    if is_of_split.any():
                        of_split = block.filter(pa.array(is_of_split))
                        yield split, self._text_block(name, of_split, rows[is_of_split])
                advance(block.num_rows)
            if num_rows != len(numbers):
                raise changed(self.tables[name].name)

    @cached_property
    def _states(self) -> dict[Table, tuple[Entries | None, str]]:
        """For each file its entries and its fingerprint, from before the first pass."""
        states = dict[Table, tuple[Entries | None, str]]()
        for table in self.tables.values():
            files = [file.inner or file for file in table.tables or [table]]
            entries = [file.entries() for file in files]
            prints = prints_of(table, self.cache)
            states |= dict(zip(files, zip(entries, prints, strict=True), strict=True))
        return states

    def prints(self, piece: Piece) -> list[list[str]]:
        """Of each file of a piece its fingerprint, and how it is read."""
        prints = []
        for file in piece[2].tables or [piece[2]]:
            _, fingerprint = self._states[file.inner or file]
            prints.append([fingerprint, type(file).__name__, file.how()])
        return prints

    def require_as_known(self, piece: Piece) -> None:
        """Refuse a piece that has changed since its fingerprints were taken."""
        for file in piece[2].tables or [piece[2]]:
            entries, _ = self._states[file.inner or file]
            if (file.inner or file).entries() != entries:
                raise changed(file.name)

    def require_words(self, has_words: bool) -> None:
        """Refuse numbers as texts, unless a setting names their column."""
        name = self.roles.texts[0]
        columns = ", ".join(self.tables["train"].columns[:20])
        require(
            has_words or self.config.text is not None,
            "data.text",
            f"column {name!r} of {self.name} holds numbers only",
            allowed=f"columns: {columns}",
            hint=(
                f"Name a column of texts: data.text=COLUMN; data.text={name} takes the numbers as"
                " texts."
            ),
        )

    def groups_of(self, block: TextBlock) -> NDArray[np.int64]:
        """A number for each row, equal for rows of one group; each row by itself without one."""
        group = self.splitting.group
        alone = reseeded(block.rows.astype(np.uint64), 1)
        if group is None or group not in block.block.schema.names:
            return alone.view(np.int64)
        values = decoded(block.block.column(group))
        hashes = np.where(mask_of(values.is_null()), alone, hash_texts(as_texts(values)))
        return hashes.view(np.int64)

    def _columns_read_again(self, table: Table) -> list[str]:
        columns = [*self.roles.columns]
        if self.config.is_sample and self.roles.label:
            columns.append(TOPIC)
        group = self.splitting.group
        if group is not None and group in table.columns and group not in columns:
            columns.append(group)
        return columns

    def _text_block(self, name: str, block: pa.RecordBatch, rows: NDArray[np.int64]) -> TextBlock:
        findings = Findings(self.tables[name].name)
        config = self.config
        # What there is to remark of these rows was remarked by the survey.
        texts, _ = read_texts(block, self.roles, rows, findings, escapes=config.clean.escapes)
        labels = normalise_labels(
            labels_of(block, self.roles),
            rows,
            findings,
            problem=config.problem,
            delimiter=config.label_delimiter,
        )
        return TextBlock(pc.fill_null(texts, ""), labels, rows, block)

    def remarks(self) -> list[Remark]:
        """How the tables are written, and which columns are used."""
        by_how: dict[str, list[str]] = {}
        for table in self.tables.values():
            by_how.setdefault(table.how(), []).append(table.name)
        remarks = [
            Remark(Level.note, ", ".join(names), how) for how, names in by_how.items() if how
        ]
        if self.config.text is None or (self.config.label is None and self.roles.label):
            others = [
                name for name in self.tables["train"].columns if name not in self.roles.columns
            ]
            text = f"texts from {' and '.join(self.roles.texts)}"
            if self.roles.label:
                text += f", labels from {self.roles.label}"
            if others:
                more = ", …" if len(others) > _COLUMNS_LISTED else ""
                text += f" (left alone: {join_names(others[:_COLUMNS_LISTED])}{more})"
            remarks.append(Remark(Level.note, "columns", text))
        return [] if self.config.is_sample else remarks


class TagSource(TextSource):
    """The tables of a TextDataConfig whose rows are words and tags."""

    def __init__(self, config: TextDataConfig, tables: Tables) -> None:
        first = tables["train"]
        roles = find_roles(first, text=config.text, label=config.label, tags=True)
        for table in tables.values():
            require_columns(table, {"data.text": roles.texts[0], "data.label": roles.label})
        if config.group is not None and any(config.taken_shares(tables)):
            require_columns(first, {"data.group": config.group})
        self.census = TagCensus(first.name)
        self.tagged = {
            split: TaggedTable(table, roles, split, self.census, config.group)
            for split, table in tables.items()
        }
        super().__init__(config, self.tagged, Roles(COLUMNS[:1], COLUMNS[1]), config.group)
        self.columns = roles

    def tag_remarks(self, of_splits: Mapping[str, Findings]) -> list[Remark]:
        """The scheme, the entities, and what was found in the tags."""
        scheme = self.census.scheme()
        for split, table in self.tagged.items():
            findings = of_splits[split]
            table.report_tags(findings, scheme)
            if "repaired_tag" in findings.by_kind:
                findings.rows_repaired += findings.by_kind["repaired_tag"].count
        kinds = ", ".join(
            f"{name} {count:,}" for name, count in self.census.entities.get("train", {}).items()
        )
        counts = f"{counted(len(self.census.types), 'type')}, {self.census.tokens:,} words"
        notes = [
            Remark(Level.note, "tags", f"{scheme.value}, {counts}"),
            Remark(Level.note, "words" if self.census.is_plain else "entities", kinds or "none"),
        ]
        rows_read = sum(findings.rows_read for findings in of_splits.values())
        if rows_read == 1 and self.census.tokens > _LONG_SENTENCE:
            what = f"one sentence of {self.census.tokens:,} words: an empty line parts sentences"
            notes.append(Remark(Level.warning, self.name, what))
        return [*notes, *_unseen_types(self.census)]

    def remarks(self) -> list[Remark]:
        how = self.tables["train"].how() or "lists of words and tags"
        return [] if self.config.is_sample else [Remark(Level.note, self.name, how)]

    def _columns_read_again(self, table: Table) -> list[str]:
        return [*LISTS, *table.columns[len(COLUMNS) :]]

    def _text_block(self, name: str, block: pa.RecordBatch, rows: NDArray[np.int64]) -> TextBlock:
        words, tags = (block.column(column) for column in LISTS)
        return TextBlock(words, tags, rows, block)


def _unseen_types(census: TagCensus) -> Iterator[Remark]:
    train = census.entities.get("train", {})
    for split, counts in census.entities.items():
        if unseen := [name for name in counts if name not in train]:
            marked = "tags" if census.is_plain else "entities"
            what = f"{marked} that no training row has: {', '.join(unseen)}"
            yield Remark(Level.warning, split, what)
    if not train:
        yield Remark(Level.error, "tags", "the training rows mark nothing", "data.label=COLUMN")
