"""The DataModules: texts, tagged words and recordings, each from its settings to an open store."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.batches.feed import Feed
from flatout.data.checks.cleaning import read_texts
from flatout.data.checks.findings import Findings, Remark
from flatout.data.checks.survey import TextSurvey
from flatout.data.checks.tags import TagCensus, as_bio, find_entities
from flatout.data.info import NO_TAG, Labels, TagInfo, TagLabels, TextInfo
from flatout.data.problem import Problem
from flatout.data.sequences.info import SequenceInfo
from flatout.data.sequences.settings import SequenceDataConfig
from flatout.data.sequences.survey import SequencePreparation
from flatout.data.sequences.views import open_views
from flatout.data.store.store import Ragged, StoreSplit
from flatout.data.store_data import StoreData
from flatout.data.tables import sources
from flatout.data.tables.table import require_columns
from flatout.data.text import TextDataConfig
from flatout.data.text_preparation import (
    Blocks,
    EncodedRows,
    Known,
    TextPreparation,
    open_source,
    open_tables,
)
from flatout.data.text_source import TagSource
from flatout.data.tokens.subwords import Subwords, encode_texts
from flatout.data.tokens.vocabulary import VocabularyConfig, VocabularyKind
from flatout.errors import UserError, require
from flatout.run_log import RunLog


class TextData(StoreData[TextDataConfig, TextInfo]):
    """Texts with one class a row, several, or a number; `problem="none"`: texts alone, in the
    pieces of an encoder.

    >>> data = TextData(  # doctest: +SKIP
    ...     source="news.csv", text="title", label="topic", batch_size=64
    ... )
    >>> trainer.fit(module, datamodule=data)  # doctest: +SKIP
    """

    settings = TextDataConfig

    def __init__(
        self, *, seed: int = 0, log: RunLog | None = None, predict: Any = None, **settings: Any
    ) -> None:
        """`predict`: a table of texts for `trainer.predict`, without labels; other keywords are of
        TextDataConfig.
        """
        self.predict = predict
        if settings.get("problem") in (Problem.none, Problem.none.value):
            settings.setdefault("vocabulary", VocabularyConfig(kind=VocabularyKind.wordpiece))
        super().__init__(seed=seed, log=log, **settings)
        is_tagged = self.config.problem is Problem.tags
        require(
            not is_tagged,
            "data.problem",
            "tags in TextData",
            hint="Use TagData for words with tags.",
        )

    def open_store(self) -> TextInfo:
        config = self.config
        opened = TextPreparation(open_source(self.config)).open()
        facts = opened["store"].facts
        rows = facts["splits"]["train"]["rows"]
        scale = (facts["target_mean"], facts["target_spread"])
        labels = Labels(config.problem, list(facts["classes"]), facts["class_counts"], rows, *scale)
        return TextInfo(
            **opened,
            labels=labels,
            escapes=config.clean.escapes,
            label_delimiter=config.label_delimiter,
        )

    def predict_dataloader(self) -> Feed:
        """The texts of `predict` as the training rows were read, else the test rows; `batch.rows`
        numbers them.
        """
        if self.predict is None:
            return super().predict_dataloader()
        info = self.info
        where = "TextData.predict"
        table = sources.open_source(self.predict, where=where, reading=self.config.read)
        require_columns(table, dict.fromkeys([where], info.roles.texts[0]))
        read = partial(
            read_texts, roles=info.roles, findings=Findings(table.name), escapes=info.escapes
        )
        blocks = [
            read(block, rows=rows)[0] for rows, block in table.numbered(list(info.roles.texts))
        ]
        texts = pc.fill_null(pa.chunked_array(blocks, pa.large_string()).combine_chunks(), "")
        encoded = encode_texts(info.vocabulary, texts, info.max_length, info.long_texts)
        split = StoreSplit(
            "predict", len(texts), {"tokens": Ragged.of(encoded.tokens, encoded.lengths)}
        )
        place = self._current_placement()
        return Feed(split, self._plan(split.name, place), device=place.device)


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


class SequenceData(StoreData[SequenceDataConfig, SequenceInfo]):
    """Recordings of sensors: whole, in windows, or in chunks whose hidden state is carried on.

    >>> data = SequenceData(  # doctest: +SKIP
    ...     source="cells/", features=["voltage", "current"], target="soc", time="t"
    ... )
    >>> trainer.fit(module, datamodule=data)  # doctest: +SKIP
    """

    settings = SequenceDataConfig

    def open_store(self) -> SequenceInfo:
        preparation = SequencePreparation(self.config)
        store, report = preparation.open()
        segments, notes = open_views(store, self.config)
        about: dict[str, Any] = {"segments": segments, "notes": notes}
        return SequenceInfo(
            store=store, report=report, source=preparation.source, config=self.config, **about
        )

    @property
    def is_stream(self) -> bool:
        return self.config.chunk is not None


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
