"""Words or pieces to numbers: a vocabulary made from the training rows alone, and fast encoding.

The `tokenizers` library does the work in Rust on all cores. Handing it one row at a time costs more
in Python objects than in tokenising. So some hundred rows are joined by a separator, which is
itself a token and which no text can hold: it is removed from the texts first. The ids come back as
a few long runs, which are cut at the separators. Open this file to change how models that train
from scratch read texts; `subwords` has the tokenizers of encoders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from flatout.data.ragged import Counts, numbers_in_row, row_begins
from flatout.errors import (
    UserError,
    check_settings,
    first_line,
    is_failure,
    require,
    setting,
)

# Characters of Unicode's private range, so that no word of a text can be taken for one of them.
PADDING = "\ue000"
UNKNOWN = "\ue001"
SEPARATOR = "\ue002"
_SPECIAL = [PADDING, UNKNOWN, SEPARATOR]  # ids 0, 1 and 2
UNKNOWN_ID = 1
SEPARATOR_ID = 2
NUM_SPECIAL = len(_SPECIAL)
_DAMAGED = "Its files were changed, or belong to another model."
_ROWS_A_DOCUMENT = 500  # rows that are joined: enough to hide the cost of a call's Python objects
VocabularyKind = StrEnum("VocabularyKind", "word bpe wordpiece")
"""Whole words, or pieces of words that can spell any word (bpe) or nearly any (wordpiece)."""


@dataclass(kw_only=True, slots=True)
class VocabularyConfig:
    """How texts become numbers in models trained from scratch."""

    kind: VocabularyKind = setting(
        VocabularyKind.word, "Words, byte pairs, or BERT's pieces (encoders from scratch)."
    )
    size: int = setting(
        30_000, "Most entries to keep, the special ones included.", above=len(_SPECIAL)
    )
    min_frequency: int = setting(
        2, "How often an entry must occur in the training rows to be kept.", least=1
    )
    lowercase: bool = setting(True, "Whether `The` and `the` are one word.")
    strip_accents: bool = setting(False, "Whether `é` and `e` are one letter.")

    def __post_init__(self) -> None:
        check_settings(self, "data.vocabulary")


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """Token ids of a block of rows, and what was lost on the way."""

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    unknown: int  # tokens that are not in the vocabulary
    truncated_rows: int
    truncated_tokens: int
    whole_lengths: NDArray[np.int64]  # tokens of each row before it was cut

    @classmethod
    def of(
        cls, tokens: NDArray[np.int32], lengths: Counts, whole: Counts, unknown_id: int
    ) -> EncodedBlock:
        """Count what was lost: rows of `lengths` tokens had `whole` tokens before they were cut."""
        unknown = int((tokens == unknown_id).sum())
        lost = np.maximum(whole - lengths, 0)
        return cls(
            tokens, lengths.astype(np.int32), unknown, int((lost > 0).sum()), int(lost.sum()), whole
        )


class Vocabulary:
    """A trained tokenizer, as encoder of text blocks."""

    unknown = UNKNOWN_ID

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.size: int = tokenizer.get_vocab_size()

    @classmethod
    def train(cls, blocks: Iterable[pa.Array], config: VocabularyConfig) -> Vocabulary:
        """Count the words of the training texts, streamed in blocks, and keep the commonest."""
        shared: dict[str, Any] = {
            "vocab_size": config.size,
            "min_frequency": config.min_frequency,
            "special_tokens": _SPECIAL,
            "show_progress": False,
        }
        if config.kind is VocabularyKind.word:
            tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
            tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
            trainer: trainers.Trainer = trainers.WordLevelTrainer(**shared)
        else:
            tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
            trainer = trainers.BpeTrainer(
                **shared, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
            )
        steps: list[normalizers.Normalizer] = [normalizers.NFKC()]
        if config.lowercase:
            steps.append(normalizers.Lowercase())
        if config.strip_accents:
            # Accents are characters of their own only in NFD.
            steps += [normalizers.NFD(), normalizers.StripAccents()]
        tokenizer.normalizer = normalizers.Sequence(steps)
        tokenizer.train_from_iterator(
            (_without_special(block).to_pylist() for block in blocks), trainer
        )
        return cls(tokenizer)

    @classmethod
    def from_json(cls, text: str) -> Vocabulary:
        return cls(Tokenizer.from_str(text))

    def to_json(self) -> str:
        return self.tokenizer.to_str()

    def encode(self, texts: pa.Array, *, max_length: int) -> EncodedBlock:
        """Ids of each text, cut at `max_length`.

        A text without a word becomes one unknown token.
        """
        begins = np.arange(0, len(texts), _ROWS_A_DOCUMENT)
        bounds = np.append(begins, len(texts)).astype(np.int32)
        rows = _without_special(texts).cast(pa.large_string())
        groups = pa.ListArray.from_arrays(bounds, rows)
        documents = pc.binary_join(groups, pa.scalar(SEPARATOR, pa.large_string())).to_pylist()
        # Two rows `a b` and `c` become the document `a b|c`, and get one more separator at the end:
        # ids 5 6 2 7 2 → lengths 2 1, tokens 5 6 7.
        with explain_tokenizer():
            encodings = self.tokenizer.encode_batch_fast(documents, add_special_tokens=False)
            runs = [np.array([*encoding.ids, SEPARATOR_ID], np.int32) for encoding in encodings]
        ids = np.concatenate([*runs, np.empty(0, np.int32)])
        tokens = ids[ids != SEPARATOR_ID]
        lengths = np.diff(np.flatnonzero(ids == SEPARATOR_ID), prepend=-1) - 1
        cut = np.minimum(lengths, max_length)
        if (cut < lengths).any():
            tokens = tokens[numbers_in_row(lengths) < max_length]
        if (empty := np.flatnonzero(cut == 0)).size:
            tokens = np.insert(tokens, row_begins(cut)[empty], UNKNOWN_ID)
            cut = np.maximum(cut, 1)
        require_known_ids(tokens, self.size)
        return EncodedBlock.of(tokens, cut, lengths, UNKNOWN_ID)


@contextmanager
def explain_tokenizer() -> Iterator[None]:
    """Within it, what the tokenizers library cannot do is a UserError.

    A tokenizer may come from others, and some that open well fail at the first text.
    """
    try:
        yield
    except BaseException as error:
        # no narrower class: the library raises Exception itself, or panics
        if not is_failure(error):
            raise
        raise UserError(
            "tokenizer", f"cannot encode the texts ({first_line(error)})", hint=_DAMAGED
        ) from error


def require_known_ids(tokens: NDArray[np.int32], num_ids: int) -> None:
    """Refuse ids that a network, or a vocabulary, of so many ids does not have."""
    is_known = not len(tokens) or (tokens.min() >= 0 and tokens.max() < num_ids)
    require(bool(is_known), "tokenizer", f"has other ids than 0 to {num_ids - 1:,}", hint=_DAMAGED)


def _without_special(texts: pa.Array) -> pa.Array:
    """Texts with a blank for each special character, so that none can pass for a special token."""
    return pc.replace_substring_regex(texts, f"[{PADDING}-{SEPARATOR}]", " ")
