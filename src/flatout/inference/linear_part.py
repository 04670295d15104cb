"""The linear part of an exported run: what words and n-grams add to the logits of the ONNX file.

ONNX has no hash of texts, so `export` copies this file and the arrays of the linear model beside
`model.onnx`. It needs numpy and safetensors alone, and nothing of flatout:

    logits = logits_of_onnx + LinearPart(folder).read(texts)

It counts words and n-grams of letters as scikit-learn's HashingVectorizer does, weighs them by
TF-IDF, and asks a linear model for each class (`baselines/linear_text.py`). A thousand short
texts take about a second. Where flatout is installed, `load_predictor` is faster.

Shapes: N texts or n-grams, C classes, M models, L bytes of an n-gram.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

LINEAR = "linear.safetensors"
Numbers = NDArray[Any]
_HASHES = 1 << 20
_LONGEST = 1_000  # characters of a text whose n-grams of letters are read
_LENGTHS = range(2, 6)  # of n-grams of letters
_LEAST = 1e-6  # probabilities are kept this far from 0 and 1
_UNKNOWN = -1  # the place of an n-gram whose hash does not count


class LinearPart:
    """Reads texts as the linear model of a run does. Its weights may be of any float of numpy."""

    def __init__(self, folder: Path) -> None:
        signature = json.loads((folder / "signature.json").read_text(encoding="utf-8"))
        arrays = load_file(folder / LINEAR)
        self._weight = float(signature["linear"]["weight"])
        self._is_multi = signature["problem"] == "multi"
        self._words = _HashedTexts(arrays["words.columns"], arrays["words.idf"])
        self._letters = _HashedTexts(arrays["letters.columns"], arrays["letters.idf"])
        self._coefficients = arrays["coefficients"].astype(np.float64)
        self._constants = arrays["constants"].astype(np.float64)

    @classmethod
    def of(cls, folder: Path) -> LinearPart | None:
        """The linear part of an exported folder; None where the network answers alone."""
        signature = json.loads((folder / "signature.json").read_text(encoding="utf-8"))
        return cls(folder) if "linear" in signature else None

    def read(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """`[N, C]` what is added to the logits of the ONNX file. Both are already calibrated."""
        num_words = len(self._words.columns)
        logits_NM = np.empty((len(texts), len(self._constants)))
        words_of_texts = self._words.read(texts, split_words)
        letters_of_texts = self._letters.read(texts, split_letters)
        pairs = zip(words_of_texts, letters_of_texts, strict=True)
        for number, (hashed_words, hashed_letters) in enumerate(pairs):
            places, weights = hashed_words
            of_words = self._coefficients[:, places] @ weights
            places, weights = hashed_letters
            of_letters = self._coefficients[:, num_words + places] @ weights
            logits_NM[number] = of_words + of_letters + self._constants
        shares_NC = 1 / (1 + np.exp(-logits_NM))
        if self._is_multi:
            shares_NC = shares_NC.clip(_LEAST, 1 - _LEAST)
            answers_NC = np.log(shares_NC) - np.log1p(-shares_NC)
        else:
            # of two classes, the model of the second answers for both
            if len(self._constants) == 1:
                shares_NC = np.concatenate([1 - shares_NC, shares_NC], axis=1)
            shares_NC = shares_NC / shares_NC.sum(axis=1, keepdims=True)
            answers_NC = np.log(shares_NC.clip(_LEAST, 1 - _LEAST))
        return (self._weight * answers_NC).astype(np.float32)


class _HashedTexts:
    """Counts of words or n-grams, weighted by TF-IDF.

    `columns`: the hashes that count, ascending. `rarity`: the idf of each.
    """

    def __init__(self, columns: Numbers, rarity: Numbers) -> None:
        self.columns = columns
        self._rarity = rarity.astype(np.float64)

    def read(
        self, texts: Sequence[str], split: Callable[[str], Iterable[str]]
    ) -> list[tuple[Numbers, Numbers]]:
        """For each text the places of its hashes among `columns`, and their weights."""
        counts = [Counter(split(text)) for text in texts]
        grams = list(dict.fromkeys(gram for count in counts for gram in count))
        place_of = self._places(grams)
        weighted = []
        for count in counts:
            # several n-grams may have one hash, and then count as one
            totals: dict[int, int] = {}
            for gram, times in count.items():
                place = place_of[gram]
                totals[place] = totals.get(place, 0) + times
            totals.pop(_UNKNOWN, None)
            places = np.array(list(totals), np.int64)
            weights = (1 + np.log(np.array(list(totals.values())))) * self._rarity[places]
            length = np.sqrt(weights @ weights)
            weighted.append((places, weights / length if length else weights))
        return weighted

    def _places(self, grams: Sequence[str]) -> dict[str, int]:
        """The place of each n-gram's hash among those that count, or `_UNKNOWN`."""
        hash_of = hash_grams(grams)
        hashes = np.array([hash_of[gram] for gram in grams], np.int64)
        places = np.searchsorted(self.columns, hashes).clip(max=len(self.columns) - 1)
        places[self.columns[places] != hashes] = _UNKNOWN
        return dict(zip(grams, places.tolist(), strict=True))


