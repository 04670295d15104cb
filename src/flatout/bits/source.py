"""The tables of people, whose columns are known: read as records, as often as it takes.

A table has the plain text of each record, and maybe its encoding and a name of the record:

    uid  GivenName  Surname  bloomfilter      plain text "annlee" (all columns before the encoding)
    7    Ann        Lee      0110…            labels an nn le ee, encoding 0110…

Settings may name other columns. Without an encoding, records are encoded here. A mistake is
reported with file and row. Open this file to change how columns are found or records are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.bits.columns import BitColumn, Form
from flatout.bits.encodings import EncodingKind, Packed, Sets
from flatout.bits.grams import FIELD_END, join_fields
from flatout.bits.people import PeopleTable
from flatout.bits.roles import NAME_TEXTS, RoleFinder
from flatout.bits.settings import BitsDataConfig
from flatout.data.checks.findings import name_few
from flatout.data.problem import Problem
from flatout.data.tables.sources import open_source
from flatout.data.tables.splits import SPLITS, hash_texts, split_by_hash
from flatout.data.tables.table import (
    Table,
    as_texts,
    decoded,
    is_missing,
    is_plain,
    is_text,
    mask_of,
    require_columns,
)
from flatout.errors import UserError, require

_ROWS_NAMED = 5


@dataclass(slots=True)
class Record:
    """One block of records of one split."""

    fields: list[pa.Array]
    bits: pa.Array | None
    rows: NDArray[np.int64]
    source: str  # whose rows they are

    @property
    def raw(self) -> pa.Array:
        return join_fields(self.fields)


class BitSource:
    """The tables that settings name, and what each of their columns is."""

    def __init__(self, config: BitsDataConfig) -> None:
        self.config = config
        self.tables: dict[str, Table] = {}
        for split, key in zip(SPLITS, ("source", "validation", "test"), strict=True):
            source = getattr(config, key)
            if source is not None:
                where = f"data.{key}"
                self.tables[split] = open_source(source, where=where, reading=config.read)
        if not self.tables:
            self.tables["train"] = PeopleTable(config.sample)
        source = self.tables["train"]
        finder = RoleFinder(config, source)
        self.uid = finder.uid
        self.bits = finder.find_bits()
        self.columns = finder.find_texts(self.bits)
        self.left_out = finder.left_out
        wanted = {f"data.columns[{number}]": name for number, name in enumerate(self.columns)}
        for table in self.tables.values():
            require_columns(table, {**wanted, **({"data.bits": self.bits} if self.bits else {})})

    @property
    def name(self) -> str:
        return self.tables["train"].name

    def reader(self) -> Callable[[Record], Packed | Sets]:
        """A function from a block of records to encodings: their bits, or those of an encoder."""
        if self.bits is None:
            encoder = self.config.encoding.build()
            return lambda record: encoder.encode(record.raw)
        column = BitColumn(self.bits, self.name, self.config.form)
        self._column = column

        def read(record: Record) -> Packed | Sets:
            column.source = record.source
            return column.read(record.bits, record.rows)

        return read

    def holds_sets(self) -> bool:
        """Whether encodings are sets of numbers, as the settings or the first records show."""
        if self.bits is None:
            return self.config.encoding.kind is EncodingKind.twostep
        table = self.tables["train"]
        read = self.reader()
        for block in table.blocks([self.bits], rows_per_block=64):
            read(Record([], block.column(self.bits), np.arange(block.num_rows), table.name))
            return self._column.form is Form.numbers
        raise UserError(
            "data.source", f"no records in {table.name}", hint="Name a file with records."
        )

    @property
    def form(self) -> Form:
        """How the encodings are written; known when the first of them were read."""
        return self._column.form if self.bits else Form.auto

    @property
    def num_bits(self) -> int | None:
        """Bits of each encoding; of a column known when the first of them were read."""
        return self.config.encoding.num_bits if self.bits is None else self._column.num_bits

    def encoding_line(self) -> str:
        """What the encodings are, in words."""
        if self.bits is None:
            return self.config.encoding.line()
        return f"column {self.bits} of {self.name}, read as {self._column.form}"

    def records(
        self,
        advance: Callable[[int], None],
        *,
        with_bits: bool = True,
        ids: RepeatedIds | None = None,
    ) -> Iterator[tuple[str, Record]]:
        """Every record with the split it belongs to; the names of records are noted in `ids`."""
        bits_column = self.bits if with_bits else None
        wanted = [*self.columns, bits_column] if bits_column else self.columns
        for name, table in self.tables.items():
            uid = self.uid if self.uid in table.columns and self.uid not in wanted else None
            for rows, block in table.numbered([*wanted, uid] if uid else wanted):
                if uid:
                    self._require_uids(block.column(uid), rows, table.name)
                    if ids is not None:
                        ids.add(block.column(uid), rows, table.name)
                fields = [
                    self._text(block.column(column), column, table.name) for column in self.columns
                ]
                bits = block.column(bits_column) if bits_column else None
                for split, is_of_split in self._assign_splits(name, fields):
                    mask = pa.array(is_of_split)
                    fields_of_split = [column.filter(mask) for column in fields]
                    bits_of_split = None if bits is None else bits.filter(mask)
                    rows_of_split = rows[is_of_split]
                    record = Record(fields_of_split, bits_of_split, rows_of_split, table.name)
                    yield split, record
                advance(block.num_rows)

    def _text(self, column: pa.Array, name: str, source: str) -> pa.Array:
        column = decoded(column)
        kind = column.type
        require(
            is_text(kind) or is_plain(kind) or pa.types.is_null(kind),
            "data.columns",
            f"column {name!r} of {source} holds {kind}",
            allowed="texts",
            hint=NAME_TEXTS,
        )
        texts = pc.fill_null(column.cast(pa.large_string()), "")
        # The character that parts fields in the store would part a name in two.
        return pc.replace_substring(texts, FIELD_END, " ")

    def _require_uids(self, uids: pa.Array, rows: NDArray[np.int64], source: str) -> None:
        without = rows[mask_of(is_missing(uids, Problem.single))]
        named = [str(row + 1) for row in without]
        require(
            not named,
            "data.uid",
            f"{source}: no {self.uid} in row {name_few(named, _ROWS_NAMED)}",
            hint="Fill it in, or name another column: data.uid=COLUMN.",
        )

    def _assign_splits(
        self, name: str, fields: list[pa.Array]
    ) -> Iterator[tuple[str, NDArray[np.bool_]]]:
        validation_share, test_share = self.config.taken_shares(self.tables)
        if name != "train" or not (validation_share or test_share):
            yield name, np.ones(len(fields[0]), np.bool_)
            return
        hashes = hash_texts(join_fields(fields), self.config.split_seed)
        splits = split_by_hash(hashes, validation_share=validation_share, test_share=test_share)
        for number, split in enumerate(SPLITS):
            is_of_split = splits == number
            if is_of_split.any():
                yield split, is_of_split


class RepeatedIds:
    """The ids of all records as 64-bit hashes, and their rows: sixteen bytes each."""

    def __init__(self) -> None:
        self._hashes: list[NDArray[np.uint64]] = []
        # of each block its table and its rows
        self._blocks: list[tuple[str, NDArray[np.int64]]] = []

    def add(self, ids: pa.Array, rows: NDArray[np.int64], source: str) -> None:
        self._hashes.append(hash_texts(as_texts(decoded(ids))))
        self._blocks.append((source, rows))

    def line(self, uid: str | None) -> str:
        """A warning if an id stands in several records, with two of the rows; else empty."""
        if not self._hashes:
            return ""
        hashes = np.concatenate(self._hashes)
        _, which, counts = np.unique(hashes, return_inverse=True, return_counts=True)
        is_repeated = counts[which] > 1
        if not is_repeated.any():
            return ""
        first = int(is_repeated.argmax())
        second = first + 1 + int((hashes[first + 1 :] == hashes[first]).argmax())
        rows = f"{self._name_record(first)} and {self._name_record(second)}"
        num_ids = int((counts > 1).sum())
        several = "one id names" if num_ids == 1 else f"{num_ids:,} ids name"
        return (
            f"warning column {uid}: {several} several records ({rows}), and answers are joined"
            " by it"
        )

    def _name_record(self, number: int) -> str:
        """A record, counted from 0 over all tables, in words."""
        for source, rows in self._blocks:
            if number < len(rows):
                return f"{source} row {rows[number] + 1}"
            number -= len(rows)
        raise IndexError(number)
