"""Tags of words that mark entities: which scheme they follow, what in them is against it, and all
of them as BIO.

A tag is `O`, or a letter and a type: `B-person`. In BIO every entity begins with B. In IOB1 it
begins with I, and with B only where it touches another of its type. IOBES and BILOU (also BMES)
mark the last word of an entity (E, L) and an entity of one word (S, U, W) as well. What is against
the scheme is repaired so that every marked word stays marked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.checks.findings import Findings
from flatout.data.tables.roles import Roles
from flatout.data.tables.table import Table, decoded, is_blank, is_list, is_text, mask_of
from flatout.errors import UserError, require

_OUTSIDE, _BEGIN, _INSIDE, _END, _SINGLE = range(5)
_LETTERS = {
    "B": _BEGIN,
    "I": _INSIDE,
    "M": _INSIDE,
    "E": _END,
    "L": _END,
    "S": _SINGLE,
    "U": _SINGLE,
    "W": _SINGLE,
}
_KNOWN = re.compile(f"O|[{''.join(_LETTERS)}][-_].+", re.DOTALL)
COLUMNS = ("text", "label")
LISTS = ("tokens", "tags")  # the same as lists, for a later pass
_BLANK = pa.scalar(" ", pa.large_string())
_MOST_WORDS = 1 << 18
_MOST_KINDS = 1 << 10
Scheme = StrEnum("Scheme", {"bio": "BIO", "iob1": "IOB1", "iobes": "IOBES", "bilou": "BILOU"})
"""How tags mark where an entity begins and ends."""


@dataclass(frozen=True, slots=True)
class TagBlock:
    """The tags of some rows, as numbers: the letter and the type of each, and where rows begin."""

    letters: NDArray[np.integer]
    types: NDArray[np.integer]  # 0 for `O`
    offsets: NDArray[np.int64]

    def row_of(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


@dataclass(slots=True)
class TagCensus:
    """Counts the tags of all rows, and finds their scheme."""

    source: str
    types: dict[str, int] = field(default_factory=dict)  # number of each type, from 1
    # entities of each type, by split
    entities: dict[str, dict[str, int]] = field(default_factory=dict)
    tokens: int = 0
    _letters: set[str] = field(default_factory=set)
    _has_inside_begins: bool = False
    _has_free_begins: bool = False

    def read(self, tags: pa.Array, rows: NDArray[np.int64], split: str) -> TagBlock:
        """Tags as numbers, counted, and where an entity begins, by type."""
        block = self.numbered(tags, rows)
        counts = self.entities.setdefault(split, {})
        self.tokens += len(block.types)
        starts = begins(block)
        self._has_inside_begins |= bool((starts & (block.letters == _INSIDE)).any())
        self._has_free_begins |= bool(
            ((block.letters == _BEGIN) & ~_follows_same_type(block)).any()
        )
        found = np.bincount(block.types[starts], minlength=len(self.types) + 1)
        for name, number in self.types.items():
            if found[number]:
                counts[name] = counts.get(name, 0) + int(found[number])
        return block

    def numbered(self, tags: pa.Array, rows: NDArray[np.int64]) -> TagBlock:
        values = pc.dictionary_encode(pc.fill_null(pc.list_flatten(tags), ""))
        offsets = np.append(0, np.cumsum(pc.list_value_length(tags))).astype(np.int64)
        codes = values.indices.to_numpy(zero_copy_only=False)
        names = values.dictionary.to_pylist()
        if wrong := [name for name in names if not _KNOWN.fullmatch(name)]:
            row = (
                int(np.searchsorted(offsets, np.argmax(codes == names.index(wrong[0])), "right"))
                - 1
            )
            raise UserError(
                "data.label",
                (
                    f"{self.source} row {rows[row] + 1}: no tag of a scheme we know:"
                    f" {', '.join(map(repr, wrong[:5]))}"
                ),
                allowed="O, or a letter of BIO, IOBES or BILOU with a type: B-person",
                hint="Write the tags so.",
            )
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
        return Scheme.iob1 if self._has_inside_begins and not self._has_free_begins else Scheme.bio

    def _parsed(self, name: str) -> tuple[int, int]:
        if name == "O":
            return _OUTSIDE, 0
        self._letters.add(name[0])
        return _LETTERS[name[0]], self.types.setdefault(name[2:], len(self.types) + 1)


def begins(block: TagBlock) -> NDArray[np.bool_]:
    """Where an entity begins, whatever the scheme."""
    letters = block.letters
    is_inside = (letters == _INSIDE) | (letters == _END)
    has_ended = np.append(False, (letters == _END) | (letters == _SINGLE))[:-1]
    continues = is_inside & _follows_same_type(block) & ~has_ended
    return (letters != _OUTSIDE) & ~continues


def _follows_same_type(block: TagBlock) -> NDArray[np.bool_]:
    follows = (np.diff(block.types, prepend=0) == 0) & (block.types > 0)
    starts = block.offsets[:-1]
    follows[starts[starts < len(follows)]] = False
    return follows


def misplaced(block: TagBlock, scheme: Scheme) -> NDArray[np.bool_]:
    """Tags that their scheme does not allow where they stand."""
    begin = begins(block)
    letters = block.letters
    if scheme is Scheme.iob1:
        return (letters == _BEGIN) & ~_follows_same_type(block)
    wrong = begin & ((letters == _INSIDE) | (letters == _END))
    if scheme is Scheme.bio:
        return wrong
    is_open = (letters == _BEGIN) | (letters == _INSIDE)
    goes_on = np.append((~begin & (block.types > 0))[1:], False)[: len(letters)]
    ends = block.offsets[1:] - 1
    goes_on[ends[ends >= 0]] = False
    return wrong | (is_open & ~goes_on)


def as_bio(block: TagBlock) -> NDArray[np.int32]:
    """The same entities with B at each beginning and I behind it, as places in
    `TagCensus.names`.
    """
    return np.where(block.types == 0, 0, block.types * 2 - begins(block)).astype(np.int32)


class TaggedTable(Table):
    """Tagged words as a table of texts: the words joined, and their tags joined as the label."""

    # So the checks of texts hold for sentences too: repeats, leaks, and equal sentences with other
    # tags. Words and tags that do not fit together are reported with their row. What is found in
    # tags goes to a census that all splits share.

    columns: Sequence[str] = COLUMNS

    def __init__(self, table: Table, roles: Roles, split: str, census: TagCensus) -> None:
        self.inner: Table = table
        self.name = table.name
        self.roles = roles
        self.split = split
        self.census = census
        self._misplaced: dict[Scheme, list[NDArray[np.int64]]] = {scheme: [] for scheme in Scheme}
        self._blank: list[NDArray[np.int64]] = []

    def fingerprint(self) -> str:
        return self.inner.fingerprint()

    def blocks(
        self, columns: Sequence[str], rows_per_block: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        for rows, block in self.inner.numbered(self.roles.columns, rows_per_block):
            words = self.roles.texts[0]
            marks = self.roles.label
            tokens = word_lists(block.column(words), name=words, table=self.name, key="data.text")
            tags = word_lists(block.column(marks), name=marks, table=self.name, key="data.label")
            self._require_pairs(tokens, tags, rows)
            held = {"tokens": tokens, "tags": tags}
            if "label" in columns:  # the first pass; what it counts is counted once
                self._note(self.census.read(tags, rows, self.split), tokens, rows)
                held |= {
                    "text": pc.binary_join(tokens, _BLANK),
                    "label": pc.binary_join(tags, _BLANK),
                }
            yield pa.RecordBatch.from_arrays([held[name] for name in columns], names=list(columns))

    def tell(self, findings: Findings, scheme: Scheme) -> None:
        """What was found in the tags, now that their scheme is known."""
        for name, found in (
            ("repaired_tag", self._misplaced[scheme]),
            ("blank_token", self._blank),
        ):
            findings.add(name, np.concatenate(found) if found else np.empty(0, np.int64))

    def _note(self, tags: TagBlock, tokens: pa.Array, rows: NDArray[np.int64]) -> None:
        row_of = tags.row_of()
        for scheme, found in self._misplaced.items():
            found.append(rows[np.unique(row_of[misplaced(tags, scheme)])])
        self._blank.append(rows[np.unique(row_of[mask_of(is_blank(pc.list_flatten(tokens)))])])

    def _require_pairs(self, tokens: pa.Array, tags: pa.Array, rows: NDArray[np.int64]) -> None:
        words, marks = (pc.list_value_length(each).to_numpy() for each in (tokens, tags))
        if (wrong := np.flatnonzero(words != marks)).size:
            row = int(wrong[0])
            raise UserError(
                "data.label",
                (
                    f"{self.name} row {self.locate(int(rows[row]) + 1)}: {words[row]} words and"
                    f" {marks[row]} tags"
                ),
                hint="Give every word one tag.",
            )


def word_lists(column: pa.Array, *, name: str, table: str, key: str) -> pa.Array:
    """Words or tags of each row of the column `name`; one text a row is parted at blanks, or at
    bars.
    """
    column = decoded(column)
    if is_text(column.type):
        column = pc.utf8_trim_whitespace(column)
        parted, joined = (
            pc.any(pc.match_substring_regex(column, each)).as_py()
            for each in (r"\s", r"[^|]\|[^|]")
        )
        column = (
            pc.split_pattern(column, "|")
            if joined and not parted
            else pc.ascii_split_whitespace(column)
        )
    kind = column.type.value_type if is_list(column.type) else column.type
    texts = pa.list_(pa.large_string())
    if pa.types.is_null(kind):
        column = column.cast(texts)
        kind = texts.value_type
    hint = "Write tags by their names, not by numbers." if pa.types.is_integer(kind) else ""
    is_right = is_list(column.type) and is_text(kind)
    require(
        is_right,
        key,
        f"column {name!r} of {table} holds {column.type}",
        allowed="a list of texts in each row",
        hint=hint,
    )
    lists = pc.fill_null(column.cast(texts), pa.scalar([], texts))
    # a null is a blank word
    return pa.ListArray.from_arrays(lists.offsets, pc.fill_null(lists.values, ""))


@dataclass(frozen=True, slots=True)
class Entities:
    """Runs of words: the row, the first word, the word after the last, and the type's number from
    0.
    """

    row: NDArray[np.int64]
    start: NDArray[np.int64]  # counted within the row
    stop: NDArray[np.int64]
    kind: NDArray[np.int64]

    def keys(self) -> NDArray[np.int64]:
        """One number an entity; equal where all of it is equal."""
        return (
            (self.row * _MOST_WORDS + self.start) * _MOST_WORDS + self.stop
        ) * _MOST_KINDS + self.kind


def find_entities(ids: NDArray[np.integer], offsets: NDArray[np.integer]) -> Entities:
    """The entities of rows of tags, numbered as `TagCensus.names`; an I that continues nothing
    begins one.
    """
    types = (ids.astype(np.int64) + 1) // 2
    letters = np.where(types == 0, _OUTSIDE, np.where(ids % 2 == 1, _BEGIN, _INSIDE))
    block = TagBlock(letters, types, np.asarray(offsets, np.int64))
    is_first = begins(block)
    first = np.flatnonzero(is_first)
    row = block.row_of()[is_first]
    # An entity runs until the next word that does not continue it.
    breaks = np.append(np.flatnonzero(is_first | (types == 0)), len(ids))
    length = breaks[np.searchsorted(breaks, first, side="right")] - first
    start = first - offsets[row]
    return Entities(row, start, start + length, types[first] - 1)
