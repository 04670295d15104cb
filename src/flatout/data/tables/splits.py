"""Decide the split of each row from a hash of its content.

Equal texts always fall in the same split, so no row leaks from training into the test, and a file
that has grown keeps its old split. The hash is plain arithmetic on the bytes, the same on every
machine. There are three ways from hashes to splits:

- `split_by_hash`: a hash in the lowest tenth of all numbers means test, and so on.
- `Dealer`: each class keeps its share. The distinct texts of a class are taken in the order of
  their hashes, and every tenth one goes to the test.
- `split_groups`: whole groups, in the order of their hashes, until the share is met.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_MULTIPLIER = 0x9E3779B97F4A7C15
_ALL_BITS = (1 << 64) - 1
_WINDOW = 1 << 17

SPLITS = ("train", "validation", "test")
SplitBy = StrEnum("SplitBy", "content stratified group")
"""What decides the split of a row: its text, its text and its class, or the group it belongs to."""


@dataclass(frozen=True, slots=True)
class Splitting:
    """How splits are taken from the training rows."""

    by: SplitBy = SplitBy.content
    group: str | None = None
    validation_share: float = 0.0
    test_share: float = 0.0
    seed: int = 0

    @property
    def shares(self) -> dict[str, float]:
        return {"validation_share": self.validation_share, "test_share": self.test_share}


def _powers(factor: int) -> NDArray[np.uint64]:
    return np.cumprod(np.full(_WINDOW, factor, dtype=np.uint64), dtype=np.uint64)


# A text of the bytes x, y has the sum (x + 1) M + (y + 1) M² + 2, modulo 2^64. Each byte counts one
# more than it is, and the length is added, so that zeros at the end count. All texts of a window
# are summed at once, here "ab" and "c":
#
#     bytes                       a      b        c
#     times powers of M           a M    b M²     c M³
#     summed, a text each         a M + b M²    | c M³
#     divided by M^begin          a M + b M²    | c M         ("c" begins at place 2)
#
# M is odd and so has an inverse: dividing is one more product. So one table of powers serves texts
# of any length, wherever they lie.
_POWERS = _powers(_MULTIPLIER)
_INVERSES = np.append(np.uint64(1), _powers(pow(_MULTIPLIER, -1, 1 << 64))[:-1])
_OF_ONES = np.append(np.uint64(0), np.cumsum(_POWERS, dtype=np.uint64))
"""The sum of a text of so many bytes that are all 1."""


def hash_texts(texts: pa.Array, seed: int = 0) -> NDArray[np.uint64]:
    """A 64-bit hash of each text's UTF-8 bytes; a null counts as an empty text."""
    return hash_bytes(*bytes_of(texts), seed)


