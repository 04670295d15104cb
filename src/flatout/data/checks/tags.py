"""Read tags of words: find their scheme, report what is against it, return BIO or plain tags.

A tag that marks an entity is `O`, or a letter and a type: `B-person`. In BIO every entity begins
with B. In IOB1 it begins with I, and with B only where it touches another of its type. IOBES and
BILOU (also BMES) mark the last word of an entity (E, L) and an entity of one word (S, U, W) as
well. What is against the scheme is repaired so that every marked word stays marked. Where no tag is
of that form, tags are plain, such as parts of speech: each word counts by itself, and nothing is
repaired. Open this file to add a scheme.

One sentence in four schemes, `Ann Lee met Bo`:

    BIO      B-person I-person O B-person
    IOB1     I-person I-person O I-person
    IOBES    B-person E-person O S-person
    plain    PROPN    PROPN    VERB PROPN
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
from flatout.data.problem import OUTSIDE, UNANSWERED, are_plain, types_of_tags
from flatout.data.ragged import numbers_in_row, row_bounds
from flatout.data.tables.roles import Roles
from flatout.data.tables.table import Table, decoded, is_blank, is_list, is_text, mask_of
from flatout.errors import UserError, require

_OUTSIDE, _BEGIN, _INSIDE, _END, _SINGLE, _WORD = range(6)
# The place in an entity that each letter means, whatever the scheme. Plain tags have no letter:
# their words are `_WORD`.
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
_TAG = re.compile(f"O|[{''.join(_LETTERS)}][-_].+", re.DOTALL)
_PRINTED_LIST = r"^\[\s*(['\"].*['\"]\s*)?\]$"  # as pandas writes a list into a csv
COLUMNS = ("text", "label")  # columns of a `TaggedTable` in the first pass, a text each
LISTS = ("tokens", "tags")  # and in a later pass, a list each
_NO_TAGS = ("", UNANSWERED)  # CoNLL-U has `_` where a word has no tag
_BLANK = pa.scalar(" ", pa.large_string())
# Words of a row, and types of entities, so that an entity fits into one number of 64 bits.
_MOST_WORDS = 1 << 18
_MOST_KINDS = 1 << 10
# How tags mark where an entity begins and ends; plain tags mark none.
Scheme = StrEnum(
    "Scheme",
    {"bio": "BIO", "iob1": "IOB1", "iobes": "IOBES", "bilou": "BILOU", "plain": "plain tags"},
)


@dataclass(frozen=True, slots=True)
class TagBlock:
    """The tags of some rows as numbers, row after row.

    Rows [B-x, O] and [S-y] have the letters [1, 0, 4], the types [1, 0, 2], the offsets [0, 2, 3].
    """

    letters: NDArray[np.integer]  # the place in an entity: `_BEGIN`, `_INSIDE` and so on
    # Numbers of `TagCensus.types`; 0 for `O`. A plain tag is a type by itself.
    types: NDArray[np.integer]
    offsets: NDArray[np.int64]  # where each row begins, and the number of all tags

    def row_of(self) -> NDArray[np.int64]:
        """The row of each tag."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


