"""`TextData`: texts as a Lightning DataModule."""

from __future__ import annotations

from typing import Any

from flatout.data.info import TextInfo, text_labels
from flatout.data.problem import Problem
from flatout.data.store_data import StoreData
from flatout.data.tables.sources import open_splits
from flatout.data.text import TextDataConfig
from flatout.data.text_preparation import TextPreparation, build_source
from flatout.data.text_source import TextSource
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
        return prepare(self.config)


def prepare(config: TextDataConfig) -> TextInfo:
    """Open the store of some texts, building it first when there is none."""
    source = open_source(config)
    store, report, vocabulary = TextPreparation(config, source).open()
    return TextInfo(
        store=store,
        report=report,
        source=source.name,
        vocabulary=vocabulary,
        roles=source.columns,
        max_length=config.max_length,
        labels=text_labels(config.problem, store.facts),
        escapes=config.clean.escapes,
        label_delimiter=config.label_delimiter,
    )


def open_source(config: TextDataConfig) -> TextSource:
    """The tables of some texts with their columns found."""
    tables = config.sample_tables() if config.is_sample else open_splits(config.source, config.given, config.read)
    return build_source(config, tables)
