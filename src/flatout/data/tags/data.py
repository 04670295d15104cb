"""Words with a tag each: their DataModule, and how their tables become a store.

Rows are prepared as texts are, but for the targets: a tag stands at the first token of its word.
Open this file to change what a tagger trains on; `checks/tags` reads the tags themselves.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.data.batches.store_data import StoreData
from flatout.data.checks.findings import Remark
from flatout.data.checks.survey import TextSurvey
from flatout.data.checks.tags import TagCensus, as_bio, find_entities
from flatout.data.info import TagInfo, TagLabels
from flatout.data.problem import NO_TAG, Problem
from flatout.data.ragged import numbers_in_row
from flatout.data.texts.opening import open_tables
from flatout.data.texts.preparation import Blocks, EncodedRows, EncodingPlan, TextPreparation
from flatout.data.texts.settings import TextDataConfig
from flatout.data.texts.source import TagSource
from flatout.data.tokens.subwords import Subwords
from flatout.data.tokens.vocabulary import VocabularyConfig, VocabularyKind
from flatout.errors import UserError, require
from flatout.run_log import RunLog


class TagData(StoreData[TextDataConfig, TagInfo]):
    """Words with a tag each. The vocabulary is one of word pieces, or `tokenizer` names one.

    >>> data = TagData(source="entities.conll", batch_size=32)  # doctest: +SKIP
    >>> trainer.fit(module, datamodule=data)  # doctest: +SKIP
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
        lost = facts["tags"]
        rows = max(1, facts["splits"]["train"]["rows"])
        words = lost["train"]["words"] - lost["train"]["words_lost"]
        labels = TagLabels(list(facts["classes"]), max(1.0, words / rows), lost)
        return TagInfo(**opened, labels=labels)


class TagPreparation(TextPreparation):
    """Builds a store as TextPreparation does, of rows that are lists of words with a tag each."""

    # Tags of any scheme become BIO. A tag stands at the first token of its word; all other tokens
    # are marked, so that no loss and no metric counts them:
    #
    #     words    Ada       Lovelace
    #     tokens   [CLS]  Ada     Love    ##lace  [SEP]
    #     targets  -100   B-PER   I-PER   -100    -100
    #
    # Entities beyond the longest row count as missed.

    source: TagSource
    has_units = False

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

    def _encode_blocks(self, blocks: Blocks, plan: EncodingPlan) -> EncodedRows:
        encoder = plan.encoder
        config = self.config
        assert isinstance(encoder, Subwords), (
            "RunConfig gives every encoder a tokenizer with a frame"
        )
        for split, block in blocks:
            encoded = encoder.encode_words(
                block.texts, max_length=config.max_length, long=config.long_texts
            )
            tags = self.source.census.numbered(block.labels, block.rows)
            ids = as_bio(tags)
            lost = self.lost.setdefault(split, LostWords(self.source.census))
            lost.add(ids, tags.offsets, encoded.words)
            # Words behind the cut have no token, so their tags are left out.
            is_read = numbers_in_row(np.diff(tags.offsets)) < encoded.words[tags.row_of()]
            targets = np.full(len(encoded.block.tokens), NO_TAG, np.int32)
            targets[encoded.firsts] = ids[is_read]
            yield split, block, encoded.block, (targets, encoded.block.lengths)


class LostWords:
    """Counts the words of a split, and the words and entities that were cut off."""

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
        """Count rows, of which the first `kept` words each are read.

        `ids`: the tag of each word; `offsets`: where the words of each row begin.
        """
        first = self.rows
        lengths = np.diff(offsets)
        self.rows += len(lengths)
        self.words += int(lengths.sum())
        self.words_lost += int((lengths - kept).sum())
        if (lengths > kept).any():
            entities = find_entities(ids, offsets, is_plain=bool(self.census.is_plain))
            names = list(self.census.types)
            end = kept[entities.row]
            is_lost = entities.start >= end
            self.entities_lost.update(names[kind] for kind in entities.kind[is_lost])
            # B-PER I-PER | I-PER: a metric must not take the beginning for the whole entity.
            is_cut_in_two = ~is_lost & (entities.stop > end)
            self.straddling += (entities.row[is_cut_in_two] + first).tolist()

    def facts(self) -> dict[str, Any]:
        return {
            "words": self.words,
            "words_lost": self.words_lost,
            "entities_lost": self.entities_lost,
            "straddling": self.straddling,
        }