@dataclass(slots=True)
class TagCensus:
    """Numbers the types of all tags, counts entities, and finds the scheme."""

    source: str  # the name of the table, for errors
    types: dict[str, int] = field(default_factory=dict)  # number of each type, from 1
    # entities of each type, by split
    entities: dict[str, dict[str, int]] = field(default_factory=dict)
    tokens: int = 0
    is_plain: bool | None = None  # whether tags are plain; None until the first one was read
    _letters: set[str] = field(default_factory=set)
    # Whether some entity begins with I, and whether some B does not touch an entity of its type.
    _has_inside_begins: bool = False
    _has_free_begins: bool = False

    def expect(self, names: Sequence[str]) -> None:
        """Number tags as a tagger with these outputs does."""
        self.is_plain = are_plain(names)
        self.types = {name: number for number, name in enumerate(types_of_tags(names), 1)}

    def read(self, tags: pa.Array, rows: NDArray[np.int64], split: str) -> TagBlock:
        """Tags as numbers, as `numbered` returns them; their entities are counted for the split."""
        block = self.numbered(tags, rows)
        counts = self.entities.setdefault(split, {})
        self.tokens += len(block.types)
        is_start = find_starts(block)
        is_inside_begin = is_start & (block.letters == _INSIDE)
        is_free_begin = (block.letters == _BEGIN) & ~_follows_same_type(block)
        self._has_inside_begins |= bool(is_inside_begin.any())
        self._has_free_begins |= bool(is_free_begin.any())
        entities_of_type = np.bincount(block.types[is_start], minlength=len(self.types) + 1)
        for name, number in self.types.items():
            if entities_of_type[number]:
                counts[name] = counts.get(name, 0) + int(entities_of_type[number])
        return block

    def numbered(self, tags: pa.Array, rows: NDArray[np.int64]) -> TagBlock:
        """Lists of tags as numbers; a new type gets the next free number.

        `rows` are the numbers of the rows in the table, to name one that has no tag of a scheme.
        """
        values = pc.dictionary_encode(pc.fill_null(pc.list_flatten(tags), ""))
        offsets = row_bounds(pc.list_value_length(tags))
        codes = values.indices.to_numpy(zero_copy_only=False)
        names = values.dictionary.to_pylist()
        if self.is_plain is None and names:
            # The kind of most words: a single tag of the other kind is then the mistake.
            marks_entity = np.array([_TAG.fullmatch(name) is not None for name in names])
            self.is_plain = bool(marks_entity[codes].mean() < 0.5)
        if wrong := [name for name in names if not self._is_fine(name)]:
            first = np.argmax(codes == names.index(wrong[0]))
            row = rows[np.searchsorted(offsets, first, "right") - 1] + 1
            raise self._explain(wrong, int(row))
        num_types = len({*self.types, *names})
        require(
            num_types < _MOST_KINDS or not self.is_plain,
            "data.label",
            f"{self.source} has {len(names):,} different tags",
            allowed=f"fewer than {_MOST_KINDS:,}",
            hint="Name the column of the tags: data.label=COLUMN.",
        )
        # The letter and the type of each different tag, then of each word.
        parsed = np.array([self._parse(name) for name in names] or [(0, 0)], np.int32)
        letters = parsed[codes, 0].astype(np.int8)
        return TagBlock(letters, parsed[codes, 1], offsets)

    def names(self) -> list[str]:
        """The plain tags, or those of BIO for every type: `O`, then B and I of each."""
        if self.is_plain:
            return list(self.types)
        return ["O", *(f"{letter}-{name}" for name in self.types for letter in "BI")]

    def scheme(self) -> Scheme:
        """The scheme of everything that was read."""
        if self.is_plain:
            return Scheme.plain
        if self._letters & set("ESMW"):
            return Scheme.iobes
        if self._letters & set("LU"):
            return Scheme.bilou
        # Only IOB1 begins entities with I, and only IOB1 never writes B where nothing touches it.
        is_iob1 = self._has_inside_begins and not self._has_free_begins
        return Scheme.iob1 if is_iob1 else Scheme.bio

    def _parse(self, name: str) -> tuple[int, int]:
        """The numbers of a tag's letter and type."""
        if self.is_plain:
            return _WORD, self.types.setdefault(name, len(self.types) + 1)
        if name == OUTSIDE:
            return _OUTSIDE, 0
        self._letters.add(name[0])
        return _LETTERS[name[0]], self.types.setdefault(name[2:], len(self.types) + 1)

    def _is_fine(self, name: str) -> bool:
        """Whether a tag is one of the kind that the first tags were of."""
        marks_entity = _TAG.fullmatch(name) is not None
        return name not in _NO_TAGS and marks_entity is not self.is_plain

    def _explain(self, wrong: Sequence[str], row: int) -> UserError:
        """The error about tags that are not of the kind that the first tags were of."""
        named = ", ".join(map(repr, wrong[:5]))
        problem = f"no tag of a scheme we know: {named}"
        hint = "Write the tags so."
        if wrong[0] in _NO_TAGS:
            problem = f"a word without a tag: {wrong[0]!r}"
            hint = "Give every word a tag, or leave the sentence out."
        elif self.is_plain:
            problem = f"{named} beside plain tags"
        return UserError(
            "data.label",
            f"{self.source} row {row}: {problem}",
            allowed=(
                "plain tags alone, or O and a letter of BIO, IOBES or BILOU with a type: B-person"
            ),
            hint=hint,
        )


