"""A table of people, made ready: encoded or read as bits, with the 2-grams of each record as labels, in a store.

Two passes over the source, by the block: the first numbers the grams (and the numbers of a two-step hash) that the
training rows hold, the second writes. 1,024 bits are 128 bytes on disk, in memory and on the bus. Each record keeps
three things: its encoding, its grams, and its plain text, which tells after training how much of it was found out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.bits.columns import BitColumn, Form
from flatout.bits.encodings import EncodingConfig, EncodingKind, Packed, Sets, padded
from flatout.bits.grams import LABELS, GramIndex, Rows, label_index, plain_texts, raw_texts
from flatout.bits.people import PeopleConfig, PeopleTable
from flatout.data.cache import Cache, CacheReport, Recipe
from flatout.data.feeding import SPLITS, FeedingConfig, require_other_files
from flatout.data.progress import Progress
from flatout.data.splits import assign_splits
from flatout.data.store import SCHEMA, Column, Store, StoreSplit, StoreWriter
from flatout.data.table import Table, open_table, require_columns, table_of
from flatout.errors import UserError, as_choice, require

KNOWN_BITS = ("bloomfilter", "tabminhash", "minhash", "twostephash", "bits")
"""Names that a column of encodings goes by; found where nobody says."""
FIELD_END = "\x1f"
"""Stands between the fields of a stored text."""
_MOST_HASHED = 6_144
_ROWS_NAMED = 5


@dataclass(kw_only=True, slots=True)
class BitsDataConfig(FeedingConfig):
    """A table of people with their encodings, or one that is encoded here."""

    source: Any = None
    """File with the records (csv, tsv, json, jsonl, parquet, npy, hdf5); null: the built-in people.
    From Python also a mapping of columns, or a pandas, pyarrow or datasets table."""
    validation: Any = None
    """File with the validation records; null: taken from the source."""
    test: Any = None
    """File with the test records; null: taken from the source when no validation file is given either."""
    columns: list[str] | None = None
    """Columns of plain text, in the order in which they were encoded; null: all before the bits and the uid."""
    bits: str | None = None
    """Column of the encodings; null: bloomfilter, tabminhash, minhash, twostephash or bits where there is one,
    else the records are encoded here."""
    form: Form = Form.auto
    """How bits are written: binary (0 and 1), hex, base64, packed (bytes, lists) or numbers (sets); auto: as seen."""
    uid: str = "uid"
    """Column that names each record; it may be missing, its values may not."""
    encoding: EncodingConfig = field(default_factory=EncodingConfig)
    """How records are encoded that come without bits."""
    sample: PeopleConfig = field(default_factory=PeopleConfig)
    """The built-in people, used when there is no source."""
    vocabulary: int = 4_096
    """Numbers of a two-step hash that are told apart, the commonest first."""
    batch_size: int = 256
    """Records one device computes at once."""

    def __post_init__(self) -> None:
        FeedingConfig.__post_init__(self)  # a class with slots has no working super()
        self.form = as_choice(Form, self.form, "data.form")
        require(self.vocabulary >= 1, "data.vocabulary", f"{self.vocabulary}", allowed="1 or more")
        require_other_files("source", self.source, {"validation": self.validation, "test": self.test})

    def prepare(self) -> PreparedBits:
        """Open the store of these records, building it first when there is none."""
        return BitsPreparation(self).run()


@dataclass(frozen=True, slots=True)
class PreparedBits:
    """Records that are ready to train on."""

    store: Store
    report: CacheReport
    source: str

    @property
    def facts(self) -> dict[str, Any]:
        return self.store.facts

    @property
    def is_set(self) -> bool:
        """Whether an encoding is a set of numbers rather than bits."""
        return bool(self.facts["is_set"])

    @property
    def num_inputs(self) -> int:
        """Bits of a record, or numbers that are told apart."""
        return int(self.facts["num_inputs"])

    @property
    def hashed(self) -> list[str]:
        """Every gram of the raw training texts: what the encoder took in, as far as training rows tell."""
        return list(self.facts["hashed"])

    def texts(self, split: str) -> pa.Array:
        """Raw texts of a split, fields parted by FIELD_END."""
        return stored_texts(self.store.splits[split])

    def summary(self) -> dict[str, Any]:
        """What `summary.json` says of the data."""
        splits = self.facts["splits"]
        lengths = splits["train"]["tokens"] / max(1, splits["train"]["rows"])
        return {
            "rows": {name: counts["rows"] for name, counts in splits.items()},
            "classes": len(LABELS),
            "tokens": splits["train"]["tokens"],
            "mean_length": lengths,
            "truncated_rows": 0,
        }


def stored_texts(split: StoreSplit) -> pa.Array:
    column = split.ragged("texts")
    buffers = [None, pa.py_buffer(np.ascontiguousarray(column.offsets)), pa.py_buffer(column.values)]
    return pa.Array.from_buffers(pa.large_string(), split.num_rows, buffers)


@dataclass(slots=True)
class Record:
    """One block of records of one split."""

    fields: list[pa.Array]
    bits: pa.Array | None
    rows: NDArray[np.int64]

    @property
    def raw(self) -> pa.Array:
        return raw_texts(self.fields)


class BitsPreparation:
    """From a BitsDataConfig to a store, a stage a method."""

    def __init__(self, config: BitsDataConfig) -> None:
        self.config = config
        self.tables = self._open_tables()
        source = self.tables["train"]
        self.bits = self._bits_column(source)
        self.columns = self._text_columns(source)
        self.has_uid = config.uid in source.columns
        wanted = {f"data.columns[{number}]": name for number, name in enumerate(self.columns)}
        for table in self.tables.values():
            require_columns(table, {**wanted, **({"data.bits": self.bits} if self.bits else {})})

    def run(self) -> PreparedBits:
        cache = Cache(self.config.cache)
        source = self.tables["train"].name
        store, report = cache.open_or_build(source, self._recipe(), self._build)
        return PreparedBits(store, report, source)

    def _open_tables(self) -> dict[str, Table]:
        config = self.config
        if config.source is None:
            return {"train": PeopleTable(config.sample)}
        tables: dict[str, Table] = {}
        for split, given in zip(SPLITS, (config.source, config.validation, config.test), strict=True):
            if given is not None:
                where = f"data.{'source' if split == 'train' else split}"
                is_path = isinstance(given, str | Path)
                tables[split] = open_table(given, where=where) if is_path else table_of(given, where=where)
        return tables

    def _bits_column(self, table: Table) -> str | None:
        if self.config.bits is not None:
            require_columns(table, {"data.bits": self.config.bits})
            return self.config.bits
        found = [name for name in table.columns if name.lower() in KNOWN_BITS]
        if len(found) > 1:
            raise UserError("data.bits", f"{table.name} has several encodings", allowed=", ".join(found))
        return found[0] if found else None

    def _text_columns(self, table: Table) -> list[str]:
        """The plain text: what is named, else every column before the encoding and the uid."""
        if self.config.columns is not None:
            require(bool(self.config.columns), "data.columns", "an empty list", allowed="one or more columns")
            return list(self.config.columns)
        ends = [table.columns.index(name) for name in (self.bits, self.config.uid) if name in table.columns]
        found = list(table.columns[: min(ends)]) if ends else list(table.columns)
        if not found:
            listed = ", ".join(table.columns)
            mend = "Name the columns of plain text: data.columns=[GivenName,Surname]."
            raise UserError(
                "data.columns", f"no column of {table.name} stands before the encoding", allowed=listed, mend=mend
            )
        return found

    def _recipe(self) -> Recipe:
        config = self.config
        validation_share, test_share = self.config.taken_shares(self.tables)
        return {
            "kind": "bits",
            "source": {split: table.fingerprint() for split, table in self.tables.items()},
            "column": {"text": self.columns, "bits": self.bits, "uid": config.uid if self.has_uid else None},
            "form": config.form.value,
            "encoding": None if self.bits else asdict(config.encoding),
            "vocabulary": config.vocabulary,
            "split": {"validation_share": validation_share, "test_share": test_share, "seed": config.split_seed},
            "schema": SCHEMA,
        }

    def _build(self, writer: StoreWriter) -> None:
        with Progress() as progress:
            survey = self._survey(progress)
            totals = self._write(writer, survey, progress)
        writer.facts |= {
            "classes": list(LABELS),
            "class_counts": survey.label_counts.tolist(),
            "hashed": survey.hashed.names,
            "is_set": survey.numbers is not None,
            "numbers": [] if survey.numbers is None else survey.numbers.tolist(),
            "num_inputs": survey.num_inputs,
            "columns": self.columns,
            "about": self._encoding_line(),
            "bits_column": self.bits or KNOWN_BITS[0],
            "form": self._column.form.value if self.bits else Form.auto.value,
            "encoding": None
            if self.bits
            else {name: value for name, value in asdict(self.config.encoding).items() if name != "secret"},
            "splits": {split: asdict(total) for split, total in totals.items()},
            "lines": self._lines(survey, totals),
        }

    def _survey(self, progress: Progress) -> _Survey:
        """First pass: the grams, and the numbers of a two-step hash, that training rows hold; uids are checked."""
        survey = _Survey()
        labels = label_index()
        counts: dict[int, int] = {}
        encode = self._reader() if self._holds_sets() else None
        for split, record in self._records(progress.task("reading"), with_bits=encode is not None):
            if split != "train":
                continue
            raw = record.raw
            if len(survey.hashed) < _MOST_HASHED:
                survey.hashed.rows(padded(raw))
            ids, lengths = labels.rows(plain_texts(raw))
            survey.label_counts += np.bincount(ids, minlength=len(LABELS))
            survey.num_labels += len(ids)
            survey.without_label += int((lengths == 0).sum())
            survey.num_rows += len(raw)
            if encode is not None:
                found, times = np.unique(encode(record)[0], return_counts=True)
                for number, count in zip(found.tolist(), times.tolist(), strict=True):
                    counts[number] = counts.get(number, 0) + count
        survey.hashed = GramIndex(survey.hashed.names[:_MOST_HASHED], is_frozen=True)
        if counts:
            commonest = sorted(counts, key=lambda number: (-counts[number], number))[: self.config.vocabulary]
            survey.numbers, survey.numbers_met = np.sort(np.array(commonest)), len(counts)
            survey.num_inputs = len(commonest)
        elif encode is None:
            survey.num_inputs = self._num_bits()
        if not survey.num_rows:
            raise UserError("data.source", f"no records are left for training in {self.tables['train'].name}")
        return survey

    def _holds_sets(self) -> bool:
        """Whether encodings are sets of numbers, read off the first records where nobody said so."""
        if self.bits is None:
            return self.config.encoding.kind is EncodingKind.twostep
        self._reader()(self._first_records())
        return self._column.is_set

    def _num_bits(self) -> int:
        """Bits of every record."""
        if self.bits is None:
            return self.config.encoding.size >> self.config.encoding.fold
        return self._column.num_bits or 0

    def _first_records(self) -> Record:
        """Some records whose encodings show how all are written."""
        for block in self.tables["train"].blocks([self.bits] if self.bits else [], rows_per_block=64):
            return Record([], block.column(self.bits), np.arange(block.num_rows))
        raise UserError("data.source", f"no records in {self.tables['train'].name}")

    def _write(self, writer: StoreWriter, survey: _Survey, progress: Progress) -> dict[str, _Totals]:
        """Second pass: every record of every split."""
        is_set = survey.numbers is not None
        tokens = Column("uint16", ragged=True) if is_set else Column("uint8", width=survey.num_inputs // 8)
        columns = {
            "tokens": tokens,
            "targets": Column("uint16", ragged=True),
            "texts": Column("uint8", ragged=True),
            "rows": Column("int64"),
        }
        writers = {split: writer.split(split, columns) for split in self.config.split_names(self.tables)}
        totals = {split: _Totals() for split in writers}
        encode = self._reader()
        for split, record in self._records(progress.task("writing")):
            raw = record.raw
            encoding = encode(record)
            encoded = known_numbers(encoding, survey.numbers) if isinstance(encoding, tuple) else encoding
            targets = targets_of(raw, survey.hashed)
            writers[split].append(tokens=encoded, targets=targets, texts=_text_bytes(record.fields), rows=record.rows)
            totals[split].add(len(raw), encoded)
            if split == "train" and not is_set:
                survey.bits_set += int(np.bitwise_count(encoded).sum())
        for split, total in totals.items():
            if total.rows == 0:
                where = "data.source" if split not in self.tables or split == "train" else f"data.{split}"
                raise UserError(where, f"no records are left for the {split} split of {self.tables['train'].name}")
        return totals

    def _reader(self) -> Callable[[Record], Packed | Sets]:
        """What turns a block of records into encodings: the bits they came with, or an encoder."""
        if self.bits is None:
            encoder = self.config.encoding.build()
            return lambda record: encoder.encode(record.raw)
        self._column = column = BitColumn(self.bits, self.tables["train"].name, self.config.form)
        return lambda record: column.read(record.bits, record.rows)

    def _records(self, told: Callable[[int], None], *, with_bits: bool = True) -> Iterator[tuple[str, Record]]:
        """Every record with the split it belongs to."""
        bits_column = self.bits if with_bits else None
        wanted = [*self.columns, *([bits_column] if bits_column else [])]
        for name, table in self.tables.items():
            first_row = 0
            asked = [*wanted, *([self.config.uid] if self.has_uid and self.config.uid in table.columns else [])]
            for block in table.blocks(asked):
                rows = np.arange(first_row, first_row + block.num_rows)
                first_row += block.num_rows
                if self.config.uid in block.schema.names:
                    self._require_uids(block.column(self.config.uid), rows, table.name)
                fields = [self._text(block.column(column), column, table.name) for column in self.columns]
                bits = block.column(bits_column) if bits_column else None
                for split, mask in self._assigned(name, fields):
                    if mask is None:
                        yield split, Record(fields, bits, rows)
                    else:
                        keep = pa.array(mask)
                        kept = [column.filter(keep) for column in fields]
                        yield split, Record(kept, None if bits is None else bits.filter(keep), rows[mask])
                told(block.num_rows)

    def _text(self, column: pa.Array, name: str, source: str) -> pa.Array:
        kind = column.type
        if pa.types.is_dictionary(kind):
            column = column.dictionary_decode()
        elif not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)):
            if not pa.types.is_primitive(kind):
                raise UserError("data.columns", f"column {name!r} of {source} holds {kind}", allowed="texts")
            column = column.cast(pa.string())
        # The character that parts fields in the store is no part of anybody's name.
        return pc.replace_substring(pc.fill_null(column.cast(pa.large_string()), ""), FIELD_END, " ")

    def _require_uids(self, uids: pa.Array, rows: NDArray[np.int64], source: str) -> None:
        missing = pc.is_null(uids, nan_is_null=True)
        if pa.types.is_string(uids.type) or pa.types.is_large_string(uids.type):
            missing = pc.or_(missing, pc.equal(pc.utf8_trim_whitespace(pc.fill_null(uids, "")), ""))
        if (without := np.flatnonzero(missing.to_numpy(zero_copy_only=False))).size:
            named = ", ".join(str(row + 1) for row in rows[without[:_ROWS_NAMED]])
            more = ", …" if len(without) > _ROWS_NAMED else ""
            mend = "Fill it in, or name another column: data.uid=COLUMN."
            raise UserError("data.uid", f"{source}: no {self.config.uid} in row {named}{more}", mend=mend)

    def _assigned(self, name: str, fields: list[pa.Array]) -> Iterator[tuple[str, NDArray[np.bool_] | None]]:
        validation_share, test_share = self.config.taken_shares(self.tables)
        if name != "train" or not (validation_share or test_share):
            yield name, None
            return
        seed = self.config.split_seed
        splits = assign_splits(raw_texts(fields), validation_share=validation_share, test_share=test_share, seed=seed)
        for number, split in enumerate(SPLITS):
            if (mask := splits == number).any():
                yield split, mask

    def _lines(self, survey: _Survey, totals: dict[str, _Totals]) -> list[str]:
        """What a person should know of the records."""
        rows = totals["train"].rows
        made = [split for split in totals if split not in self.tables]
        how = f" ({' and '.join(made)} taken from the source by a hash of the text)" if made else ""
        counts = ", ".join(f"{split} {total.rows:,}" for split, total in totals.items())
        seen = int((survey.label_counts > 0).sum())
        lines = [f"records: {counts}{how}", f"plain text: {', '.join(self.columns)}"]
        if survey.numbers is not None:
            about = f"sets of {totals['train'].tokens / rows:.0f} known numbers a record"
            met = f"{survey.num_inputs:,} of {survey.numbers_met:,} numbers told apart"
            lines.append(f"encoding: {self._encoding_line()}, {about}, {met}")
        else:
            mean = survey.bits_set / max(1, rows)
            lines.append(f"encoding: {self._encoding_line()}, {mean:.1f} of {survey.num_inputs:,} bits set on average")
        labels = f"{survey.num_labels / max(1, rows):.1f} a record, {seen:,} of {len(LABELS):,} seen in training"
        lines.append(f"2-grams: {labels}; {len(survey.hashed):,} different pairs in the raw texts")
        if survey.without_label:
            lines.append(f"{self.tables['train'].name}: {survey.without_label:,} records without a 2-gram kept")
        return lines

    def _encoding_line(self) -> str:
        if self.bits is None:
            return self.config.encoding.line()
        return f"column {self.bits} of {self.tables['train'].name}, read as {self._column.form}"


class _Survey:
    """What the first pass found in the training rows."""

    def __init__(self) -> None:
        self.hashed = GramIndex()
        self.label_counts = np.zeros(len(LABELS), dtype=np.int64)
        self.num_rows = self.num_labels = self.without_label = self.num_inputs = self.bits_set = self.numbers_met = 0
        self.numbers: NDArray[np.int64] | None = None


@dataclass(slots=True)
class _Totals:
    """What the records of one split add up to."""

    rows: int = 0
    tokens: int = 0
    """Bytes of bits, or numbers of sets."""

    def add(self, rows: int, encoded: Packed | Sets) -> None:
        self.rows += rows
        self.tokens += len(encoded[0]) if isinstance(encoded, tuple) else encoded.size


def known_numbers(encoding: Sets, numbers: NDArray[np.int64] | None) -> Sets:
    """Numbers as places in the sorted list of known ones; unknown ones are left out."""
    values, lengths = encoding
    if numbers is None:
        raise UserError("data.source", "no training record has a number in its set")
    places = np.minimum(np.searchsorted(numbers, values), len(numbers) - 1)
    is_known = numbers[places] == values
    row = np.repeat(np.arange(len(lengths)), lengths)[is_known]
    return places[is_known].astype(np.int32), np.bincount(row, minlength=len(lengths)).astype(np.int32)


def targets_of(raw: pa.Array, hashed: GramIndex) -> Rows:
    """Targets as the store keeps them: answers first, then hashed grams, numbered after each other."""
    ids, lengths = hashed.rows(padded(raw))
    return joined_rows(label_index().rows(plain_texts(raw)), (ids + len(LABELS), lengths))


def joined_rows(first: Rows, second: Rows) -> Rows:
    """Two ragged columns as one: each row's ids of the first, then of the second."""
    (first_ids, first_lengths), (second_ids, second_lengths) = first, second
    lengths = first_lengths + second_lengths
    ends = np.cumsum(lengths, dtype=np.int64)
    ids = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.int32)
    is_first = np.zeros(len(ids), dtype=np.bool_)
    starts = np.repeat(ends - lengths, first_lengths)
    within = np.arange(len(first_ids)) - np.repeat(np.cumsum(first_lengths) - first_lengths, first_lengths)
    is_first[starts + within] = True
    ids[is_first], ids[~is_first] = first_ids, second_ids
    return ids, lengths.astype(np.int32)


def _text_bytes(fields: list[pa.Array]) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """The fields of each record, lower-cased and parted by FIELD_END, as UTF-8."""
    texts = pc.utf8_lower(pc.binary_join_element_wise(*fields, pa.scalar(FIELD_END, pa.large_string())))
    bounds = np.frombuffer(texts.buffers()[1], dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    data = texts.buffers()[2]
    values = np.frombuffer(data, dtype=np.uint8)[bounds[0] : bounds[-1]] if data else np.empty(0, np.uint8)
    return values, np.diff(bounds).astype(np.int32)
