"""`TextData`: texts as a Lightning DataModule."""

from __future__ import annotations

from typing import Any

from flatout.data.info import TextInfo, text_labels
from flatout.data.problem import Problem
from flatout.data.store_data import StoreData
from flatout.data.text import TextDataConfig
from flatout.data.text_preparation import TextPreparation, open_source
from flatout.data.tokens.vocabulary import VocabularyConfig, VocabularyKind
from flatout.errors import require
from flatout.run_log import RunLog


class TextData(StoreData[TextDataConfig, TextInfo]):
    """Texts with one class a row, several, or a number; `problem="none"`: texts alone, in the pieces of an encoder.

    >>> data = TextData(source="news.csv", text="title", label="topic", batch_size=64)  # doctest: +SKIP
    >>> trainer.fit(module, datamodule=data)  # doctest: +SKIP
    """

    settings = TextDataConfig

    def __init__(self, *, seed: int = 0, log: RunLog | None = None, **settings: Any) -> None:
        """All other keywords are fields of TextDataConfig."""
        if settings.get("problem") in (Problem.none, Problem.none.value):
            settings.setdefault("vocabulary", VocabularyConfig(kind=VocabularyKind.wordpiece))
        super().__init__(seed=seed, log=log, **settings)
        is_tagged = self.config.problem is Problem.tags
        require(not is_tagged, "data.problem", "tags in TextData", hint="Use TagData for words with tags.")

    def open_store(self) -> TextInfo:
        source = open_source(self.config)
        store, report, vocabulary = TextPreparation(self.config, source).open()
        return TextInfo(
            store=store,
            report=report,
            source=source.name,
            vocabulary=vocabulary,
            roles=source.columns,
            max_length=self.config.max_length,
            labels=text_labels(self.config.problem, store.facts),
            escapes=self.config.clean.escapes,
            label_delimiter=self.config.label_delimiter,
        )
