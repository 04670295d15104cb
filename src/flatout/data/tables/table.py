"""Tables of any size, read in blocks and strictly as written.

A csv's values stay texts: `NA` is no missing value, `007` and `00101` keep their zeros, one missing
label does not turn the others into floats. JSON, parquet and Arrow keep their own types; a text
that looks like a date stays a text. What cannot be read is reported with file and row, never by a
reader's own error. Memory is flat.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from flatout.data.problem import Problem
from flatout.errors import UserError, did_you_mean, require

_COLUMNS_NAMED = 20
Rows = NDArray[np.int64]
Entries = list[list[str | int]]
"""Of each file its name, and what changes in its entry when it does: size, times and number."""
# part of the key of each split's random streams
SPLIT_STREAM = {"train": 0, "validation": 1, "test": 2}
_NUMBER = r"^\s*[-+]?(\d+([.,]\d*)?|[.,]\d+)([eE][-+]?\d+)?\s*$"


class Table(ABC):
    """Named columns of rows, read in blocks."""

    name: str
    columns: Sequence[str]
    # whose rows these are, one after the other; none: those of one file
    tables: Sequence[Table] = ()
    inner: Table | None = None
    """The table whose rows these are, changed on the way: it says how they are written and where
    they stand."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes with the content and with nothing else."""

    def joined(self, prints: list[str]) -> str:
        """Its fingerprint from those of its tables."""
        return prints[0]

    def entries(self) -> Entries | None:
        """Of each of its files; None where its rows are in none, or have changed since it was
        opened.
        """
        return None if self.inner is None else self.inner.entries()

    @abstractmethod
    def blocks(
        self, columns: Sequence[str], rows_per_block: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        """The rows of some columns, in order."""

    def holds_numbers(self) -> bool:
        """Whether the first rows are numbers in most columns: beside them may stand times and
        names.
        """
        first = next(iter(self.blocks(self.columns)), None)
        columns = [decoded(column) for column in first.columns] if first is not None else []
        plain = [column for column in columns if is_plain(column.type) or is_text(column.type)]
        numbers = sum(are_numbers(as_texts(column)) for column in plain)
        return 2 * numbers > len(columns)

    def numbered(
        self, columns: Sequence[str], rows_per_block: int = 65_536
    ) -> Iterator[tuple[Rows, pa.RecordBatch]]:
        """The same blocks, each with the numbers of its rows, from 0."""
        first = 0
        for block in self.blocks(columns, rows_per_block):
            yield np.arange(first, first + block.num_rows), block
            first += block.num_rows

    def pieces(self, num_rows: int, least: int) -> Iterator[tuple[range, Table]]:
        """Parts of its rows that can be read by themselves, of `least` rows but for the last, once
        all were read.
        """
        yield range(num_rows), self

    def how(self) -> str:
        """How it is written, in words; empty where there is nothing to say."""
        return "" if self.inner is None else self.inner.how()

    def locate(self, row: int) -> str:
        """A row, counted from 1, in words."""
        return f"{row}" if self.inner is None else self.inner.locate(row)

    def listed(self) -> str:
        """Its first columns, in words."""
        more = ", …" if len(self.columns) > _COLUMNS_NAMED else ""
        return f"columns: {', '.join(self.columns[:_COLUMNS_NAMED])}{more}"

    def lacking(self, column: str) -> tuple[str, str]:
        """Who of several files has not got a column, and the columns there, in words."""
        return (self.name, self.listed()) if self.inner is None else self.inner.lacking(column)


def changed(name: str) -> UserError:
    return UserError(
        "data",
        f"{name} changed while it was read",
        hint="Wait until it is written, then run the same command again.",
    )


def require_columns(table: Table, wanted: Mapping[str, str]) -> None:
    """Check that the columns named by some settings exist, once each; all that are missing in one
    message.
    """
    keys: dict[str, str] = {}
    for key, name in wanted.items():
        if list(table.columns).count(name) > 1:
            raise UserError(
                key, f"{table.name} has column {name} more than once", hint="Rename one of them."
            )
        if name in keys and name in table.columns:
            raise UserError(
                key, f"{name!r} is the column of {keys[name]} already", allowed=table.listed()
            )
        keys[name] = key
    missing = {key: name for key, name in wanted.items() if name not in table.columns}
    if not missing:
        return
    names = ", ".join(f"{name!r}" for name in missing.values())
    hints = " ".join(filter(None, (did_you_mean(name, table.columns) for name in missing.values())))
    who, there = table.lacking(next(iter(missing.values())))
    raise UserError(" and ".join(missing), f"no column {names} in {who}", allowed=there, hint=hints)


def decoded(values: pa.Array) -> pa.Array:
    """Categories as the values they stand for."""
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


def is_text(kind: pa.DataType) -> bool:
    return (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def are_bytes(kind: pa.DataType) -> bool:
    return (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def is_plain(kind: pa.DataType) -> bool:
    """Numbers, dates, true and false: what has one way of being written."""
    return pa.types.is_primitive(kind) or pa.types.is_decimal(kind)


def as_texts(values: pa.Array) -> pa.Array:
    """Values as texts.

    A float that is whole is written as one: a missing value had turned the column into floats.
    """
    texts = values.cast(pa.large_string())
    if not pa.types.is_floating(values.type):
        return texts
    is_whole = pc.and_(pc.equal(pc.floor(values), values), pc.less(pc.abs(values), 2.0**53))
    whole = pc.if_else(is_whole, values, pa.scalar(0, values.type)).cast(pa.int64())
    return pc.if_else(is_whole, whole.cast(pa.large_string()), texts)


def is_missing(labels: pa.Array, problem: Problem) -> pa.Array:
    """Which labels are none: null, not a number, or (but for several a row) nothing but white
    space.
    """
    if pa.types.is_floating(labels.type):
        return pc.is_null(labels, nan_is_null=True)
    # no text is no label, but a fine list of several
    if is_text(labels.type) and problem is not Problem.multi:
        return pc.fill_null(is_blank(labels), True)
    return pc.is_null(labels)


def is_blank(texts: pa.Array) -> pa.Array:
    """Empty, or nothing but white space of any alphabet."""
    return pc.or_(pc.equal(pc.binary_length(texts), 0), pc.utf8_is_space(texts))


def are_numbers(texts: pa.Array) -> bool:
    """Whether all texts but blank ones are numbers, such as 12 or -0.5e3; false without any."""
    written = texts.filter(pc.invert(is_blank(texts)))
    return len(written) > 0 and bool(pc.all(pc.match_substring_regex(written, _NUMBER)).as_py())


def mask_of(values: pa.Array) -> NDArray[np.bool_]:
    return pc.fill_null(values, False).to_numpy(zero_copy_only=False)


class GeneratedTable(Table):
    """One split of a built-in sample: blocks of rows from random streams of their own, so any part
    is made alone.
    """

    # what makes the rows, with its version: the rows of a seed never change while this stays
    made_as: ClassVar[str]
    block_rows: ClassVar[int]

    def __init__(self, config: Any, split: str) -> None:
        require(split in SPLIT_STREAM, "split", repr(split), allowed=", ".join(SPLIT_STREAM))
        self.config, self.split = config, split
        self.num_rows: int = config.rows if split == "train" else config.eval_rows

    def fingerprint(self) -> str:
        return xxhash.xxh3_128_hexdigest(
            f"{self.made_as} {self.split} {sorted(asdict(self.config).items())}".encode()
        )

    def blocks(
        self, columns: Sequence[str], rows_per_block: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        waiting: list[pa.RecordBatch] = []
        for number in range(-(-self.num_rows // self.block_rows)):
            left = self.num_rows - number * self.block_rows
            key = [self.config.seed, (SPLIT_STREAM[self.split] << 48) + number]
            made = self._block(np.random.Generator(np.random.Philox(key=key)), columns)
            waiting.append(
                pa.RecordBatch.from_pydict({name: made[name] for name in columns}).slice(0, left)
            )
            if (
                sum(block.num_rows for block in waiting) >= rows_per_block
                or left <= self.block_rows
            ):
                yield from (
                    pa.Table.from_batches(waiting).combine_chunks().to_batches(rows_per_block)
                )
                waiting = []

    @abstractmethod
    def _block(self, random: np.random.Generator, columns: Sequence[str]) -> Mapping[str, pa.Array]:
        """One whole block with at least these columns; other columns do not change their values."""


class ManyFiles(Table):
    """The rows of several files, one after the other; only the columns that all of them have."""

    def __init__(self, tables: Sequence[Table], name: str) -> None:
        self.tables = list(tables)
        self.name = name
        shared = set.intersection(*(set(table.columns) for table in tables))
        self.columns = [column for column in tables[0].columns if column in shared]
        self._starts = [0]  # rows before each file, as far as they have been read

    def how(self) -> str:
        counts = Counter(filter(None, (table.how() for table in self.tables)))
        more = "; ".join(
            f"{how} ({count})" if len(counts) > 1 else how for how, count in counts.items()
        )
        return f"{len(self.tables)} files" + (f": {more}" if more else "")

    def fingerprint(self) -> str:
        return self.joined([table.fingerprint() for table in self.tables])

    def joined(self, prints: list[str]) -> str:
        return xxhash.xxh3_128_hexdigest("\n".join(prints).encode())

    def entries(self) -> Entries | None:
        each = [table.entries() for table in self.tables]
        return None if None in each else [entry for entries in each for entry in entries or ()]

    def locate(self, row: int) -> str:
        number = bisect_left(self._starts, row) - 1
        table, start = self.tables[number], self._starts[number]
        return f"{table.name}:{table.locate(row - start)}"

    def begins(self, number: int, row: int) -> None:
        """Take down which row is the first of a file."""
        self._starts[number : number + 1] = [row]

    def pieces(self, num_rows: int, least: int) -> Iterator[tuple[range, Table]]:
        starts = [*self._starts[: len(self.tables)], num_rows]
        first = 0
        for end in range(1, len(starts)):
            if starts[end] - starts[first] >= least or end == len(self.tables):
                yield (
                    range(starts[first], starts[end]),
                    ManyFiles(self.tables[first:end], self.name),
                )
                first = end

    def lacking(self, column: str) -> tuple[str, str]:
        others = [table for table in self.tables if column not in table.columns]
        few = (
            f"{', '.join(table.name for table in others[:3])}{', …' if len(others) > 3 else ''},"
            " which others have"
        )
        return (
            (few, others[0].listed())
            if 0 < len(others) < len(self.tables)
            else (self.name, self.listed())
        )

    def blocks(
        self, columns: Sequence[str], rows_per_block: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        read = 0
        for number, table in enumerate(self.tables):
            self.begins(number, read)
            for block in table.blocks(columns, rows_per_block):
                read += block.num_rows
                yield block


def named_classes(block: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Columns of class numbers as names, where the file lists them, as `datasets` does; views as
    plain texts.
    """
    for place, column in enumerate(block.columns):
        if pa.types.is_string_view(column.type):  # few of Arrow's functions take one
            block = block.set_column(
                place, block.schema.names[place], column.cast(pa.large_string())
            )
    for name, names in class_names(schema).items():
        if name in block.schema.names:
            place = block.schema.names.index(name)
            if is_list(kind := block.schema.field(name).type):
                block = block.set_column(
                    place, name, block.column(place).cast(pa.list_(kind.value_type))
                )
            column = block.column(place)
            if pa.types.is_integer(column.type):
                block = block.set_column(place, name, names_of(column, names))
            elif is_list(column.type) and pa.types.is_integer(column.type.value_type):
                values = names_of(column.values, names)
                lists = pa.ListArray.from_arrays(column.offsets, values)
                block = block.set_column(place, name, pc.if_else(column.is_valid(), lists, None))
    return block


def names_of(numbers: pa.Array, names: list[str]) -> pa.Array:
    """Class names from their numbers; a number outside the list, as -1 for unknown, is no label."""
    is_named = pc.and_(pc.greater_equal(numbers, 0), pc.less(numbers, len(names)))
    return pa.array(names, pa.large_string()).take(pc.if_else(is_named, numbers, None))


def class_names(schema: pa.Schema) -> Mapping[str, list[str]]:
    """The class names that `datasets` writes into a file's schema, by column."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        found = {
            name: (feature.get("feature") or feature).get("names")
            for name, feature in features.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}
    return {
        name: names
        for name, names in found.items()
        if names and all(isinstance(each, str) for each in names)
    }
