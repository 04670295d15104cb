"""The DataModule of tagged words: from settings to an open store and batches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.data.checks.findings import Remark
from flatout.data.checks.survey import TextSurvey
from flatout.data.checks.tags import TagCensus, as_bio, find_entities
from flatout.data.info import NO_TAG, TagInfo, TagLabels
from flatout.data.problem import Problem
from flatout.data.store_data import StoreData
from flatout.data.text import TextDataConfig
from flatout.data.text_preparation import (
    Blocks,
    EncodedRows,
    Known,
    TextPreparation,
    open_tables,
)
from flatout.data.text_source import TagSource
from flatout.data.tokens.subwords import Subwords
from flatout.data.tokens.vocabulary import VocabularyConfig, VocabularyKind
from flatout.errors import UserError, require
from flatout.run_log import RunLog


class TagData(StoreData[TextDataConfig, TagInfo]):
    """Words with a tag each, at their first piece: the vocabulary is one of word pieces, or
    `tokenizer` names one.
    """

    settings = TextDataConfig

    def __init__(self, *, seed: int = 0, log: RunLog | None = None, **settings: Any) -> None:
        """All other keywords are fields of TextDataConfig."""
        settings.setdefault("problem", Problem.tags)
        settings.setdefault("vocabulary", VocabularyConfig(kind=VocabularyKind.wordpiece))
        super().__init__(seed=seed, log=log, **settings)
        config = self.config
        require(
            config.problem is Problem.tags,
            "data.problem",
            f"{config.problem.value} in TagData",
            hint="Use TextData for classes and numbers.",
        )
        has_pieces = (
            config.tokenizer is not None or config.vocabulary.kind is VocabularyKind.wordpiece
        )
        require(
            has_pieces,
            "data.vocabulary.kind",
            f"{config.vocabulary.kind.value} with tags",
            allowed="wordpiece",
        )

    def open_store(self) -> TagInfo:
        opened = TagPreparation(TagSource(self.config, open_tables(self.config))).open()
        facts = opened["store"].facts
        lost, rows = facts["tags"], facts["splits"]["train"]["rows"]
        kept = lost["train"]["words"] - lost["train"]["words_lost"]
        return TagInfo(
            **opened, labels=TagLabels(list(facts["classes"]), max(1.0, kept / max(1, rows)), lost)
        )


class TagPreparation(TextPreparation):
    """From words and tags to a store: as from texts, but each row is a list of words and each word
    has a tag.
    """

    # Tags of whatever scheme become BIO. A tag stands at the first token of its word; all other
    # tokens are marked so that no loss and no metric counts them. Entities beyond the longest row
    # count as missed.

    source: TagSource
    in_units = False

    def __init__(self, source: TagSource) -> None:
        super().__init__(source)
        self.lost: dict[str, LostWords] = {}

    def _require_classes(self, surveyed: TextSurvey) -> None:
        if not self.source.census.entities.get("train"):
            raise UserError(
                "data.label",
                "the training rows mark nothing",
                hint="Name the column: data.label=COLUMN.",
            )

    def _class_remarks(self, surveyed: TextSurvey) -> list[Remark]:
        return self.source.tag_remarks(surveyed.findings)

    def _label_facts(self, surveyed: TextSurvey) -> dict[str, Any]:
        lost = {split: lost.facts() for split, lost in self.lost.items()}
        return {"classes": self.source.census.names(), "class_counts": [], "tags": lost}

    def _encoded(self, blocks: Blocks, known: Known) -> EncodedRows:
        encoder, config = known.encoder, self.config
        assert isinstance(encoder, Subwords), (
            "RunConfig gives every encoder a tokenizer with a frame"
        )
        for split, block in blocks:
            encoded = encoder.encode_words(
                block.texts, max_length=config.max_length, long=config.long_texts
            )
            tags = self.source.census.numbered(block.labels, block.rows)
            ids = as_bio(tags)
            self.lost.setdefault(split, LostWords(self.source.census)).add(
                ids, tags.offsets, encoded.words
            )
            targets = np.full(len(encoded.block.tokens), NO_TAG, np.int32)
            targets[encoded.firsts] = ids[
                np.arange(len(ids)) < (tags.offsets[:-1] + encoded.words)[tags.row_of()]
            ]
            yield split, block, encoded.block, (targets, encoded.block.lengths)


class LostWords:
    """Counts words and entities of a split, and those that were cut off."""

    def __init__(self, census: TagCensus) -> None:
        self.census = census
        self.rows = 0
        self.words = 0
        self.words_lost = 0
        self.entities_lost: Counter[str] = Counter()
        self.straddling: list[int] = []  # rows of which the last entity was cut in two

    def add(
        self, ids: NDArray[np.int32], offsets: NDArray[np.int64], kept: NDArray[np.int64]
    ) -> None:
        """Take in some rows, of which the first `kept` words each were kept."""
        first = self.rows
        lengths = np.diff(offsets)
        self.rows += len(lengths)
        self.words += int(lengths.sum())
        self.words_lost += int((lengths - kept).sum())
        if (lengths > kept).any():
            found = find_entities(ids, offsets)
            names = list(self.census.types)
            end = kept[found.row]
            self.entities_lost.update(names[kind] for kind in found.kind[found.start >= end])
            self.straddling += (
                found.row[(found.start < end) & (found.stop > end)] + first
            ).tolist()

    def facts(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name in ("words", "words_lost", "entities_lost", "straddling")
        }
