"""Word vectors made elsewhere, from a text file: one word a line, then its numbers (GloVe, word2vec, fastText)."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from torch import Tensor

from flatout.errors import UserError, require


def load_vectors(path: str, vocabulary: dict[str, int], embedding: Tensor) -> float:
    """Write the vectors of known words into the rows of `embedding`; the share of the vocabulary that was found."""
    file = Path(path)
    require(file.is_file(), "model.vectors", f"no such file: {path}")
    width = embedding.shape[1]
    ids: list[int] = []
    found: list[np.ndarray] = []
    for number, word, numbers in _lines(file):
        if (row := vocabulary.get(word)) is None:
            continue
        vector = np.fromstring(numbers, dtype=np.float32, sep=" ") if numbers else np.empty(0, np.float32)
        if len(vector) != width:
            where = f"model.vectors: {path}:{number}"
            raise UserError(where, f"{len(vector)} numbers for {word!r}", allowed=f"model.embedding is {width}")
        ids.append(row)
        found.append(vector)
    if ids:
        with torch.no_grad():
            embedding[torch.tensor(ids)] = torch.from_numpy(np.stack(found)).to(embedding.dtype)
    return len(set(ids)) / max(1, len(vocabulary))


def _lines(file: Path) -> Iterator[tuple[int, str, str]]:
    """Line number, word and the text of its numbers; a word2vec header is passed over."""
    with _opened(file) as lines:
        for number, line in enumerate(lines, 1):
            word, _, numbers = line.rstrip().partition(" ")
            if number == 1 and word.isdigit() and numbers.strip().isdigit():
                continue
            yield number, word, numbers


def _opened(file: Path) -> TextIO:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8", errors="replace")
    return file.open(encoding="utf-8", errors="replace")
