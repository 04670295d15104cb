"""Small tokenizers of pieces of words."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from flatout.data.tokens.subwords import Subwords
from flatout.data.tokens.vocabulary import VocabularyConfig, VocabularyKind


def train_wordpieces(texts: Sequence[str], size: int = 200) -> Subwords:
    """A tokenizer that some texts were cut with."""
    config = VocabularyConfig(kind=VocabularyKind.wordpiece, size=size)
    return Subwords.train([pa.array(texts, pa.large_string())], config)
