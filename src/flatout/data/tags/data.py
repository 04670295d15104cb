"""The DataModule of words with a tag each.

`open_store` builds the store where the cache has none; StoreData makes feeds of it. Open this file
to change what `TagData` accepts; `preparation` has how a store is built.
"""

from __future__ import annotations

from typing import Any

from flatout.data.batches.store_data import StoreData
from flatout.data.info import TagInfo, TagLabels
from flatout.data.problem import Problem
from flatout.data.texts.opening import open_tables
from flatout.data.texts.settings import TextDataConfig
from flatout.data.texts.source import TagSource
from flatout.data.tokens.vocabulary import VocabularyConfig, VocabularyKind
from flatout.errors import require
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
        # Only a run that trains prepares a store: a help text need not wait for these imports.
        from flatout.data.tags.preparation import TagPreparation

        opened = TagPreparation(TagSource(self.config, open_tables(self.config))).open()
        facts = opened["store"].facts
        lost = facts["tags"]
        rows = max(1, facts["splits"]["train"]["rows"])
        words = lost["train"]["words"] - lost["train"]["words_lost"]
        labels = TagLabels(list(facts["classes"]), max(1.0, words / rows), lost)
        return TagInfo(**opened, labels=labels)
