"""Which split a row belongs to, from a hash of its text.

The same text always falls in the same split, so no row leaks from training into the test, and a file that has grown
keeps its old split. The hash is plain arithmetic on the text's bytes, the same on every machine.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_ROWS_AT_ONCE = 16_384


def assign_splits(texts: pa.Array, *, validation_share: float, test_share: float, seed: int = 0) -> NDArray[np.int8]:
    """0 (train), 1 (validation) or 2 (test) for each text; shares are met on average."""
    hashes = hash_texts(texts, seed)
    place = (hashes >> np.uint64(11)).astype(np.float64) / float(1 << 53)
    return ((place < validation_share + test_share).astype(np.int8) + (place < test_share).astype(np.int8)).astype(
        np.int8
    )


def hash_texts(texts: pa.Array, seed: int = 0) -> NDArray[np.uint64]:
    """A 64-bit hash of each text's UTF-8 bytes."""
    pieces = [_hash_some(texts.slice(i, _ROWS_AT_ONCE)) for i in range(0, len(texts), _ROWS_AT_ONCE)]
    hashes = np.concatenate(pieces) if pieces else np.empty(0, np.uint64)
    return _mixed(hashes ^ _mixed(np.array([seed], dtype=np.uint64)))


def _hash_some(texts: pa.Array) -> NDArray[np.uint64]:
    """Sum of (byte + 1) times a power of the multiplier that counts from the text's own beginning."""
    texts = texts.cast(pa.large_binary())
    offsets = np.frombuffer(texts.buffers()[1], dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    lengths = np.diff(offsets)
    hashes = lengths.astype(np.uint64)
    filled = np.flatnonzero(lengths)
    if len(filled) == 0:
        return hashes
    data = np.frombuffer(texts.buffers()[2], dtype=np.uint8)[offsets[0] : offsets[-1]]
    starts = offsets[:-1][filled] - offsets[0]
    place = np.arange(len(data)) - np.repeat(starts, lengths[filled])
    powers = np.cumprod(np.full(int(lengths.max()), _MULTIPLIER, dtype=np.uint64), dtype=np.uint64)
    terms = (data.astype(np.uint64) + np.uint64(1)) * powers[place]
    hashes[filled] += np.add.reduceat(terms, starts)
    return hashes


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every bit over all bits (the finaliser of splitmix64)."""
    values = values + _MULTIPLIER
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