def find_starts(block: TagBlock) -> NDArray[np.bool_]:
    """Which tags begin an entity, whatever the scheme.

    Every tag but `O` does, unless it continues the one before: `O I-x I-x I-y S-y` → 0 1 0 1 1.
    """
    letters = block.letters
    is_inside = (letters == _INSIDE) | (letters == _END)
    is_last = (letters == _END) | (letters == _SINGLE)
    is_after_last = np.append(False, is_last)[:-1]
    continues = is_inside & _follows_same_type(block) & ~is_after_last
    return (letters != _OUTSIDE) & ~continues


def _follows_same_type(block: TagBlock) -> NDArray[np.bool_]:
    """Which tags stand right behind a tag of their type, in the same row."""
    follows = (np.diff(block.types, prepend=0) == 0) & (block.types > 0)
    starts = block.offsets[:-1]
    # Empty rows at the end begin behind the last tag.
    follows[starts[starts < len(follows)]] = False
    return follows


def find_misplaced(block: TagBlock, scheme: Scheme) -> NDArray[np.bool_]:
    """Which tags their scheme does not allow where they stand; of plain tags none.

    In IOB1 that is a B that touches no entity. In the others it is an I or E that continues
    nothing; in IOBES and BILOU also a B or I that nothing continues.
    """
    is_start = find_starts(block)
    letters = block.letters
    if scheme is Scheme.plain:
        return np.zeros(len(letters), np.bool_)
    if scheme is Scheme.iob1:
        return (letters == _BEGIN) & ~_follows_same_type(block)
    continues_nothing = is_start & ((letters == _INSIDE) | (letters == _END))
    if scheme is Scheme.bio:
        return continues_nothing
    # A tag is continued where the next one continues: of B-x I-x O in IOBES, the first is, and the
    # second should have been E-x. The last tag of a row is continued by none.
    is_open = (letters == _BEGIN) | (letters == _INSIDE)
    continues = ~is_start & (block.types > 0)
    is_continued = np.append(continues[1:], False)[: len(letters)]
    last = block.offsets[1:] - 1
    is_continued[last[last >= 0]] = False
    return continues_nothing | (is_open & ~is_continued)


def as_bio(block: TagBlock) -> NDArray[np.int32]:
    """The tags of a block in BIO, each as its place in `TagCensus.names`.

    Plain tags stay as they are.
    """
    # Of type 1 these are 1 for B and 2 for I; of type 2 they are 3 and 4. Plain tags have the
    # places 0, 1 and so on.
    marked = np.where(block.types == 0, 0, block.types * 2 - find_starts(block))
    return np.where(block.letters == _WORD, block.types - 1, marked).astype(np.int32)


