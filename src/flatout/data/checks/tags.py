"""Tags of words that mark entities: which scheme they follow, what in them is against it, and all of them as BIO.

A tag is `O`, or a letter and a type: `B-person`. In BIO every entity begins with B. In IOB1 it begins with I, and with
B only where it touches another of its type. IOBES and BILOU (also BMES) mark the last word of an entity (E, L) and an
entity of one word (S, U, W) as well. What is against the scheme is repaired in the way that keeps every marked word
marked: a word inside of nothing begins an entity.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.errors import UserError

_OUTSIDE, _BEGIN, _INSIDE, _END, _SINGLE = range(5)
_LETTERS = {"B": _BEGIN, "I": _INSIDE, "M": _INSIDE, "E": _END, "L": _END, "S": _SINGLE, "U": _SINGLE, "W": _SINGLE}
_SHOWN = 5


class Scheme(StrEnum):
    """How tags mark where an entity begins and ends."""

    bio = "BIO"
    iob1 = "IOB1"
    iobes = "IOBES"
    bilou = "BILOU"


@dataclass(frozen=True, slots=True)
class TagBlock:
    """The tags of some rows, as numbers: the letter and the type of each, and where rows begin."""

    letters: NDArray[np.int8]
    types: NDArray[np.int32]
    """0 for `O`."""
    offsets: NDArray[np.int64]

    def row_of(self) -> NDArray[np.int64]:
        """The row of each tag."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


@dataclass(slots=True)
class TagCensus:
    """Counts the tags of all rows, and finds their scheme."""

    source: str
    types: dict[str, int] = field(default_factory=dict)
    """Number of each type, from 1."""
    entities: dict[str, dict[str, int]] = field(default_factory=dict)
    """Entities of each type, by split."""
    tokens: int = 0
    _letters: set[str] = field(default_factory=set)
    _inside_begins: int = 0
    _free_begins: int = 0

    def read(self, tags: pa.Array, rows: NDArray[np.int64]) -> TagBlock:
        """Tags as numbers, counted."""
        block = self.numbered(tags, rows)
        self.tokens += len(block.types)
        self._count(block)
        return block

    def numbered(self, tags: pa.Array, rows: NDArray[np.int64]) -> TagBlock:
        """Tags as numbers."""
        values = pc.dictionary_encode(pc.fill_null(pc.list_flatten(tags), ""))
        lengths = pc.list_value_length(tags).to_numpy(zero_copy_only=False)
        offsets = np.append(0, np.cumsum(lengths)).astype(np.int64)
        codes = values.indices.to_numpy(zero_copy_only=False)
        names = values.dictionary.to_pylist()
        self._require_known(names, codes, offsets, rows)
        parsed = np.array([self._parsed(name) for name in names] or [(0, 0)], np.int32)
        return TagBlock(parsed[codes, 0].astype(np.int8), parsed[codes, 1], offsets)

    def names(self) -> list[str]:
        """The tags of BIO for every type: `O`, then B and I of each."""
        return ["O", *(f"{letter}-{name}" for name in self.types for letter in "BI")]

    def scheme(self) -> Scheme:
        """The scheme of everything that was read."""
        if self._letters & set("ESMW"):
            return Scheme.iobes
        if self._letters & set("LU"):
            return Scheme.bilou
        return Scheme.iob1 if self._inside_begins and not self._free_begins else Scheme.bio

    def count_entities(self, split: str, block: TagBlock) -> None:
        """Count where an entity begins, by type."""
        counts = self.entities.setdefault(split, {})
        found = np.bincount(block.types[begins(block)], minlength=len(self.types) + 1)
        for name, number in self.types.items():
            if found[number]:
                counts[name] = counts.get(name, 0) + int(found[number])

    def _require_known(
        self, names: list[str], codes: NDArray[np.int32], offsets: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> None:
        if not (wrong := [name for name in names if not self._is_known(name)]):
            return
        place = int(np.flatnonzero(codes == names.index(wrong[0]))[0])
        row = int(np.searchsorted(offsets, place, "right")) - 1
        what = f"{self.source} row {rows[row] + 1}: no tag of a scheme we know: {', '.join(map(repr, wrong[:_SHOWN]))}"
        raise UserError(
            "data.label",
            what,
            allowed="O, or a letter of BIO, IOBES or BILOU with a type: B-person",
            hint="Write the tags so.",
        )

    def _count(self, block: TagBlock) -> None:
        begin = begins(block)
        is_touching = _follows_same_type(block)
        self._inside_begins += int((begin & (block.letters == _INSIDE)).sum())
        self._free_begins += int(((block.letters == _BEGIN) & ~is_touching).sum())

    @staticmethod
    def _is_known(name: str) -> bool:
        return name == "O" or (len(name) > 2 and name[0] in _LETTERS and name[1] in "-_")

    def _parsed(self, name: str) -> tuple[int, int]:
        if name == "O":
            return _OUTSIDE, 0
        self._letters.add(name[0])
        return _LETTERS[name[0]], self.types.setdefault(name[2:], len(self.types) + 1)


def begins(block: TagBlock) -> NDArray[np.bool_]:
    """Where an entity begins, whatever the scheme."""
    letters = block.letters
    is_inside = (letters == _INSIDE) | (letters == _END)
    has_ended = np.zeros(len(letters), np.bool_)
    has_ended[1:] = (letters[:-1] == _END) | (letters[:-1] == _SINGLE)
    continues = is_inside & _follows_same_type(block) & ~has_ended
    return (letters != _OUTSIDE) & ~continues


def _follows_same_type(block: TagBlock) -> NDArray[np.bool_]:
    """Whether the tag before, in the same row, has the same type."""
    follows = np.zeros(len(block.types), np.bool_)
    follows[1:] = (block.types[1:] == block.types[:-1]) & (block.types[1:] > 0)
    starts = block.offsets[:-1]
    follows[starts[starts < len(follows)]] = False
    return follows


def misplaced(block: TagBlock, scheme: Scheme) -> NDArray[np.bool_]:
    """Tags that their scheme does not allow where they stand."""
    begin, letters = begins(block), block.letters
    if scheme is Scheme.iob1:
        return (letters == _BEGIN) & ~_follows_same_type(block)
    wrong = begin & ((letters == _INSIDE) | (letters == _END))
    if scheme is Scheme.bio:
        return wrong
    is_open = (letters == _BEGIN) | (letters == _INSIDE)
    goes_on = np.zeros(len(letters), np.bool_)
    goes_on[:-1] = ~begin[1:] & (block.types[1:] > 0)
    ends = block.offsets[1:] - 1
    goes_on[ends[ends >= 0]] = False
    return wrong | (is_open & ~goes_on)


def as_bio(block: TagBlock) -> NDArray[np.int32]:
    """The same entities with B at each beginning and I behind it, as places in `TagCensus.names`."""
    return np.where(block.types == 0, 0, block.types * 2 - begins(block)).astype(np.int32)
