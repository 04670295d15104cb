"""The DataModule of texts: from settings to an open store and its batches.

`open_store` builds the store where the cache has none; StoreData makes feeds of it. Open this file
to change what `TextData` accepts; `preparation` has how a store is built.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from flatout.data.batches.feed import Feed
from flatout.data.batches.store_data import StoreData
from flatout.data.checks.cleaning import read_texts
from flatout.data.checks.findings import Findings
from flatout.data.info import Labels, TextInfo
from flatout.data.problem import Problem
from flatout.data.store.store import Ragged, StoreSplit
from flatout.data.tables import sources
from flatout.data.tables.table import require_columns
from flatout.data.texts.opening import open_source
from flatout.data.texts.settings import TextDataConfig
from flatout.data.tokens.subwords import encode_texts
from flatout.data.tokens.vocabulary import VocabularyConfig, VocabularyKind
from flatout.errors import require
from flatout.run_log import RunLog


class TextData(StoreData[TextDataConfig, TextInfo]):
    """Texts with one class a row, several, or a number. `problem="none"`: texts alone, in word
    pieces, for masked words.

    >>> data = TextData(  # doctest: +SKIP
    ...     source="news.csv", text="title", label="topic", batch_size=64
    ... )
    >>> trainer.fit(module, datamodule=data)  # doctest: +SKIP
    """

    settings = TextDataConfig

    def __init__(
        self, *, seed: int = 0, log: RunLog | None = None, predict: object = None, **settings: Any
    ) -> None:
        """`predict`: a table of texts without labels, for `trainer.predict`. All other keywords are
        fields of TextDataConfig.
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
        # Only a run that trains prepares a store: a help text need not wait for these imports.
        from flatout.data.texts.preparation import TextPreparation

        config = self.config
        opened = TextPreparation(open_source(config)).open()
        facts = opened["store"].facts
        labels = Labels(
            problem=config.problem,
            classes=list(facts["classes"]),
            counts=facts["class_counts"],
            num_rows=facts["splits"]["train"]["rows"],
            mean=facts["target_mean"],
            spread=facts["target_spread"],
        )
        return TextInfo(
            **opened,
            labels=labels,
            escapes=config.clean.escapes,
            label_delimiter=config.label_delimiter,
            group=config.group,
        )

    def predict_dataloader(self) -> Feed:
        """The texts of `predict`, read as the training rows were. Without them the test rows.

        `batch.rows` numbers the rows of a batch, which are sorted by length.
        """
        if self.predict is None:
            return super().predict_dataloader()
        info = self.info
        where = "TextData.predict"
        table = sources.open_source(self.predict, where=where, reading=self.config.read)
        require_columns(table, dict.fromkeys([where], info.roles.texts[0]))
        findings = Findings(table.name)
        blocks = []
        for rows, block in table.numbered(info.roles.texts):
            texts_of_block, _ = read_texts(block, info.roles, rows, findings, escapes=info.escapes)
            blocks.append(texts_of_block)
        texts = pc.fill_null(pa.chunked_array(blocks, pa.large_string()).combine_chunks(), "")
        encoded = encode_texts(info.vocabulary, texts, info.max_length, info.long_texts)
        tokens = Ragged.of(encoded.tokens, encoded.lengths)
        split = StoreSplit("predict", len(texts), {"tokens": tokens})
        placement = self._current_placement()
        return Feed(split, self._plan(split.name, placement), device=placement.device)
