"""The second pass over a source of texts: its training rows make the vocabulary.

    in    texts of the training rows, as the first pass has assigned them
    out   an encoder; it is the tokenizer that settings name, where they name one

Where labels are numbers, the same pass adds up their mean and spread. Open this file to change what
a vocabulary is made of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from flatout.data.checks.seen import Advance
from flatout.data.checks.survey import TextSurvey
from flatout.data.problem import Problem
from flatout.data.store.cache import Cache
from flatout.data.store.store import StoreWriter
from flatout.data.tables.splits import hash_texts
from flatout.data.texts.encoded_units import least_rows
from flatout.data.texts.source import TextSource
from flatout.data.tokens.subwords import Encoder, Subwords, read_encoder, train_encoder

# Of more training rows a sample makes the vocabulary: more texts would hardly change it.
VOCABULARY_ROWS = 1 << 22


class VocabularyPass:
    """Makes the vocabulary of the training rows, or takes the one that is given."""

    def __init__(
        self, source: TextSource, survey: TextSurvey, tokenizer: Subwords | None, key: str
    ) -> None:
        """`tokenizer`: the one that settings name. `key`: of the vocabulary in the cache."""
        self.source = source
        self.survey = survey
        self.tokenizer = tokenizer
        self.key = key
        self.has_numbers = source.config.problem is Problem.regression

    def run(self, advance: Advance) -> Encoder:
        """The encoder of the source's texts."""
        if self.tokenizer is not None:
            if self.has_numbers:
                deque(self._training_texts(advance), 0)  # counts the numbers on the way
            return self.tokenizer
        # The numbers are counted while texts are read, so a vocabulary from the cache would leave
        # them uncounted.
        is_cached = self.survey.rows["train"] >= least_rows() and not self.has_numbers
        return self._train_or_reuse(advance) if is_cached else self._train(advance)

    def _train(self, advance: Advance) -> Encoder:
        return train_encoder(self._training_texts(advance), self.source.config.vocabulary)

    def _train_or_reuse(self, advance: Advance) -> Encoder:
        """The vocabulary from the cache if another part, or a build that was killed, has trained
        it; else train it.
        """

        def build(writer: StoreWriter) -> None:
            vocabulary = self._train(advance).to_json()
            self.source.require_unchanged()
            writer.write_text("tokenizer.json", vocabulary)

        cache = Cache(self.source.config.cache).of_surveys()
        store = cache.open_or_build_key(self.key, self.source.name, build)
        return read_encoder(store.read_text("tokenizer.json"))

    def _training_texts(self, advance: Advance) -> Iterator[pa.Array]:
        """Texts of the training rows by the block; labels that are numbers are counted."""
        # from 1 on all texts are taken
        sampled_share = VOCABULARY_ROWS / self.survey.rows["train"]
        blocks = self.source.texts_and_labels(self.survey.fates, advance, splits=("train",))
        for _, block in blocks:
            if self.has_numbers:
                self.survey.census.add_numbers(block.labels.to_numpy(zero_copy_only=False))
            if sampled_share >= 1:
                yield block.texts
            else:
                # by a hash, so that every part of a build draws the same texts
                is_drawn = hash_texts(block.texts) < np.uint64(sampled_share * 2.0**64)
                yield block.texts.filter(pa.array(is_drawn))


def describe_sample(rows: int) -> list[str]:
    """A line where not all of so many training rows make the vocabulary."""
    if rows <= VOCABULARY_ROWS:
        return []
    return [f"vocabulary: of some {VOCABULARY_ROWS:,} training rows, taken by a hash of the text"]
