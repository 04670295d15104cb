"""Texts encoded by the unit: what one build has encoded, no other one encodes again.

A unit is some hundred thousand texts in a row of files that are read together, known by the bytes
of these files, by what becomes of each row, and by how texts are encoded. Each becomes a small
store beside the others as soon as it is encoded, and stays: stores of large sources keep no tokens
of their own but name those of their units, their shards. So nothing is copied, a build that was
killed continues, builds on several machines that share a cache can each take a part of the units,
and one more file encodes its own rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from flatout.data.checks.cleaning import TextBlock
from flatout.data.store.cache import Cache, Recipe, recipe_key
from flatout.data.store.store import SCHEMA, Store, StoreWriter

# a unit is full with so many texts, or when they have so many bytes
UNIT_ROWS = 1 << 18
UNIT_BYTES = 1 << 26
# blocks of texts one after the other, each with the split it goes to
Unit = list[tuple[str, TextBlock]]
Encode = Callable[[Unit, StoreWriter], None]


def least_rows() -> int:
    """Files are taken together until they have so many rows, and no unit has rows of
    files beyond.
    """
    return UNIT_ROWS // 2


def units_of(blocks: Iterable[tuple[str, TextBlock]]) -> Iterator[Unit]:
    """Blocks of texts, gathered into units."""
    waiting = Unit()
    rows = 0
    num_bytes = 0
    for split, block in blocks:
        waiting.append((split, block))
        rows, num_bytes = rows + len(block.texts), num_bytes + block.texts.nbytes
        if rows >= UNIT_ROWS or num_bytes >= UNIT_BYTES:
            yield waiting
            waiting = Unit()
            rows = 0
            num_bytes = 0
    if waiting:
        yield waiting


class EncodedUnits:
    """The units of one way of encoding: those that lie in the cache, and those that are encoded
    now.
    """

    def __init__(self, cache: Cache, name: str, how: Recipe) -> None:
        """`name`: whose data it is; `how`: all that texts become tokens by, and are read by."""
        self.cache = cache.of_units()
        self.name = name
        self.how = how | {"schema": SCHEMA, "unit": [UNIT_ROWS, UNIT_BYTES]}
        self.cache.remove_leftovers()
        # units that were there, and that were not
        self.found = 0
        self.made = 0

    def of(
        self,
        known: Recipe,
        num_rows: int,
        units: Iterable[Unit],
        encode: Encode,
        share: tuple[int, int] = (0, 1),
    ) -> Iterator[Store]:
        """The units of so many rows that follow each other; `units` are read as far as one is
        missing.

        `known`: what these rows are known by; `share`: which of so many units, one after the other,
        is this process's.
        """
        place = -1
        numbered = enumerate(units)
        while num_rows > 0:
            place += 1
            key = recipe_key(self.how | known | {"number": place})
            is_own = place % share[1] == share[0]
            shard = self.cache.opened(key)
            self.found += is_own and shard is not None
            if shard is None:
                unit = next(unit for number, unit in numbered if number == place)
                num_rows -= sum(len(block.texts) for _, block in unit)
                if not is_own:
                    continue
                shard = self.cache.kept(key, self.name, partial(encode, unit))
                self.made += 1
            else:
                num_rows -= sum(split.num_rows for split in shard.splits.values())
            if is_own:
                yield shard
