"""Texts encoded in units: what one build has encoded, no other build encodes again.

A unit is some hundred thousand texts that stand one after the other in a piece of a source. Its key
is a hash of the bytes of the piece's files, of the split of each row, and of how texts are encoded.
Each unit becomes a small store in the cache once it is encoded. The store of a large source has no
tokens: its manifest names those of the units, which are then called its shards. So nothing is
copied, a killed build continues, and one more file encodes its own rows alone. Builds on several
machines that share a cache each take a part of the units. Open this file to change how large
sources are encoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flatout.data.checks.cleaning import TextBlock
from flatout.data.store.cache import Build, Cache, Recipe, recipe_key
from flatout.data.store.store import SCHEMA, Store, StoreWriter
from flatout.data.tables.splits import SPLITS

# A unit is full with so many texts, or with so many bytes of them. Smaller ones would cost opening
# many stores, larger ones lose more work when a build is killed.
UNIT_ROWS = 1 << 18
UNIT_BYTES = 1 << 26
# blocks of texts one after the other, each with the split of its rows
Unit = list[tuple[str, TextBlock]]
Encode = Callable[[Unit, StoreWriter], None]


def least_rows() -> int:
    """Rows of a piece: files are put together until they have so many. A unit has rows of one
    piece.
    """
    return UNIT_ROWS // 2


class WaitingRows:
    """The rows of a piece that are in no unit yet: for each split, those from some row on."""

    # A unit ends behind a block of one split, so each split has its own place where the next unit
    # begins. With fates [0, 1, 0, 0, 1] and a first unit of train rows 0 and 2:
    # begins {train: 3, validation: 0}; the next unit must have train row 3 and validation row 1.

    def __init__(self, fates: NDArray[np.int8], first: int) -> None:
        """`fates`: the split of each row of the piece; below 0 for a row that is not used.

        `first`: the number of the piece's first row in its table.
        """
        self._fates = fates
        self._first = first
        self._begins = dict.fromkeys(SPLITS, 0)
        self._count = int((fates >= 0).sum())

    def __bool__(self) -> bool:
        return self._count > 0

    @property
    def begins(self) -> list[int]:
        """For each split the first row of the piece that may be in no unit yet."""
        return list(self._begins.values())

    def begin_with(self, shard: Store) -> bool:
        """Whether the rows of a shard are exactly the next ones of each split."""
        return all(
            self._are_next(name, split.fixed("rows")) for name, split in shard.splits.items()
        )

    def _are_next(self, split: str, rows: NDArray[np.int64]) -> bool:
        begin = self._begins[split]
        if not len(rows):
            return True
        if rows[0] < begin or rows[-1] >= len(self._fates) or (np.diff(rows) <= 0).any():
            return False
        is_of_split = self._fates[begin : rows[-1] + 1] == SPLITS.index(split)
        return int(is_of_split.sum()) == len(rows) and bool(is_of_split[rows - begin].all())

    def take(self, split: str, rows: NDArray[np.int64]) -> None:
        """Remove rows that are in a unit now; `rows` are their numbers in the piece."""
        if len(rows):
            self._begins[split] = int(rows[-1]) + 1
            self._count -= len(rows)

    def take_unit(self, unit: Unit) -> None:
        for split, block in unit:
            self.take(split, block.rows - self._first)

    def take_shard(self, shard: Store) -> None:
        for name, split in shard.splits.items():
            self.take(name, split.fixed("rows"))

    def next_unit(self, blocks: Iterator[tuple[str, TextBlock]]) -> Unit:
        """Read blocks until their waiting rows fill a unit."""
        unit = Unit()
        rows = 0
        num_bytes = 0
        for split, block in blocks:
            num_taken = int(np.searchsorted(block.rows, self._first + self._begins[split]))
            if num_taken == len(block.rows):
                continue
            waiting = block.rows_from(num_taken)
            unit.append((split, waiting))
            rows += len(waiting.texts)
            num_bytes += waiting.texts.nbytes
            if rows >= UNIT_ROWS or num_bytes >= UNIT_BYTES:
                break
        assert unit, "the table has fewer rows than fates"
        return unit


class Turn(NamedTuple):
    """The units of a piece that one process encodes: each `step`-th one, from number `first` on."""

    first: int = 0
    step: int = 1

    def has(self, unit: int) -> bool:
        return unit % self.step == self.first


ALL_UNITS = Turn()


class EncodedUnits:
    """The units of one way of encoding: opened from the cache, or encoded now."""

    def __init__(self, cache: Cache, name: str, recipe: Recipe) -> None:
        """`name`: of the source. `recipe`: all that decides which tokens a text becomes."""
        self.cache = cache.of_units()
        self.name = name
        self.recipe = recipe | {"schema": SCHEMA, "unit": [UNIT_ROWS, UNIT_BYTES]}
        self.cache.remove_leftovers()
        self.num_reused = 0  # units that were in the cache
        self.num_encoded = 0

    def open_or_encode(
        self,
        rows_recipe: Recipe,
        waiting: WaitingRows,
        blocks: Iterator[tuple[str, TextBlock]],
        encode: Encode,
        turn: Turn = ALL_UNITS,
    ) -> Iterator[Store]:
        """The units of the waiting rows that are in this process's `turn`.

        `rows_recipe`: files and splits of these rows, for the key. `blocks`: the rows themselves,
        which are read as far as a unit is missing.
        """
        for number in itertools.count():
            if not waiting:
                return
            recipe = self.recipe | rows_recipe | {"number": number}
            # Another version of a reader ends its units at other rows. A unit that has other rows
            # than the next ones stays, as stores may list it; the right one gets the second key.
            keys = recipe_key(recipe), recipe_key(recipe | {"begins": waiting.begins})
            is_own = turn.has(number)
            shard = self._find(keys, waiting)
            self.num_reused += is_own and shard is not None
            if shard is None:
                unit = waiting.next_unit(blocks)
                if not is_own:
                    # Another process encodes it; this one needs to know where the next one begins.
                    waiting.take_unit(unit)
                    continue
                shard = self._encode(keys, waiting, partial(encode, unit))
                self.num_encoded += 1
            waiting.take_shard(shard)
            if is_own:
                yield shard

    def _find(self, keys: Iterable[str], waiting: WaitingRows) -> Store | None:
        shards = filter(None, map(self.cache.opened, keys))
        return next(filter(waiting.begin_with, shards), None)

    def _encode(self, keys: Iterable[str], waiting: WaitingRows, build: Build) -> Store:
        """Build the unit under the first key that no unit of other rows has."""
        shards = (self.cache.open_or_build_key(key, self.name, build) for key in keys)
        return next(filter(waiting.begin_with, shards))
