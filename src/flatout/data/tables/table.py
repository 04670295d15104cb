"""Tables of any size, read in blocks and strictly as written.

A csv's values stay texts: `NA` is no missing value, `007` and `00101` keep their zeros, one missing
label does not turn the others into floats. JSON, parquet and Arrow keep their own types; a text
that looks like a date stays a text. What cannot be read is reported with file and row, never by a
reader's own error. Memory is flat. Open this file to see what a table must answer; `formats/` has
the tables of files, `sources` finds the right one.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, asdict
from itertools import chain
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from flatout.data.problem import Problem
from flatout.errors import UserError, did_you_mean, first_line, require

_COLUMNS_NAMED = 20  # of a table, in a message
_FILES_NAMED = 3
Rows = NDArray[np.int64]
Entries = list[list[str | int]]
"""For each file its name, and what a change of it changes: size, times and number."""
# part of the key of each split's random streams
SPLIT_STREAM = {"train": 0, "validation": 1, "test": 2}
_NUMBER = r"^\s*[-+]?(\d+([.,]\d*)?|[.,]\d+)([eE][-+]?\d+)?\s*$"


class SampleSettings(Protocol):
    """What the settings of every built-in sample have."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    rows: int
    eval_rows: int
    seed: int


class Table(ABC):
    """Named columns of rows, read in blocks."""

    name: str
    columns: Sequence[str]
    # the tables that this one joins, one after the other; none: the rows of one file
    tables: Sequence[Table] = ()
    decimal = "."  # what stands before the decimals of numbers that are written as texts
    dates: str | None = None  # how texts are written that are dates; None: as 2026-03-28T07:00:00
    inner: Table | None = None
    """The table whose rows this one changes while they are read: it answers for files and
    places."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes with the content and with nothing else."""

    def joined(self, prints: list[str]) -> str:
        """The fingerprint of this table, from those of its tables."""
        return prints[0]

    def entries(self) -> Entries | None:
        """The entries of its files. None where it has no files, or one has changed since it was
        opened.
        """
        return None if self.inner is None else self.inner.entries()

    @abstractmethod
    def blocks(
        self, columns: Sequence[str], rows_per_block: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        """The rows of some columns, in order."""

    def holds_numbers(self) -> bool:
        """Whether the first rows are numbers in most columns; others may be times and names."""
        first = next(iter(self.blocks(self.columns)), None)
        if first is None:
            return False
        columns = [decoded(column) for column in first.columns]
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
        """Parts of its rows that can be read alone, with `least` rows but for the last.

        `num_rows`: of the table. It must have been read once, so that rows of files are counted.
        """
        yield range(num_rows), self

    def how(self) -> str:
        """How it is written, in words; empty where there is nothing to say."""
        return "" if self.inner is None else self.inner.how()

    def locate(self, row: int) -> str:
        """A row, counted from 1, in words."""
        return f"{row}" if self.inner is None else self.inner.locate(row)

    def word_lines(self) -> Iterator[list[int]] | None:
        """For each row the lines of its words; None where a row is not written word by word."""
        return None if self.inner is None else self.inner.word_lines()

    def listed(self) -> str:
        """Its first columns, in words."""
        more = ", …" if len(self.columns) > _COLUMNS_NAMED else ""
        return f"columns: {join_names(self.columns[:_COLUMNS_NAMED])}{more}"

    def lacking(self, column: str) -> tuple[str, str]:
        """Which of several files lacks a column, and the columns there, in words."""
        return (self.name, self.listed()) if self.inner is None else self.inner.lacking(column)


def join_names(columns: Sequence[str]) -> str:
    """Names of columns in words; one without a name, such as pandas' index in a csv, is `''`."""
    return ", ".join(name or "''" for name in columns)


def changed(name: str) -> UserError:
    return UserError(
        "data",
        f"{name} changed while it was read",
        hint="Wait until it is written, then run the same command again.",
    )


def require_columns(table: Table, wanted: Mapping[str, str]) -> None:
    """Check that columns exist, once each; all that are missing are in one message.

    `wanted`: for each setting the column that it names.
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
    options = [f"{key} COLUMN" for key in missing if re.fullmatch("--[a-z]+", key)]
    if not hints and options:  # settings of a run are explained where they are found
        hints = f"Name the column: {' '.join(options)}."
    file, columns = table.lacking(next(iter(missing.values())))
    raise UserError(
        " and ".join(missing), f"no column {names} in {file}", allowed=columns, hint=hints
    )


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
    if pa.types.is_float16(values.type):
        values = values.cast(pa.float32())  # few of Arrow's functions take halves
    try:
        texts = values.cast(pa.large_string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        reason = f"no texts can be made of a column of type {values.type} ({first_line(error)})"
        raise UserError("data", reason, hint="Write its values as texts or numbers.") from None
    if not pa.types.is_floating(values.type):
        return texts
    is_whole = pc.and_(pc.equal(pc.floor(values), values), pc.less(pc.abs(values), 2.0**53))
    whole = pc.if_else(is_whole, values, pa.scalar(0, values.type)).cast(pa.int64())
    return pc.if_else(is_whole, whole.cast(pa.large_string()), texts)


def is_missing(labels: pa.Array, problem: Problem) -> pa.Array:
    """Which labels are missing: null, not a number, or white space."""
    if pa.types.is_floating(labels.type):
        return pc.is_null(labels, nan_is_null=True)
    # Of several labels a row an empty text is a list: the row has none of the classes.
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
    """One split of a built-in sample.

    Each block has a random stream of its own, so any part can be made without the others.
    """

    # name and version of the generator: while it stays, a seed always makes the same rows
    made_as: ClassVar[str]
    block_rows: ClassVar[int]

    def __init__(self, config: SampleSettings, split: str) -> None:
        require(split in SPLIT_STREAM, "split", repr(split), allowed=", ".join(SPLIT_STREAM))
        self.config: Any = config  # each sample reads settings of its own from it
        self.split = split
        self.num_rows: int = config.rows if split == "train" else config.eval_rows

    def fingerprint(self) -> str:
        settings = sorted(asdict(self.config).items())
        return xxhash.xxh3_128_hexdigest(f"{self.made_as} {self.split} {settings}".encode())

    def blocks(
        self, columns: Sequence[str], rows_per_block: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        waiting: list[pa.RecordBatch] = []
        for number in range(-(-self.num_rows // self.block_rows)):
            left = self.num_rows - number * self.block_rows
            key = [self.config.seed, (SPLIT_STREAM[self.split] << 48) + number]
            made = self._block(np.random.Generator(np.random.Philox(key=key)), columns)
            block = pa.RecordBatch.from_pydict({name: made[name] for name in columns})
            # Blocks are always made whole, so that the last one does not depend on `num_rows`.
            waiting.append(block.slice(0, left))
            is_last = left <= self.block_rows
            if is_last or sum(block.num_rows for block in waiting) >= rows_per_block:
                joined = pa.Table.from_batches(waiting).combine_chunks()
                yield from joined.to_batches(rows_per_block)
                waiting = []

    @abstractmethod
    def _block(self, random: np.random.Generator, columns: Sequence[str]) -> Mapping[str, pa.Array]:
        """Make one whole block with at least these columns.

        The values of a column do not depend on which others are asked for.
        """


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
        how = "; ".join(counts)
        if len(counts) > 1:
            how = "; ".join(f"{how} ({count})" for how, count in counts.items())
        return f"{len(self.tables)} files" + (f": {how}" if how else "")

    def fingerprint(self) -> str:
        return self.joined([table.fingerprint() for table in self.tables])

    def joined(self, prints: list[str]) -> str:
        return xxhash.xxh3_128_hexdigest("\n".join(prints).encode())

    def entries(self) -> Entries | None:
        entries: Entries = []
        for table in self.tables:
            of_table = table.entries()
            if of_table is None:
                return None
            entries += of_table
        return entries

    def locate(self, row: int) -> str:
        number = bisect_left(self._starts, row) - 1
        table = self.tables[number]
        return f"{table.name}:{table.locate(row - self._starts[number])}"

    def word_lines(self) -> Iterator[list[int]] | None:
        lines = [table.word_lines() for table in self.tables]
        whole = [lines_of_table for lines_of_table in lines if lines_of_table is not None]
        return chain.from_iterable(whole) if len(whole) == len(lines) else None

    def begins(self, number: int, row: int) -> None:
        """Note which row is the first of a file."""
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
        lacking = [table for table in self.tables if column not in table.columns]
        if len(lacking) in (0, len(self.tables)):
            return self.name, self.listed()
        names = ", ".join(table.name for table in lacking[:_FILES_NAMED])
        more = ", …" if len(lacking) > _FILES_NAMED else ""
        return f"{names}{more}, which others have", lacking[0].listed()

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
    """A block with names of classes instead of their numbers, if the schema lists the names.

    `datasets` writes such lists. Views of texts become plain texts.
    """
    for number, column in enumerate(block.columns):
        # Few of Arrow's functions take views.
        if pa.types.is_string_view(column.type):
            name = block.schema.names[number]
            block = block.set_column(number, name, column.cast(pa.large_string()))
    for name, names in class_names(schema).items():
        if name in block.schema.names:
            number = block.schema.names.index(name)
            column = block.column(number)
            if is_list(column.type):
                column = column.cast(pa.list_(column.type.value_type))
            if pa.types.is_integer(column.type):
                column = names_of(column, names)
            elif is_list(column.type) and pa.types.is_integer(column.type.value_type):
                values = names_of(column.values, names)
                lists = pa.ListArray.from_arrays(column.offsets, values)
                column = pc.if_else(column.is_valid(), lists, None)
            block = block.set_column(number, name, column)
    return block


def names_of(numbers: pa.Array, names: list[str]) -> pa.Array:
    """Class names from their numbers. A number outside the list, such as -1, is no label."""
    is_named = pc.and_(pc.greater_equal(numbers, 0), pc.less(numbers, len(names)))
    return pa.array(names, pa.large_string()).take(pc.if_else(is_named, numbers, None))


def class_names(schema: pa.Schema) -> Mapping[str, list[str]]:
    """The class names that `datasets` writes into a file's schema, by column."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names_of_columns = {}
        for column, feature in features.items():
            # The feature of a list is that of its items.
            names = (feature.get("feature") or feature).get("names")
            if names and all(isinstance(name, str) for name in names):
                "".join(names).encode()  # fails where a name holds half a character
                names_of_columns[column] = names
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return {}
    return names_of_columns