def bytes_of(texts: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The UTF-8 bytes of all texts in one array, without a copy, and where each text begins.

    ["ab", "", "c"] → bytes of "abc", offsets [0, 2, 2, 3].
    """
    texts = texts.cast(pa.large_binary())
    # A slice of a column shares the buffers of the whole: only its own part is taken.
    own = slice(texts.offset, texts.offset + len(texts) + 1)
    offsets = np.frombuffer(texts.buffers()[1], dtype=np.int64)[own]
    first = int(offsets[0])
    last = int(offsets[-1])
    data = np.empty(0, np.uint8)
    if last > first:  # texts without a byte may have no buffer of bytes
        data = np.frombuffer(texts.buffers()[2], np.uint8)[first:last]
    return data, offsets - first


def hash_bytes(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], seed: int = 0
) -> NDArray[np.uint64]:
    """A 64-bit hash of each run of bytes."""
    lengths = np.diff(offsets)
    sums = lengths.astype(np.uint64) + _sums_of_ones(lengths)
    if lengths.any():
        _add_bytes(sums, offsets, data)
    return reseeded(sums, seed)


def reseeded(hashes: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Hashes that differ with the seed, from these ones."""
    return _mixed(hashes ^ _mixed(np.array([seed & _ALL_BITS], dtype=np.uint64)))


def _sums_of_ones(lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The sum of each text if all its bytes were one: added to that of its bytes, zeros count."""
    # Texts longer than the table are summed window after window, each window M^131072 further on.
    sums = np.zeros(len(lengths), np.uint64)
    scale = 1
    left = lengths
    while left.any():
        sums += np.uint64(scale) * _OF_ONES[np.minimum(left, _WINDOW)]
        scale = scale * pow(_MULTIPLIER, _WINDOW, 1 << 64) & _ALL_BITS
        left = np.maximum(left - _WINDOW, 0)
    return sums


def _add_bytes(
    sums: NDArray[np.uint64], offsets: NDArray[np.int64], data: NDArray[np.uint8]
) -> None:
    """Add to each text's sum its bytes times powers of the multiplier, counted from its beginning.

    The picture above `_POWERS` shows one window.
    """
    # Empty texts have no place where they could begin, and nothing to add.
    filled = np.flatnonzero(np.diff(offsets))
    starts = offsets[filled]
    for begin in range(int(offsets[0]), int(offsets[-1]), _WINDOW):
        end = min(begin + _WINDOW, int(offsets[-1]))
        first = np.searchsorted(starts, begin, "right") - 1
        last = np.searchsorted(starts, end)
        places = np.maximum(starts[first:last] - begin, 0)
        terms = np.multiply(data[begin:end], _POWERS[: end - begin], dtype=np.uint64)
        sums_here = np.add.reduceat(terms, places) * _INVERSES[places]
        already = begin - int(starts[first])  # bytes of the first text that were in windows before
        if already > 0:
            sums_here[:1] *= np.uint64(pow(_MULTIPLIER, already, 1 << 64))
        sums[filled[first:last]] += sums_here


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every bit over all bits (the finaliser of splitmix64)."""
    values = values + np.uint64(_MULTIPLIER)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def split_by_hash(
    hashes: NDArray[np.uint64], *, validation_share: float, test_share: float
) -> NDArray[np.int8]:
    """0 (train), 1 (validation) or 2 (test) for each hash, by its size.

    With shares of 0.1 each, the lowest tenth of all numbers is test, the next one validation.
    """
    # 53 bits are kept, as many as a float holds exactly: shares become bounds without rounding.
    position = hashes >> np.uint64(11)
    taken, test = (
        np.uint64(math.ceil(share * (1 << 53)))
        for share in (validation_share + test_share, test_share)
    )
    return (position < taken).astype(np.int8) + (position < test).astype(np.int8)


class Dealer:
    """Deals the distinct texts of each class, so that every split gets its share of every class."""

    # The caller (`data/checks/record_splits.py`) sorts texts by their hashes and may call several
    # times. A text of a class leaves training when its turn times the share of both splits passes a
    # whole number. Among those, the test takes its share in the same way. With a tenth each:
    #
    #     turn in the class      0  1  2  3  4  5  6  7  8  9
    #     2/10 of all leave      .  .  .  .  x  .  .  .  .  x
    #     1/2 of these is test   .  .  .  .  T  .  .  .  .  V
    #
    # So a class of two texts stays in training.

    def __init__(self, num_classes: int, *, validation_share: float, test_share: float) -> None:
        self._seen = np.zeros(num_classes, np.int64)
        self._test_share = test_share
        self._taken_share = validation_share + test_share

    def deal(self, classes: NDArray[np.integer]) -> NDArray[np.int8]:
        """The split of each text, given its class."""
        order = np.argsort(classes, kind="stable")
        sorted_classes = classes[order]
        counts = np.bincount(sorted_classes, minlength=len(self._seen))
        starts = np.cumsum(counts) - counts
        turn = np.arange(len(order)) - starts[sorted_classes] + self._seen[sorted_classes]
        self._seen += counts
        taken = np.floor((turn + 1) * self._taken_share) > np.floor(turn * self._taken_share)
        nth_taken = np.floor(turn * self._taken_share)
        among_taken = self._test_share / self._taken_share
        is_test = taken & (
            np.floor((nth_taken + 1) * among_taken + 0.5) > np.floor(nth_taken * among_taken + 0.5)
        )
        splits = np.empty(len(order), np.int8)
        splits[order] = taken.astype(np.int8) + is_test.astype(np.int8)
        return splits


def split_groups(
    hashes: NDArray[np.uint64],
    rows: NDArray[np.int64],
    *,
    validation_share: float,
    test_share: float,
    seed: int = 0,
) -> NDArray[np.int8]:
    """The split of each group of rows; `rows`: how many rows each group has."""
    # Groups are lined up in the order of their hashes, and the place of a group's middle decides.
    # Groups of 10, 30 and 60 rows, a fifth each for test and validation:
    #
    #     middle of each group    5   25   70   of 100 rows
    #     below 20: test          T    .    .
    #     below 40: validation    .    V    .
    order = np.argsort(reseeded(hashes, seed), kind="stable")
    middle = np.cumsum(rows[order]) - rows[order] / 2
    total = max(1, int(rows.sum()))
    in_order = (middle < (validation_share + test_share) * total).astype(np.int8)
    in_order += middle < test_share * total
    wanted = [split for split, share in ((2, test_share), (1, validation_share)) if share]
    # With few large groups no middle may lie low enough: each split then gets one group.
    for number, split in enumerate(wanted[: len(order) - 1]):
        if not (in_order == split).any():
            in_order[number] = split
    splits = np.empty(len(order), np.int8)
    splits[order] = in_order
    return splits
