"""`TextData` and `TagData`: texts and tagged words as Lightning DataModules."""

from __future__ import annotations

from typing import Any

from flatout.data import tagging, text_preparation
from flatout.data.info import TagInfo, TextInfo
from flatout.data.problem import Problem
from flatout.data.store_data import StoreData
from flatout.data.text import TextDataConfig
from flatout.data.tokens.vocabulary import VocabularyConfig, VocabularyKind
from flatout.errors import require
from flatout.run_log import RunLog


class TextData(StoreData[TextDataConfig, TextInfo]):
    """Texts with one class a row, several, or a number.

    >>> data = TextData(source="news.csv", text="title", label="topic", batch_size=64)  # doctest: +SKIP
    >>> trainer.fit(module, datamodule=data)  # doctest: +SKIP
    """

    settings = TextDataConfig

    def __init__(self, *, seed: int = 0, log: RunLog | None = None, **settings: Any) -> None:
        """All other keywords are fields of TextDataConfig."""
        super().__init__(seed=seed, log=log, **settings)
        is_tagged = self.config.problem is Problem.tags
        require(not is_tagged, "data.problem", "tags in TextData", mend="Use TagData for words with tags.")

    def open_store(self) -> TextInfo:
        return text_preparation.prepare(self.config)


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
        require(config.problem is Problem.tags, "data.problem", what, mend="Use TextData for classes and numbers.")
        has_pieces = config.tokenizer is not None or config.vocabulary.kind is VocabularyKind.wordpiece
        require(has_pieces, "data.vocabulary.kind", f"{config.vocabulary.kind.value} with tags", allowed="wordpiece")

    def open_store(self) -> TagInfo:
        return tagging.prepare(self.config)


def data_of(config: TextDataConfig, *, seed: int = 0, log: RunLog | None = None) -> TextData | TagData:
    """The DataModule for some settings."""
    kind: type[TextData] | type[TagData] = TagData if config.problem is Problem.tags else TextData
    return kind.of(config, seed=seed, log=log)
