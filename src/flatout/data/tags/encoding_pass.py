"""The third pass over tagged words: a tag stands at the first token of its word.

Tags of any scheme become BIO. All tokens but the first of a word are marked, so that no loss and no
metric counts them:

    words    Ada       Lovelace
    tokens   [CLS]  Ada     Love    ##lace  [SEP]
    targets  -100   B-PER   I-PER   -100    -100

Entities beyond the longest row count as missed; `LostWords` counts them. Open this file to change
what a tagger's network is trained on.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.data.checks.survey import TextSurvey
from flatout.data.checks.tags import TagCensus, as_bio, find_entities
from flatout.data.problem import NO_TAG
from flatout.data.ragged import numbers_in_row
from flatout.data.texts.encoding_pass import Blocks, EncodedRows, EncodingPass
from flatout.data.texts.source import TagSource
from flatout.data.tokens.subwords import Encoder, Subwords


class TagEncodingPass(EncodingPass):
    """Encodes rows of words, and puts each tag at its word's first token."""

    source: TagSource

    def __init__(self, source: TagSource, survey: TextSurvey, encoder: Encoder) -> None:
        super().__init__(source, survey, encoder)
        self.lost: dict[str, LostWords] = {}

    def encode_blocks(self, blocks: Blocks) -> EncodedRows:
        encoder = self.encoder
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
            lost.add(ids, tags.offsets, encoded.word_counts)
            # Words behind the cut have no token, so their tags are left out.
            is_read = numbers_in_row(np.diff(tags.offsets)) < encoded.word_counts[tags.row_of()]
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
        self, ids: NDArray[np.int32], offsets: NDArray[np.int64], words_read: NDArray[np.int64]
    ) -> None:
        """Count rows, of which the first `words_read` words each are read.

        `ids`: the tag of each word; `offsets`: where the words of each row begin.
        """
        first = self.rows
        lengths = np.diff(offsets)
        self.rows += len(lengths)
        self.words += int(lengths.sum())
        self.words_lost += int((lengths - words_read).sum())
        if (lengths > words_read).any():
            entities = find_entities(ids, offsets, is_plain=bool(self.census.is_plain))
            names = list(self.census.types)
            end = words_read[entities.row]
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
