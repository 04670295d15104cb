"""Which words training does not know, counted without a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.checks.characters import word_hashes
from flatout.data.tokens.vocabulary import NUM_SPECIAL, VocabularyConfig


class Coverage:
    """Which words the rows of other splits have that training does not know, without a tokenizer.

    Words are told by their hashes, so that hundreds of thousands of rows take a tenth of a second. The same words as a
    vocabulary of whole words has, but for characters that are written in several ways (NFKC).
    """

    def __init__(self, texts: Iterable[pa.Array], config: VocabularyConfig) -> None:
        self._config = config
        words, counts = np.unique(np.concatenate([self._words(each) for each in texts]), return_counts=True)
        order = np.argsort(-counts, kind="stable")[: config.size - NUM_SPECIAL]
        self._known = np.sort(words[order[counts[order] >= config.min_frequency]])

    def unknown(self, texts: Iterable[pa.Array]) -> tuple[int, int]:
        """Words that are not known, and all of them."""
        words = np.concatenate([self._words(each) for each in texts])
        return int((~np.isin(words, self._known)).sum()), len(words)

    def _words(self, texts: pa.Array) -> NDArray[np.uint64]:
        return word_hashes(pc.utf8_lower(texts) if self._config.lowercase else texts)