def split_words(text: str) -> list[str]:
    """Words and pairs of neighbours: "a bit off" → a, bit, off, a bit, bit off."""
    words = re.findall(r"\b\w+\b", text.lower())
    pairs = itertools.pairwise(words)
    return [*words, *(f"{first} {second}" for first, second in pairs)]


def split_letters(text: str) -> list[str]:
    """N-grams of letters in words with blanks around them: "ab" → " a", "ab", "b ", " ab", …"""
    grams = []
    for word in text[:_LONGEST].lower().split():
        padded = f" {word} "
        for length in _LENGTHS:
            grams += [padded[start : start + length] for start in range(len(padded) - length + 1)]
            if length >= len(padded):
                break  # the whole word was the longest n-gram
    return grams


def hash_grams(grams: Sequence[str]) -> dict[str, int]:
    """The hash of each n-gram, from 0 to `_HASHES` - 1."""
    of_length: dict[int, list[str]] = {}
    for gram in grams:
        of_length.setdefault(len(gram.encode()), []).append(gram)
    hashes: dict[str, int] = {}
    for length, alike in of_length.items():
        data = b"".join(gram.encode() for gram in alike)
        keys_NL = np.frombuffer(data, np.uint8).reshape(len(alike), length)
        signed_N = _murmur(keys_NL).view(np.int32).astype(np.int64)
        hashes |= zip(alike, (np.abs(signed_N) % _HASHES).tolist(), strict=True)
    return hashes


def _murmur(keys_NL: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """MurmurHash3 of 32 bits, with the seed 0 (Appleby, public domain)."""
    count, length = keys_NL.shape
    whole = length // 4
    blocks = np.ascontiguousarray(keys_NL[:, : 4 * whole]).view("<u4")
    hashes_N = np.zeros(count, np.uint32)
    for number in range(whole):
        hashes_N ^= _scramble(blocks[:, number].astype(np.uint32))
        hashes_N = _rotate(hashes_N, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    rest_N = np.zeros(count, np.uint32)
    for number, byte_N in enumerate(keys_NL[:, 4 * whole :].T.astype(np.uint32)):
        rest_N |= byte_N << np.uint32(8 * number)
    # without remaining bytes `rest_N` is 0, and scrambling 0 gives 0
    hashes_N ^= _scramble(rest_N) ^ np.uint32(length)
    hashes_N = (hashes_N ^ (hashes_N >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    hashes_N = (hashes_N ^ (hashes_N >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return hashes_N ^ (hashes_N >> np.uint32(16))


def _scramble(values_N: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return _rotate(values_N * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)


def _rotate(values_N: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    return (values_N << np.uint32(bits)) | (values_N >> np.uint32(32 - bits))
