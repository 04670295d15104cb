"""Which split a row belongs to, from a hash of its content.

Equal texts always fall in the same split, so no row leaks from training into the test, and a file
that has grown keeps its old split. The hash is plain arithmetic on the bytes, the same on every
machine. Where each class must keep its share, the distinct texts of a class are dealt out in the
order of their hashes, every tenth one say, which meets the share to one row. Groups are dealt out
whole until the share is met.
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


# A byte at place p of the window counts times the multiplier to the p + 1; a text that begins at
# place b is divided by the multiplier to the b, which has an inverse because it is odd. So one
# table of powers serves texts of any length.
_POWERS = _powers(_MULTIPLIER)
_INVERSES = np.append(np.uint64(1), _powers(pow(_MULTIPLIER, -1, 1 << 64))[:-1])
_OF_ONES = np.append(np.uint64(0), np.cumsum(_POWERS, dtype=np.uint64))
"""What a text of so many bytes, each one, adds up to."""


def hash_texts(texts: pa.Array, seed: int = 0) -> NDArray[np.uint64]:
    """A 64-bit hash of each text's UTF-8 bytes; a null counts as an empty text."""
    return hash_bytes(*bytes_of(texts), seed)


def bytes_of(texts: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The UTF-8 bytes of these texts alone, without a copy, and where each begins and
    ends in them.
    """
    texts = texts.cast(pa.large_binary())
    offsets = np.frombuffer(texts.buffers()[1], dtype=np.int64)[
        texts.offset : texts.offset + len(texts) + 1
    ]
    first, last = int(offsets[0]), int(offsets[-1])
    data = (
        np.frombuffer(texts.buffers()[2], np.uint8)[first:last]
        if last > first
        else np.empty(0, np.uint8)
    )
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
    """Other hashes from the same ones, for each seed."""
    return _mixed(hashes ^ _mixed(np.array([seed & _ALL_BITS], dtype=np.uint64)))


def _sums_of_ones(lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
    """What texts would add up to if every byte were one: so that a byte counts as itself and one,
    and zeros count.
    """
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
    """Add to each text's sum its bytes, each times a power of the multiplier that counts from the
    text's beginning.
    """
    filled = np.flatnonzero(np.diff(offsets))
    starts = offsets[filled]
    for begin in range(int(offsets[0]), int(offsets[-1]), _WINDOW):
        end = min(begin + _WINDOW, int(offsets[-1]))
        first = np.searchsorted(starts, begin, "right") - 1
        last = np.searchsorted(starts, end)
        places = np.maximum(starts[first:last] - begin, 0)
        terms = np.multiply(data[begin:end], _POWERS[: end - begin], dtype=np.uint64)
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


def split_by_hash(
    hashes: NDArray[np.uint64], *, validation_share: float, test_share: float
) -> NDArray[np.int8]:
    """0 (train), 1 (validation) or 2 (test) for each hash, by its place between the least and the
    largest.
    """
    place = hashes >> np.uint64(11)
    taken, test = (
        np.uint64(math.ceil(share * (1 << 53)))
        for share in (validation_share + test_share, test_share)
    )
    return (place < taken).astype(np.int8) + (place < test).astype(np.int8)


class Dealer:
    """Deals the distinct texts of each class out, in turn, so that every split gets its share of
    every class.
    """

    # Texts come in the order of their hashes, in as many calls as it takes. The n-th of a class
    # goes to the test when n times the share passes a whole number; so a share of 0.1 takes every
    # tenth, and a class of two stays in training.

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
    """The split of each group of rows: whole groups, in the order of their hashes, until the shares
    are met.
    """
    order = np.argsort(reseeded(hashes, seed), kind="stable")
    middle = np.cumsum(rows[order]) - rows[order] / 2
    total = max(1, int(rows.sum()))
    in_order = (middle < (validation_share + test_share) * total).astype(np.int8)
    in_order += middle < test_share * total
    wanted = [split for split, share in ((2, test_share), (1, validation_share)) if share]
    # few large groups: one for each split at least
    for number, split in enumerate(wanted[: len(order) - 1]):
        if not (in_order == split).any():
            in_order[number] = split
    splits = np.empty(len(order), np.int8)
    splits[order] = in_order
    return splits