class TaggedTable(Table):
    """Tagged words as a table of texts: the words joined, and their tags joined as the label."""

    # So the checks of texts hold for sentences too: repeats, leaks, and equal sentences with other
    # tags. Words and tags that do not fit together are reported with their row. What is found in
    # tags goes to a census that all splits share.

    columns: Sequence[str] = COLUMNS

    def __init__(
        self, table: Table, roles: Roles, split: str, census: TagCensus, group: str | None = None
    ) -> None:
        """`group`: a column that is passed on as it stands, where the table has it."""
        self.inner: Table = table
        self._passed_on = [group] if group is not None and group in table.columns else []
        self.columns = [*COLUMNS, *self._passed_on]
        self.name = table.name
        self.roles = roles
        self.split = split
        self.census = census
        # The scheme is known only after the whole table: rows that would be wrong in each.
        self._misplaced: dict[Scheme, list[NDArray[np.int64]]] = {scheme: [] for scheme in Scheme}
        self._blank: list[NDArray[np.int64]] = []  # rows with a blank word

    def fingerprint(self) -> str:
        return self.inner.fingerprint()

    def blocks(
        self, columns: Sequence[str], rows_per_block: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        read = [*self.roles.columns, *(set(self._passed_on) & set(columns))]
        for rows, block in self.inner.numbered(list(dict.fromkeys(read)), rows_per_block):
            words = self._lists(block, self.roles.texts[0], "data.text")
            tags = self._lists(block, self.roles.label, "data.label")
            self._require_pairs(words, tags, rows)
            if rows[:1] == 0:
                self._require_words(words, tags)
            lists = {name: block.column(name) for name in read}
            lists |= {"tokens": words, "tags": tags}
            if "label" in columns:  # the first pass; what it counts is counted once
                tag_block = self.census.read(tags, rows, self.split)
                self._note(tag_block, words, rows)
                lists["text"] = pc.binary_join(words, _BLANK)
                lists["label"] = pc.binary_join(tags, _BLANK)
            yield pa.RecordBatch.from_arrays([lists[name] for name in columns], names=list(columns))

    def report_tags(self, findings: Findings, scheme: Scheme) -> None:
        """Add what was found in the tags to `findings`, now that their scheme is known."""
        nothing = np.empty(0, np.int64)
        findings.add("repaired_tag", np.concatenate([nothing, *self._misplaced[scheme]]))
        findings.add("blank_token", np.concatenate([nothing, *self._blank]))

    def _lists(self, block: pa.RecordBatch, name: str, key: str) -> pa.Array:
        return split_words(block.column(name), name=name, table=self.name, key=key)

    def _note(self, tags: TagBlock, words: pa.Array, rows: NDArray[np.int64]) -> None:
        """Remember rows with misplaced tags or blank words."""
        row_of = tags.row_of()
        for scheme, misplaced in self._misplaced.items():
            is_misplaced = find_misplaced(tags, scheme)
            misplaced.append(rows[np.unique(row_of[is_misplaced])])
        is_blank_word = mask_of(is_blank(pc.list_flatten(words)))
        self._blank.append(rows[np.unique(row_of[is_blank_word])])

    def _require_pairs(self, words: pa.Array, tags: pa.Array, rows: NDArray[np.int64]) -> None:
        num_words = pc.list_value_length(words).to_numpy()
        num_tags = pc.list_value_length(tags).to_numpy()
        if (wrong := np.flatnonzero(num_words != num_tags)).size:
            row = int(wrong[0])
            location = self.locate(int(rows[row]) + 1)
            raise UserError(
                "data.label",
                f"{self.name} row {location}: {num_words[row]} words and {num_tags[row]} tags",
                hint="Give every word one tag.",
            )

    def _require_words(self, words: pa.Array, tags: pa.Array) -> None:
        """Refuse words that are tags of entities beside tags that are none: they are swapped."""
        samples = [pc.unique(pc.list_flatten(lists)).to_pylist() for lists in (words, tags)]
        are_words, are_tags = (all(map(_TAG.fullmatch, names)) for names in samples)
        hint = f"Set data.text={self.roles.label} data.label={self.roles.texts[0]}."
        if self.inner.word_lines() is not None:
            hint = "Write each line with its word first and its tag last."
        require(
            are_tags or not are_words or len(samples[0]) < 2,
            "data.text and data.label",
            f"the words of {self.name} are tags: {', '.join(map(repr, samples[0][:3]))}",
            hint=hint,
        )


def split_words(column: pa.Array, *, name: str, table: str, key: str) -> pa.Array:
    """The words or tags of each row, as lists of texts.

    Lists stay. A column with one text a row is split at blanks; if no row has a blank, at bars:
    "a|b". `name`, `table` and `key`, the setting, are for the error about another column.
    """
    column = decoded(column)
    if is_text(column.type):
        column = pc.utf8_trim_whitespace(column)
        require(
            len(column) == 0 or not pc.all(pc.match_substring_regex(column, _PRINTED_LIST)).as_py(),
            key,
            f"column {name!r} of {table} holds lists that were written as text",
            allowed="words with a blank between them, or lists",
            hint="Write JSON lines; of pandas: to_json(orient='records', lines=True).",
        )
        has_blanks = pc.any(pc.match_substring_regex(column, r"\s")).as_py()
        has_bars = pc.any(pc.match_substring_regex(column, r"[^|]\|[^|]")).as_py()
        if has_bars and not has_blanks:
            column = pc.split_pattern(column, "|")
        else:
            column = pc.ascii_split_whitespace(column)
    kind = column.type.value_type if is_list(column.type) else column.type
    texts = pa.list_(pa.large_string())
    # A column of nothing but nulls, or of empty lists, has no type yet.
    if pa.types.is_null(kind):
        column = column.cast(texts)
        kind = texts.value_type
    require(
        is_list(column.type) and is_text(kind),
        key,
        f"column {name!r} of {table} holds {column.type}",
        allowed="a list of texts in each row",
        hint="Write tags by their names, not by numbers." if pa.types.is_integer(kind) else "",
    )
    lists = pc.fill_null(column.cast(texts), pa.scalar([], texts))
    # a null is a blank word
    return pa.ListArray.from_arrays(lists.offsets, pc.fill_null(lists.values, ""))


@dataclass(frozen=True, slots=True)
class Entities:
    """Runs of words that are one entity each; all arrays have one value an entity."""

    row: NDArray[np.int64]
    start: NDArray[np.int64]  # the first word, counted within the row
    stop: NDArray[np.int64]  # the word after the last
    kind: NDArray[np.int64]  # number of the type, from 0

    def keys(self) -> NDArray[np.int64]:
        """One number an entity; equal where all of it is equal."""
        first_words = self.row * _MOST_WORDS + self.start
        spans = first_words * _MOST_WORDS + self.stop
        return spans * _MOST_KINDS + self.kind


def find_entities(
    ids: NDArray[np.integer], offsets: NDArray[np.integer], *, is_plain: bool = False
) -> Entities:
    """The entities of rows of tags; an I that continues nothing begins one.

    `ids` are places in `TagCensus.names`, row after row; row r has those from `offsets[r]` on.
    With `is_plain` each word is one by itself, but for those below 0, which have no answer.
    """
    if is_plain:
        row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        start = numbers_in_row(np.diff(offsets))
        is_there = ids >= 0
        start = start[is_there]
        return Entities(row[is_there], start, start + 1, ids[is_there].astype(np.int64))
    # One row going through, with the types x and y:
    #
    #     tags    B-x  I-x  O  I-y       ids 1 2 0 4, types 1 1 0 2
    #     first   0            3         where entities begin
    #     breaks  0         2  3    4    where an entity ends, if one is open
    #     length  2            1         to the next break: entities 0–2 of x and 3–4 of y
    types = (ids.astype(np.int64) + 1) // 2
    letter_of_entity = np.where(ids % 2 == 1, _BEGIN, _INSIDE)
    letters = np.where(types == 0, _OUTSIDE, letter_of_entity)
    block = TagBlock(letters, types, np.asarray(offsets, np.int64))
    is_first = find_starts(block)
    first = np.flatnonzero(is_first)
    row = block.row_of()[is_first]
    # An entity runs until the next word that does not continue it.
    breaks = np.append(np.flatnonzero(is_first | (types == 0)), len(ids))
    next_break = np.searchsorted(breaks, first, side="right")
    length = breaks[next_break] - first
    start = first - offsets[row]
    return Entities(row, start, start + length, types[first] - 1)
