"""Tagged words, made ready: as texts are, but each row is a list of words and each word has a tag.

Tags of whatever scheme become BIO. A tag stands at the first token of its word; all other tokens are marked so that no
loss and no metric counts them. Words beyond the longest row are lost to the model: which entities went with them is
kept, so that a score counts them as missed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flatout.data.checks.assignment import Splitting
from flatout.data.checks.findings import Level, Remark, counted
from flatout.data.checks.survey import Surveyed
from flatout.data.checks.tagged_table import COLUMNS, LISTS, TaggedTable
from flatout.data.checks.tags import TagCensus, as_bio
from flatout.data.feeding import require_other_content
from flatout.data.info import TagInfo, tag_labels
from flatout.data.tables.entities import NO_TAG, Entities, find_entities
from flatout.data.tables.find_roles import find_roles
from flatout.data.tables.roles import Roles
from flatout.data.tables.table import Table, require_columns
from flatout.data.text import TextDataConfig
from flatout.data.text_preparation import TextPreparation
from flatout.data.text_source import TextBlock, TextSource
from flatout.data.tokens.subwords import Encoder, Subwords
from flatout.data.tokens.vocabulary import EncodedBlock
from flatout.errors import UserError


class TagSource(TextSource):
    """The tables of a TextDataConfig whose rows are words and tags."""

    def __init__(self, config: TextDataConfig) -> None:
        self.config = config
        self.is_sample = config.train is None and config.source is None
        tables = self._open_tables()
        first = tables["train"]
        self.columns = find_roles(first, text=config.text, label=config.label, tags=True)
        """The columns of words and tags as they are given."""
        for table in tables.values():
            require_columns(table, {"data.text": self.columns.texts[0], "data.label": self.columns.label})
        self.fingerprints = {split: table.fingerprint() for split, table in tables.items()}
        require_other_content(self.fingerprints, {split: table.name for split, table in tables.items()})
        self.census = TagCensus(first.name)
        self.tagged = {split: TaggedTable(table, self.columns, split, self.census) for split, table in tables.items()}
        self.tables: Mapping[str, Table] = self.tagged
        self.roles = Roles(COLUMNS[:1], COLUMNS[1])
        validation_share, test_share = config.taken_shares(tables)
        self.splitting = Splitting(config.split_by, None, validation_share, test_share, config.split_seed)

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


def prepare(config: TextDataConfig) -> TagInfo:
    """Open the store of some tagged words, building it first when there is none."""
    preparation = TagPreparation(config)
    store, report, vocabulary = preparation.open()
    return TagInfo(
        store=store,
        report=report,
        source=preparation.source.name,
        vocabulary=vocabulary,
        roles=preparation.source.columns,
        max_length=config.max_length,
        labels=tag_labels(store.facts),
    )


class TagPreparation(TextPreparation):
    """From words and tags to a store."""

    source: TagSource

    def __init__(self, config: TextDataConfig) -> None:
        super().__init__(config)
        self.lost: dict[str, LostWords] = {}

    def _open_source(self) -> TextSource:
        return TagSource(self.config)

    def _load_given(self) -> Subwords | None:
        name = self.config.tokenizer
        return None if name is None else Subwords.load(name, words=True)

    def _require_classes(self, surveyed: Surveyed) -> None:
        if not self.source.census.entities.get("train"):
            raise UserError("data.label", "the training rows mark nothing", mend="Name the column: data.label=COLUMN.")

    def _classes(self, surveyed: Surveyed) -> list[str]:
        return self.source.census.names()

    def _class_counts(self, surveyed: Surveyed) -> list[int]:
        return []

    def _class_remarks(self, surveyed: Surveyed) -> list[Remark]:
        return self.source.tag_remarks(surveyed)

    def _more_facts(self) -> dict[str, Any]:
        return {"tags": {split: lost.facts() for split, lost in self.lost.items()}}

    def _encoded(
        self, split: str, block: TextBlock, surveyed: Surveyed, vocabulary: Encoder
    ) -> tuple[EncodedBlock, Any]:
        assert isinstance(vocabulary, Subwords), "RunConfig gives every encoder a tokenizer with a frame"
        encoded = vocabulary.encode_words(block.texts, max_length=self.config.max_length)
        tags = self.source.census.numbered(block.labels, block.rows)
        ids = as_bio(tags)
        self.lost.setdefault(split, LostWords(self.source.census)).add(ids, tags.offsets, encoded.words)
        kept = np.repeat(encoded.words, np.diff(tags.offsets))
        place = np.arange(len(ids)) - np.repeat(tags.offsets[:-1], np.diff(tags.offsets))
        targets = np.full(len(encoded.block.tokens), NO_TAG, np.int32)
        targets[encoded.firsts] = ids[place < kept]
        return encoded.block, (targets, encoded.block.lengths)


class LostWords:
    """Counts words and entities of a split, and those that were cut off."""

    def __init__(self, census: TagCensus) -> None:
        self.census = census
        self.rows = self.words = self.words_lost = 0
        self.entities_lost: dict[str, int] = {}
        self.straddling: list[int] = []
        """Rows of which the last entity was cut in two."""

    def add(self, ids: NDArray[np.int32], offsets: NDArray[np.int64], kept: NDArray[np.int64]) -> None:
        """Take in some rows, of which the first `kept` words each were kept."""
        first, lengths = self.rows, np.diff(offsets)
        self.rows += len(lengths)
        self.words += int(lengths.sum())
        self.words_lost += int((lengths - kept).sum())
        if (lengths > kept).any():
            self._note(find_entities(ids, offsets), kept, first)

    def _note(self, found: Entities, kept: NDArray[np.int64], first_row: int) -> None:
        end = kept[found.row]
        is_lost, is_cut = found.start >= end, (found.start < end) & (found.stop > end)
        names = list(self.census.types)
        for kind in found.kind[is_lost]:
            self.entities_lost[names[kind]] = self.entities_lost.get(names[kind], 0) + 1
        self.straddling += (found.row[is_cut] + first_row).tolist()

    def facts(self) -> dict[str, Any]:
        return {
            "words": self.words,
            "words_lost": self.words_lost,
            "entities_lost": self.entities_lost,
            "straddling": self.straddling,
        }
