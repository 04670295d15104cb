"""Which split a row belongs to, from a hash of its text.

The same text always falls in the same split, so no row leaks from training into the test, and a file that has grown
keeps its old split. The hash is plain arithmetic on the text's bytes, the same on every machine; the bytes pass through
a window of fixed size, so that memory stays flat however long the texts are.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_MULTIPLIER = 0x9E3779B97F4A7C15
_ALL_BITS = (1 << 64) - 1
_WINDOW = 1 << 16


def _powers(factor: int) -> NDArray[np.uint64]:
    return np.cumprod(np.full(_WINDOW, factor, dtype=np.uint64), dtype=np.uint64)


# A byte at place p of the window counts times the multiplier to the p + 1; a text that begins at place b is divided by
# the multiplier to the b, which has an inverse because it is odd. So one table of powers serves texts of any length.
_POWERS = _powers(_MULTIPLIER)
_INVERSES = np.append(np.uint64(1), _powers(pow(_MULTIPLIER, -1, 1 << 64))[:-1])


def assign_splits(texts: pa.Array, *, validation_share: float, test_share: float, seed: int = 0) -> NDArray[np.int8]:
    """0 (train), 1 (validation) or 2 (test) for each text; shares are met on average."""
    hashes = hash_texts(texts, seed)
    place = (hashes >> np.uint64(11)).astype(np.float64) / float(1 << 53)
    is_taken, is_test = place < validation_share + test_share, place < test_share
    return is_taken.astype(np.int8) + is_test.astype(np.int8)


def hash_texts(texts: pa.Array, seed: int = 0) -> NDArray[np.uint64]:
    """A 64-bit hash of each text's UTF-8 bytes; a null counts as an empty text."""
    texts = texts.cast(pa.large_binary())
    offsets = np.frombuffer(texts.buffers()[1], dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    sums = np.diff(offsets).astype(np.uint64)
    if sums.any():
        _add_bytes(sums, offsets, np.frombuffer(texts.buffers()[2], dtype=np.uint8))
    return _mixed(sums ^ _mixed(np.array([seed & _ALL_BITS], dtype=np.uint64)))


def _add_bytes(sums: NDArray[np.uint64], offsets: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
    """Add to each text's sum its (byte + 1) times a power of the multiplier that counts from the text's beginning."""
    filled = np.flatnonzero(np.diff(offsets))
    starts = offsets[filled]
    for begin in range(int(offsets[0]), int(offsets[-1]), _WINDOW):
        end = min(begin + _WINDOW, int(offsets[-1]))
        first, last = np.searchsorted(starts, begin, "right") - 1, np.searchsorted(starts, end)
        places = np.maximum(starts[first:last] - begin, 0)
        terms = np.add(data[begin:end], 1, dtype=np.uint64)
        terms *= _POWERS[: end - begin]
        found = np.add.reduceat(terms, places) * _INVERSES[places]
        already = begin - int(starts[first])  # bytes of the first text that were in windows before
        if already > 0:
            found[:1] *= np.uint64(pow(_MULTIPLIER, already, 1 << 64))
        sums[filled[first:last]] += found


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every bit over all bits (the finaliser of splitmix64)."""
    values = values + np.uint64(_MULTIPLIER)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
