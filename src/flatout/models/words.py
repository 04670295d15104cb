"""What networks on words share: vectors made elsewhere to start from, and pooling from tokens to
rows.

Vectors come from a text file: one word a line, then its numbers (GloVe, word2vec, fastText). It is
read once, as bytes and line by line. Numbers are parsed only for words of the vocabulary.

Shapes: B rows, L longest row, D width, of which the first half was read forwards and the second
backwards.
"""

from __future__ import annotations

import gzip
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flatout.data.batches.kept_tensors import zeros
from flatout.errors import UserError, check_settings, require, setting
from flatout.models.contract import Product, through

Pooling = StrEnum("Pooling", "last max mean attention")
_MOST_OF_LINE = 1 << 20  # bytes of a file of vectors
_MOST_DIGITS = 9  # of a count in its head
Ngrams = StrEnum("Ngrams", "auto on off")  # whether a linear model answers with the network


@dataclass(kw_only=True, slots=True)
class WordsConfig(ABC):
    """What models on words have in common that are trained from scratch."""

    embedding: int = setting(128, "Numbers a word.", least=1)
    vectors: str | None = setting(
        None, "Text file of word vectors to start from.", example="glove.txt"
    )
    freeze_vectors: bool = setting(
        False,
        "Whether the word vectors stay as they are.",
        example="model.vectors=glove.txt model.freeze_vectors=true",
    )
    ngrams: Ngrams = setting(
        Ngrams.auto,
        "Whether a linear model on words and n-grams answers with the network; auto: where"
        " validation rows show that it helps.",
    )

    def __post_init__(self) -> None:
        check_settings(self, "model")
        has_vectors = self.vectors is not None or not self.freeze_vectors
        require(
            has_vectors,
            "model.freeze_vectors",
            "is set without model.vectors",
            hint="Set model.vectors=FILE.",
        )

    @abstractmethod
    def make(self, num_outputs: int, vocabulary_size: int, padding_id: int) -> Any:
        """The network of such a Config, with random vectors."""

    def build(
        self,
        *,
        num_outputs: int,
        vocabulary_size: int,
        padding_id: int = 0,
        vocabulary: dict[str, int] | None = None,
    ) -> Any:
        """A new network with the vectors that the settings name, frozen where they say so."""
        model = self.make(num_outputs, vocabulary_size, padding_id)
        weight = model.embedding.weight
        if self.vectors is not None:
            model.vectors_found = load_vectors(self.vectors, vocabulary, weight.data)
        weight.requires_grad_(not self.freeze_vectors)
        return model


def load_vectors(path: str, vocabulary: dict[str, int] | None, embedding: Tensor) -> float:
    """Write vectors of known words into the rows of `embedding`; the share that was found.

    The first of two counts.
    """
    file = Path(path)
    width = embedding.shape[1]
    require(
        file.is_file(),
        "model.vectors",
        f"no such file: {path}",
        hint="Check the name, or leave model.vectors out.",
    )
    if vocabulary is None:
        raise UserError(
            "model.vectors",
            "no vocabulary to find its words by",
            hint="Pass build(vocabulary=...).",
        )
    rows = {word.encode(): row for word, row in vocabulary.items()}
    vectors: dict[int, np.ndarray] = {}
    for number, word, numbers in _entries(file, width):
        row = rows.get(word)
        if row is None or row in vectors:
            continue
        if (
            vector := _parsed(f"model.vectors: {path}:{number}", word, numbers.split(), width)
        ) is not None:
            vectors[row] = vector
    if vectors:
        with torch.no_grad():
            embedding[torch.tensor(list(vectors))] = torch.from_numpy(
                np.stack(list(vectors.values()))
            ).to(embedding)
    return len(vectors) / max(1, len(vocabulary))


def _entries(file: Path, width: int) -> Iterator[tuple[int, bytes, bytes]]:
    """Line number, word and the text of its numbers; a word2vec header is read and passed over."""
    for number, line in enumerate(_lines(file), 1):
        word, _, numbers = line.rstrip().partition(b" ")
        is_count = numbers.isdigit() and len(numbers) <= _MOST_DIGITS
        is_header = number == 1 and word.isdigit() and is_count
        if number == 1:
            count = int(numbers) if is_header else len(numbers.split())
            hint = (
                f"Set model.embedding={count}."
                if count
                else "It must hold a word and its numbers a line, as text."
            )
            what, allowed = f"{count} numbers a word", f"model.embedding is {width}"
            require(count == width, f"model.vectors: {file}:1", what, allowed=allowed, hint=hint)
        if is_header or not line.strip():
            continue
        # No parsing for words outside the vocabulary, but a line cut short means a damaged file.
        if numbers.count(b" ") + 1 < width:
            raise _wrong_count(f"model.vectors: {file}:{number}", word, len(numbers.split()), width)
        yield number, word, numbers


