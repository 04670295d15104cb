"""Settings of records, and records as tables hold them: the role of each column, the split of each record.

The plain text is every column before the encoding and the one that names each record, unless settings name others;
the encoding is found by its usual names. A mistake is reported with file and row before anything is encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.bits.columns import Form, uid_of
from flatout.bits.encodings import EncodingConfig
from flatout.bits.grams import FIELD_END, raw_texts
from flatout.bits.people import PeopleConfig, PeopleTable
from flatout.data.feeding import FILES, SOURCES, FeedingConfig, require_other_files
from flatout.data.problem import Problem
from flatout.data.tables.sources import open_source
from flatout.data.tables.splits import SPLITS, assign_splits
from flatout.data.tables.table import Table, decoded, is_missing, is_text, mask_of, require_columns
from flatout.errors import UserError, require, setting


@dataclass(kw_only=True, slots=True)
class BitsDataConfig(FeedingConfig):
    """A table of people with their encodings, or one that is encoded here."""

    source: Any = setting(
        None,
        "File with the records (csv, tsv, json, jsonl, parquet, npy, hdf5); null: the built-in people. From "
        "Python also a mapping of columns, or a pandas, pyarrow or datasets table.",
        allowed=SOURCES,
        example="people.csv",
    )
    validation: Any = setting(
        None,
        "File with the validation records; null: taken from the source.",
        allowed=FILES,
        example="data.source=people.csv data.validation=more.csv",
    )
    test: Any = setting(
        None,
        "File with the test records; null: taken from the source when no validation file is given either.",
        allowed=FILES,
        example="data.source=people.csv data.test=more.csv",
    )
    columns: list[str] | None = setting(
        None,
        "Columns of plain text, in the order in which they were encoded; null: all before the bits but the uid.",
        example="[name,born]",
    )
    bits: str | None = setting(
        None,
        "Column of the encodings; null: bloomfilter, tabminhash, minhash, twostephash or bits where there is "
        "one, else the records are encoded here.",
        example="filter",
    )
    form: Form = setting(
        Form.auto,
        "How bits are written: binary (0 and 1), hex, base64, packed (bytes, lists) or numbers (sets); auto: as seen.",
    )
    uid: str = setting(
        "uid",
        "Column that names each record, else one called uid or id; it may be missing, its values may not.",
        example="id",
    )
    encoding: EncodingConfig = setting(EncodingConfig, "How records are encoded that come without bits.")
    sample: PeopleConfig = setting(PeopleConfig, "The built-in people, used when there is no source.")
    vocabulary: int = setting(4096, "Numbers of a two-step hash that have an input each, the commonest first.", least=1)
    batch_size: int = setting(256, "Records one device computes at once.", least=1)

    def __post_init__(self) -> None:
        FeedingConfig.__post_init__(self)  # a class with slots has no working super()
        require_other_files({"source": self.source, "validation": self.validation, "test": self.test}, ("source",))


KNOWN_BITS = ("bloomfilter", "tabminhash", "minhash", "twostephash", "bits")
"""Names that a column of encodings goes by; found where no setting names it."""
_ROWS_NAMED = 5
_NAME_TEXTS = "Name the columns of plain text: data.columns=[GivenName,Surname]."


@dataclass(slots=True)
class Record:
    """One block of records of one split."""

    fields: list[pa.Array]
    bits: pa.Array | None
    rows: NDArray[np.int64]
    source: str
    """Whose rows they are."""

    @property
    def raw(self) -> pa.Array:
        return raw_texts(self.fields)


class RecordSource:
    """The tables of a BitsDataConfig, read as records."""

    def __init__(self, config: BitsDataConfig) -> None:
        self.config = config
        keys = zip(SPLITS, ("source", "validation", "test"), strict=True)
        given = {split: (f"data.{key}", value) for split, key in keys if (value := getattr(config, key)) is not None}
        self.tables: dict[str, Table] = {
            split: open_source(value, where=where, reading=config.read) for split, (where, value) in given.items()
        } or {"train": PeopleTable(config.sample)}
        source = self.tables["train"]
        self.bits = self._bits_column(source)
        """Column of the encodings; None where records are encoded here."""
        self.uid = uid_of(source.columns, config.uid)
        """Column that names each record; None where there is none."""
        self.columns = self._text_columns(source)
        """Columns of plain text, in the order in which they are joined."""
        wanted = {f"data.columns[{number}]": name for number, name in enumerate(self.columns)}
        for table in self.tables.values():
            require_columns(table, {**wanted, **({"data.bits": self.bits} if self.bits else {})})

    def records(self, advance: Callable[[int], None], *, with_bits: bool = True) -> Iterator[tuple[str, Record]]:
        """Every record with the split it belongs to."""
        bits_column = self.bits if with_bits else None
        wanted = [*self.columns, bits_column] if bits_column else self.columns
        for name, table in self.tables.items():
            uid = self.uid if self.uid in table.columns and self.uid not in wanted else None
            for rows, block in table.numbered([*wanted, uid] if uid else wanted):
                if uid:
                    self._require_uids(block.column(uid), rows, table.name)
                fields = [self._text(block.column(column), column, table.name) for column in self.columns]
                bits = block.column(bits_column) if bits_column else None
                for split, mask in self._assigned(name, fields):
                    keep = pa.array(mask)
                    own = [column.filter(keep) for column in fields]
                    yield split, Record(own, None if bits is None else bits.filter(keep), rows[mask], table.name)
                advance(block.num_rows)

    def first(self) -> Record:
        """Some records whose encodings show how all are written."""
        table = self.tables["train"]
        for block in table.blocks([self.bits] if self.bits else [], rows_per_block=64):
            return Record([], block.column(self.bits), np.arange(block.num_rows), table.name)
        raise UserError("data.source", f"no records in {table.name}", hint="Name a file with records.")

    def _bits_column(self, table: Table) -> str | None:
        if self.config.bits is not None:
            require_columns(table, {"data.bits": self.config.bits})
            return self.config.bits
        found = [name for name in table.columns if name.lower() in KNOWN_BITS]
        if len(found) > 1:
            hint = f"Name one: data.bits={found[0]}."
            raise UserError("data.bits", f"{table.name} has several encodings", allowed=", ".join(found), hint=hint)
        return found[0] if found else None

    def _text_columns(self, table: Table) -> list[str]:
        """The plain text: what is named, else every column before the encoding but the uid."""
        if self.config.columns is not None:
            hint = "Name columns, or leave the setting out."
            require(bool(self.config.columns), "data.columns", "an empty list", hint=hint)
            return self.config.columns
        end = table.columns.index(self.bits) if self.bits else len(table.columns)
        found = [name for name in table.columns[:end] if name != self.uid]
        what = f"no column of {table.name} stands before the encoding"
        require(bool(found), "data.columns", what, allowed=", ".join(table.columns), hint=_NAME_TEXTS)
        return found

    def _text(self, column: pa.Array, name: str, source: str) -> pa.Array:
        column = decoded(column)
        if not (is_text(column.type) or pa.types.is_null(column.type)):
            what = f"column {name!r} of {source} holds {column.type}"
            require(pa.types.is_primitive(column.type), "data.columns", what, allowed="texts", hint=_NAME_TEXTS)
        # The character that parts fields in the store is no part of anybody's name.
        return pc.replace_substring(pc.fill_null(column.cast(pa.large_string()), ""), FIELD_END, " ")

    def _require_uids(self, uids: pa.Array, rows: NDArray[np.int64], source: str) -> None:
        without = rows[mask_of(is_missing(uids, Problem.single))]
        named = ", ".join([*(str(row + 1) for row in without[:_ROWS_NAMED]), *["…"] * (len(without) > _ROWS_NAMED)])
        hint = "Fill it in, or name another column: data.uid=COLUMN."
        require(not len(without), "data.uid", f"{source}: no {self.uid} in row {named}", hint=hint)

    def _assigned(self, name: str, fields: list[pa.Array]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
        validation_share, test_share = self.config.taken_shares(self.tables)
        if name != "train" or not (validation_share or test_share):
            yield name, np.ones(len(fields[0]), np.bool_)
            return
        seed = self.config.split_seed
        splits = assign_splits(raw_texts(fields), validation_share=validation_share, test_share=test_share, seed=seed)
        yield from ((split, splits == number) for number, split in enumerate(SPLITS) if (splits == number).any())
