"""Texts encoded by the unit: what one build has encoded, no other one encodes again.

A unit is some hundred thousand texts in a row, known by their bytes and by how they are encoded. Each becomes a small
store of its own beside the others, as soon as it is encoded, and goes when the store it was made for is whole. So a
build that was killed continues, builds on several machines that share a cache can each take a part of the units, and
the store that is joined from them is the same to the byte. A finished store says which units it was made from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from flatout.data.checks.cleaning import TextBlock
from flatout.data.store.cache import Cache, Recipe, recipe_key
from flatout.data.store.store import SCHEMA, Column, Store, StoreWriter
from flatout.data.tables.splits import bytes_of
from flatout.data.tokens.vocabulary import EncodedBlock

UNIT_ROWS, UNIT_BYTES = 1 << 18, 1 << 26  # a unit is full with so many texts, or when they have so many bytes
FACT = "units"  # the fact of a store that says which units it was made from, and where their rows begin in each split
_LOST = ("unknown", "truncated_rows", "truncated_tokens")  # what encoded rows count of themselves
Encode = Callable[[pa.Array], EncodedBlock]
BySplit = dict[str, EncodedBlock]


@dataclass(frozen=True, slots=True)
class Unit:
    """Blocks of texts one after the other, each with the split it goes to."""

    blocks: list[tuple[str, TextBlock]]
    is_full: bool

    def encoded(self, encode: Encode) -> BySplit:
        """The rows of each split, encoded."""
        found: dict[str, list[EncodedBlock]] = {}
        for split, block in self.blocks:
            found.setdefault(split, []).append(encode(block.texts))
        return {split: _joined(blocks) for split, blocks in found.items()}

    def cut(self, encoded: BySplit) -> Iterator[EncodedBlock]:
        """The encoded rows of each block; the first of a split has what was counted of them all."""
        left = dict(encoded)
        for split, block in self.blocks:
            whole, rows = left[split], len(block.texts)
            end = int(whole.lengths[:rows].sum())
            yield replace(whole, tokens=whole.tokens[:end], lengths=whole.lengths[:rows])
            left[split] = EncodedBlock(whole.tokens[end:], whole.lengths[rows:], 0, 0, 0, np.empty(0, np.int64))

    def key(self, how: str) -> str:
        """Names it by its texts and by how they are encoded."""
        digest = xxhash.xxh3_128(how.encode())
        for split, block in self.blocks:
            data, offsets = bytes_of(block.texts)
            digest.update(split.encode())
            digest.update(np.diff(offsets).tobytes())
            digest.update(data.tobytes())
        return digest.hexdigest()[:20]


def least_rows() -> int:
    """Files are taken together until they have so many rows, and no unit has rows of files beyond."""
    return UNIT_ROWS // 2


def units_of(blocks: Iterable[tuple[str, TextBlock]], num_rows: int) -> Iterator[Unit]:
    """Blocks of files that have so many rows, gathered into units; the last may not be full if these are few."""
    waiting, rows, num_bytes = list[tuple[str, TextBlock]](), 0, 0
    for split, block in blocks:
        waiting.append((split, block))
        rows, num_bytes = rows + len(block.texts), num_bytes + block.texts.nbytes
        if rows >= UNIT_ROWS or num_bytes >= UNIT_BYTES:
            yield Unit(waiting, is_full=True)
            waiting, rows, num_bytes = [], 0, 0
    if waiting:
        yield Unit(waiting, is_full=num_rows >= least_rows())


class EncodedUnits:
    """The units of one way of encoding: those that lie in the cache, and those in finished stores."""

    def __init__(self, cache: Cache, name: str, how: Recipe, dtype: str, encode: Encode) -> None:
        """`name`: whose data it is; `how`: all that texts become tokens by; `dtype`: the type of a token."""
        self.name, self.how, self.dtype = name, recipe_key(how | {"schema": SCHEMA}), dtype
        self.stores, self.cache, self.encode = cache, cache.of_units(), encode
        self.cache.remove_leftovers()
        self.used: dict[str, dict[str, Any]] = {}
        """Of each full unit where its rows begin in every split, and what was counted of them."""
        self.found = 0  # units that were there
        self._rows: Counter[str] = Counter()
        self._open_whole = lru_cache(None)(self.stores.opened)

    def read(self, unit: Unit) -> BySplit:
        """The rows of a unit, from where they lie or encoded now; every one of a source is asked for, in order."""
        if unit.is_full:
            key = unit.key(self.how)
            found = self._kept(key, unit)
            self.used[key] = {split: [self._rows[split], *_counted(block)] for split, block in found.items()}
        else:
            found = unit.encoded(self.encode)
        self._rows.update({split: len(block.lengths) for split, block in found.items()})
        return found

    def write(self, unit: Unit) -> None:
        """See that a unit lies in the cache, for another build to join."""
        self._kept(unit.key(self.how), unit)

    @cached_property
    def _of_stores(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Of each unit that a finished store was made from, that store's key, and where the unit's rows are."""
        found: dict[str, tuple[str, dict[str, Any]]] = {}
        for store in reversed(self.stores.entries()):  # the newest one counts
            found |= {key: (store.key, starts) for key, starts in store.manifest["facts"].get(FACT, {}).items()}
        return found

    def _kept(self, key: str, unit: Unit) -> BySplit:
        if (found := self._there(key)) is not None:
            self.found += 1
            return found
        found = unit.encoded(self.encode)

        def build(writer: StoreWriter) -> None:
            for split, block in found.items():
                columns = {"tokens": Column(self.dtype, ragged=True)}
                writer.split(split, columns).append(tokens=(block.tokens, block.lengths))
            writer.facts |= {split: _counted(block) for split, block in found.items()}

        self.cache.build(key, self.name, build)
        return found

    def _there(self, key: str) -> BySplit | None:
        if (store := self.cache.opened(key)) is not None:
            return {split: _rows_of(store, split, 0, *counted) for split, counted in store.facts.items()}
        if key not in self._of_stores:
            return None
        whole, starts = self._of_stores[key]
        store = self._open_whole(whole)
        return None if store is None else {split: _rows_of(store, split, *start) for split, start in starts.items()}


def _counted(block: EncodedBlock) -> list[Any]:
    """What is known of encoded rows besides their tokens: how many, what was lost, and how long they were."""
    lengths, counts = np.unique(block.whole_lengths, return_counts=True)
    return [len(block.lengths), *(getattr(block, name) for name in _LOST), lengths.tolist(), counts.tolist()]


def _rows_of(store: Store, split: str, first: int, rows: int, *counted: Any) -> EncodedBlock:
    """Rows of a store as they were encoded; their whole lengths are in another order, which nothing asks for."""
    tokens = store.splits[split].ragged("tokens")
    begin, end = tokens.offsets[first], tokens.offsets[first + rows]
    unknown, cut_rows, cut_tokens, lengths, counts = counted
    whole, kept = np.repeat(np.array(lengths, np.int64), counts), tokens.lengths[first : first + rows]
    return EncodedBlock(tokens.values[begin:end], kept, unknown, cut_rows, cut_tokens, whole)


def _joined(blocks: list[EncodedBlock]) -> EncodedBlock:
    names = ("tokens", "lengths", "whole_lengths")
    arrays: dict[str, Any] = {name: np.concatenate([getattr(block, name) for block in blocks]) for name in names}
    return EncodedBlock(**arrays, **{name: sum(getattr(block, name) for block in blocks) for name in _LOST})