def _parsed(where: str, word: bytes, fields: list[bytes], width: int) -> np.ndarray | None:
    """The numbers of one line; None for a word with blanks in it: `word` is only its beginning."""
    if len(fields) > width and not all(map(_is_number, fields[:-width])):
        return None
    if len(fields) != width:
        raise _wrong_count(where, word, len(fields), width)
    hint = "Correct the line, or remove it."
    try:
        vector = np.array(fields, dtype=np.float32)
    except ValueError:
        wrong = next(field for field in fields if not _is_number(field))
        raise UserError(
            where, f"{wrong.decode(errors='replace')!r} is not a number", hint=hint
        ) from None
    require(
        bool(np.isfinite(vector).all()),
        where,
        f"the numbers of {word.decode(errors='replace')!r} are not finite",
        hint=hint,
    )
    return vector


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def _wrong_count(where: str, word: bytes, count: int, width: int) -> UserError:
    return UserError(
        where,
        f"{count} numbers for {word.decode(errors='replace')!r}",
        allowed=f"model.embedding is {width}",
    )


def _lines(file: Path) -> Iterator[bytes]:
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
            while line := lines.readline(_MOST_OF_LINE):
                require(
                    len(line) < _MOST_OF_LINE,
                    f"model.vectors: {file}",
                    f"a line has {_MOST_OF_LINE:,} bytes or more",
                    hint="It must hold a word and its numbers a line, as text.",
                )
                yield line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(
            f"model.vectors: {file}",
            f"not a whole gzip file: {error}",
            hint="Copy or fetch it again.",
        ) from None


class Pool(nn.Module):
    """Final states, max, mean or learned attention; `padding_BL` is True behind a row's end, None
    where no row is padded.
    """

    def __init__(self, kind: Pooling, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.score = nn.Linear(width, 1, bias=False) if kind is Pooling.attention else None

    def forward(self, states_BLD: Tensor, lengths_B: Tensor, padding_BL: Tensor | None) -> Tensor:
        if self.kind is Pooling.last:
            # Each direction ends somewhere else: forwards at the row's last token, backwards at its
            # first.
            half = states_BLD.shape[-1] // 2
            last_B11 = (lengths_B - 1).view(-1, 1, 1)
            ahead_BH = states_BLD[..., :half].gather(1, last_B11.expand(-1, 1, half)).squeeze(1)
            return torch.cat([ahead_BH, states_BLD[:, 0, half:]], -1)
        if self.kind is Pooling.max:
            if padding_BL is not None:
                states_BLD = states_BLD + padding_bias(padding_BL, states_BLD.dtype).unsqueeze(-1)
            return states_BLD.amax(1)
        if self.score is not None:
            scores_BL = self.score(states_BLD).squeeze(-1)
            if padding_BL is not None:
                scores_BL = scores_BL.masked_fill(padding_BL, torch.finfo(scores_BL.dtype).min)
            return torch.einsum(
                "bl,bld->bd", scores_BL.softmax(-1).to(states_BLD.dtype), states_BLD
            )
        if padding_BL is None:
            return states_BLD.mean(1)
        summed_BD = states_BLD.masked_fill(padding_BL.unsqueeze(-1), 0).sum(1)
        return summed_BD / lengths_B.unsqueeze(1).to(summed_BD.dtype)

    def products(self, tokens: float) -> list[Product]:
        """Learned attention scores each token and sums up by the scores; the others multiply
        nothing.
        """
        if self.score is None:
            return []
        return [
            through(tokens, self.score.weight),
            Product(2 * tokens * self.score.in_features, is_between=True),
        ]


def padding_bias(padding: Tensor, dtype: torch.dtype) -> Tensor:
    """The least number on padding and zero elsewhere: added before a maximum it hides padding."""
    nothing = zeros(tuple(padding.shape), dtype, padding.device)
    return nothing.masked_fill(padding, torch.finfo(dtype).min)
