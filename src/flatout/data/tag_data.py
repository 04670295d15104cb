"""`TagData`: tagged words as a Lightning DataModule, and how their store is built.

They are read as texts are, but each row is a list of words and each word has a tag.

Tags of whatever scheme become BIO. A tag stands at the first token of its word; all other tokens are marked so that no
loss and no metric counts them. Words beyond the longest row are lost to the model: which entities went with them is
kept, so that a score counts them as missed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.data.checks.findings import Remark
from flatout.data.checks.survey import Surveyed
from flatout.data.checks.tags import TagCensus, as_bio
from flatout.data.info import TagInfo, tag_labels
from flatout.data.problem import Problem
from flatout.data.store_data import StoreData
from flatout.data.tables.entities import NO_TAG, Entities, find_entities
from flatout.data.tag_source import TagSource
from flatout.data.text import TextDataConfig
from flatout.data.text_preparation import TextPreparation, open_tables
from flatout.data.text_source import TextBlock
from flatout.data.tokens.subwords import Encoder, Subwords
from flatout.data.tokens.vocabulary import EncodedBlock, VocabularyConfig, VocabularyKind
from flatout.errors import UserError, require
from flatout.run_log import RunLog


class TagData(StoreData[TextDataConfig, TagInfo]):
    """Words with a tag each.

    Tags stand at the first piece of a word. So the vocabulary is one of word pieces, or `tokenizer` names one.
    """

    settings = TextDataConfig

    def __init__(self, *, seed: int = 0, log: RunLog | None = None, **settings: Any) -> None:
        """All other keywords are fields of TextDataConfig."""
        settings.setdefault("problem", Problem.tags)
        settings.setdefault("vocabulary", VocabularyConfig(kind=VocabularyKind.wordpiece))
        super().__init__(seed=seed, log=log, **settings)
        config = self.config
        what = f"{config.problem.value} in TagData"
        require(config.problem is Problem.tags, "data.problem", what, hint="Use TextData for classes and numbers.")
        has_pieces = config.tokenizer is not None or config.vocabulary.kind is VocabularyKind.wordpiece
        require(has_pieces, "data.vocabulary.kind", f"{config.vocabulary.kind.value} with tags", allowed="wordpiece")

    def open_store(self) -> TagInfo:
        source = TagSource(self.config, open_tables(self.config))
        store, report, vocabulary = TagPreparation(self.config, source).open()
        return TagInfo(
            store=store,
            report=report,
            source=source.name,
            vocabulary=vocabulary,
            roles=source.columns,
            max_length=self.config.max_length,
            labels=tag_labels(store.facts),
        )


class TagPreparation(TextPreparation):
    """From words and tags to a store."""

    source: TagSource

    def __init__(self, config: TextDataConfig, source: TagSource) -> None:
        super().__init__(config, source)
        self.lost: dict[str, LostWords] = {}

    def _load_given(self) -> Subwords | None:
        name = self.config.tokenizer
        return None if name is None else Subwords.load(name, words=True)

    def _require_classes(self, surveyed: Surveyed) -> None:
        if not self.source.census.entities.get("train"):
            raise UserError("data.label", "the training rows mark nothing", hint="Name the column: data.label=COLUMN.")

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
