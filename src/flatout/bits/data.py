"""`BitData`: a table of people as a Lightning DataModule, and how a store is made of the table.

A table has the plain text of each record, and maybe its encoding and a name of the record:

    uid  GivenName  Surname  bloomfilter      plain text "annlee" (all columns before the encoding)
    7    Ann        Lee      0110…            labels an nn le ee, encoding 0110…

Settings may name other columns. Without an encoding, records are encoded here. A mistake is
reported with file and row before anything is encoded. The source is read twice, by the block. The
first pass numbers the grams (and the numbers of a two-step hash) that the training rows hold, the
second writes. 1,024 bits are 128 bytes on disk, in memory and on the bus. Each record keeps its
encoding, its grams, and its plain text, which shows after training how much of it was rebuilt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.bits.columns import UIDS, BitColumn, Form, known_numbers, uid_of
from flatout.bits.encodings import EncodingKind, Packed, Sets
from flatout.bits.grams import (
    FIELD_END,
    LABEL_INDEX,
    LABELS,
    GramIndex,
    encode_targets,
    join_fields,
    pad_with_blanks,
    strip_punctuation,
)
from flatout.bits.info import BitInfo
from flatout.bits.people import PeopleTable
from flatout.bits.recognise import LikelyEncoding, find_encodings
from flatout.bits.settings import KNOWN_BITS, BitsDataConfig
from flatout.data.batches.store_data import StoreData
from flatout.data.checks.findings import name_few
from flatout.data.problem import Problem
from flatout.data.store.cache import Cache, Recipe
from flatout.data.store.progress import Progress
from flatout.data.store.store import SCHEMA, Column, StoreWriter, smallest_token_type
from flatout.data.tables.prints import fingerprints_of, require_unchanged
from flatout.data.tables.sources import open_source
from flatout.data.tables.splits import SPLITS, bytes_of, hash_texts, split_by_hash
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
_MOST_HASHED = 6_144
_NAME_TEXTS = "Name the columns of plain text: data.columns=[GivenName,Surname]."


class BitData(StoreData[BitsDataConfig, BitInfo]):
    """Records of people with their encodings; the labels of a record are its 2-grams.

    >>> data = BitData(source="people.csv", bits="bloomfilter", batch_size=256)  # doctest: +SKIP
    >>> trainer.fit(module, datamodule=data)  # doctest: +SKIP
    """

    settings = BitsDataConfig

    def open_store(self) -> BitInfo:
        return BitsPreparation(self.config).open()


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


class BitsPreparation:
    """From the tables of some records to a store, a stage a method."""

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
        if config.uid != UIDS[0]:
            require_columns(source, {"data.uid": config.uid})
        # column that names each record; None where there is none
        self.uid = uid_of(source.columns, config.uid)
        # column of the encodings; None where records are encoded here
        self.bits = self._bits_column(source)
        self.left_out: list[LikelyEncoding] = []  # other encodings among the plain columns
        # columns of plain text, in the order in which they are joined
        self.columns = self._text_columns(source)
        wanted = {f"data.columns[{number}]": name for number, name in enumerate(self.columns)}
        for table in self.tables.values():
            require_columns(table, {**wanted, **({"data.bits": self.bits} if self.bits else {})})

    def open(self) -> BitInfo:
        config = self.config
        cache = Cache(self.config.cache)
        source = self.tables["train"].name
        fingerprints = fingerprints_of(self.tables, cache.folder)
        validation_share, test_share = config.taken_shares(self.tables)
        recipe: Recipe = {
            "kind": "bits",
            "source": fingerprints,
            "read": config.read.facts(),
            "column": {"text": self.columns, "bits": self.bits, "uid": self.uid},
            "form": config.form.value,
            "encoding": None if self.bits else config.encoding.without_secret(),
            "vocabulary": config.vocabulary,
            "split": {
                "validation_share": validation_share,
                "test_share": test_share,
                "seed": config.split_seed,
            },
            "schema": SCHEMA,
        }
        store, report = cache.open_or_build(source, recipe, partial(self._build, fingerprints))
        return BitInfo(store=store, report=report, source=source)

    def _build(self, fingerprints: dict[str, str], writer: StoreWriter) -> None:
        with Progress() as progress:
            survey = self._survey(progress)
            writer.expected_rows = survey.num_records
            totals = self._write(writer, survey, progress)
        require_unchanged(self.tables, fingerprints, Cache(self.config.cache).folder)
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
            "splits": totals,
            "lines": self._lines(survey, totals),
        }

    def _survey(self, progress: Progress) -> _Survey:
        """First pass: count the grams, and the numbers of a two-step hash, of the training rows.

        It also checks the names of all records.
        """
        survey = _Survey()
        counts: Counter[int] = Counter()
        encode = self._reader() if self._holds_sets() else None
        for split, record in self.records(
            progress.task("reading"), with_bits=encode is not None, ids=survey.ids
        ):
            survey.num_records += len(record.rows)
            if split != "train":
                continue
            raw = record.raw
            # Texts of other alphabets hold ever more pairs: the first ones are kept.
            if len(survey.hashed) < _MOST_HASHED:
                survey.hashed.rows(pad_with_blanks(raw))
            ids, lengths = LABEL_INDEX.rows(strip_punctuation(raw))
            survey.label_counts += np.bincount(ids, minlength=len(LABELS))
            survey.num_labels += len(ids)
            survey.without_label += int((lengths == 0).sum())
            survey.num_rows += len(raw)
            if encode is not None:
                counts.update(encode(record)[0].tolist())
        survey.hashed = GramIndex(survey.hashed.names[:_MOST_HASHED], is_frozen=True)
        # A model has an input for each of the commonest numbers; the others are left out of its
        # sets. They are sorted, so that an input is found by bisection.
        if counts:
            commonest_first = sorted(counts, key=lambda number: (-counts[number], number))
            commonest = commonest_first[: self.config.vocabulary]
            survey.numbers = np.sort(np.array(commonest))
            survey.numbers_met = len(counts)
            survey.num_inputs = len(commonest)
        elif encode is None:
            encoding = self.config.encoding
            num_bits = encoding.num_bits if self.bits is None else self._column.num_bits
            survey.num_inputs = num_bits or 0
        require(
            bool(survey.num_rows),
            "data.source",
            f"no records are left for training in {self.tables['train'].name}",
            hint="Give more records, or lower data.validation_share and data.test_share.",
        )
        return survey

    def _holds_sets(self) -> bool:
        """Whether encodings are sets of numbers, as the settings or the first records show."""
        if self.bits is None:
            return self.config.encoding.kind is EncodingKind.twostep
        table = self.tables["train"]
        read = self._reader()
        for block in table.blocks([self.bits], rows_per_block=64):
            read(Record([], block.column(self.bits), np.arange(block.num_rows), table.name))
            return self._column.form is Form.numbers
        raise UserError(
            "data.source", f"no records in {table.name}", hint="Name a file with records."
        )

    def _write(
        self, writer: StoreWriter, survey: _Survey, progress: Progress
    ) -> dict[str, dict[str, int]]:
        """Second pass: write all records.

        Return for each split the rows, and the bytes of bits or the numbers of all sets.
        """
        is_set = survey.numbers is not None
        tokens = Column("uint8", width=survey.num_inputs // 8)
        if is_set:
            tokens = Column(smallest_token_type(survey.num_inputs), ragged=True)
        columns = {
            "tokens": tokens,
            "targets": Column("uint16", ragged=True),
            "texts": Column("uint8", ragged=True),
            "rows": Column("int64"),
        }
        splits = self.config.split_names(self.tables)
        writers = {split: writer.split(split, columns) for split in splits}
        totals = {split: {"rows": 0, "tokens": 0} for split in splits}
        encode = self._reader()
        # A column where all records have the same bits is surely not the one that was meant.
        differ = is_set
        firsts = list[Packed]()
        for split, record in self.records(progress.task("writing")):
            raw = record.raw
            encoded = encode(record)
            if isinstance(encoded, tuple):
                encoded = known_numbers(encoded, survey.numbers)
                totals[split]["tokens"] += len(encoded[0])
            else:
                totals[split]["tokens"] += encoded.size
                if split == "train":
                    survey.bits_set += int(np.bitwise_count(encoded).sum())
                    firsts = firsts or [*encoded[:1]]
                    differ = differ or bool(len(encoded) and (encoded != firsts[0]).any())
            # Texts are the fields of each record, lower-cased and parted, as UTF-8.
            parted = pc.binary_join_element_wise(
                *record.fields, pa.scalar(FIELD_END, pa.large_string())
            )
            data, bounds = bytes_of(pc.utf8_lower(parted))
            stored = (data, np.diff(bounds).astype(np.int32))
            grams = encode_targets(raw, survey.hashed)
            writers[split].append(tokens=encoded, targets=grams, texts=stored, rows=record.rows)
            totals[split]["rows"] += len(raw)
        require(
            differ or totals["train"]["rows"] < 2,
            "data.bits",
            f"every record of {self.tables['train'].name} has the same bits",
            hint="Name the column of the encodings.",
        )
        for split, total in totals.items():
            where = f"data.{split}" if split in self.tables else "data.source"
            require(
                total["rows"] > 0,
                where,
                f"no records are left for the {split} split of {self.tables['train'].name}",
                hint=(
                    f"Give more records, raise data.{split}_share, or name a file:"
                    f" data.{split}=FILE."
                ),
            )
        return totals

    def _reader(self) -> Callable[[Record], Packed | Sets]:
        """A function from a block of records to encodings: their bits, or those of an encoder."""
        if self.bits is None:
            encoder = self.config.encoding.build()
            return lambda record: encoder.encode(record.raw)
        column = BitColumn(self.bits, self.tables["train"].name, self.config.form)
        self._column = column

        def read(record: Record) -> Packed | Sets:
            column.source = record.source
            return column.read(record.bits, record.rows)

        return read

    def _lines(self, survey: _Survey, totals: dict[str, dict[str, int]]) -> list[str]:
        rows = totals["train"]["rows"]
        made = [split for split in totals if split not in self.tables]
        how = f" ({' and '.join(made)} taken from the source by a hash of the text)" if made else ""
        counts = ", ".join(f"{split} {total['rows']:,}" for split, total in totals.items())
        lines = [f"records: {counts}{how}", f"plain text: {', '.join(self.columns)}"]
        lines += [f"left out: column {encoding.line()}" for encoding in self.left_out]
        if survey.numbers is not None:
            about = f"sets of {totals['train']['tokens'] / rows:.0f} known numbers a record"
            about += f", {survey.num_inputs:,} of {survey.numbers_met:,} numbers kept"
        else:
            about = (
                f"{survey.bits_set / max(1, rows):.1f} of {survey.num_inputs:,} bits set on average"
            )
        lines.append(f"encoding: {self._encoding_line()}, {about}")
        seen = f"{int((survey.label_counts > 0).sum()):,} of {len(LABELS):,} seen in training"
        kept = "the first " if len(survey.hashed) == _MOST_HASHED else ""
        pairs = f"{kept}{len(survey.hashed):,} different pairs in the raw texts"
        lines.append(f"2-grams: {survey.num_labels / max(1, rows):.1f} a record, {seen}; {pairs}")
        if repeated := survey.ids.line(self.uid):
            lines.append(repeated)
        if survey.without_label:
            lines.append(
                f"{self.tables['train'].name}: {survey.without_label:,} records without a 2-gram"
                " kept"
            )
        return lines

    def _encoding_line(self) -> str:
        if self.bits is None:
            return self.config.encoding.line()
        return f"column {self.bits} of {self.tables['train'].name}, read as {self._column.form}"

    def records(
        self, advance: Callable[[int], None], *, with_bits: bool = True, ids: _Ids | None = None
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

    def _bits_column(self, table: Table) -> str | None:
        if self.config.bits is not None:
            require_columns(table, {"data.bits": self.config.bits})
            return self.config.bits
        found = [name for name in table.columns if name.lower() in KNOWN_BITS]
        if len(found) > 1:
            raise UserError(
                "data.bits",
                f"{table.name} has several encodings",
                allowed=", ".join(found),
                hint=f"Name one: data.bits={found[0]}.",
            )
        if found:
            return found[0]
        named = {self.uid, *(self.config.columns or [])}
        return self._recognised_column(table, [name for name in table.columns if name not in named])

    def _recognised_column(self, table: Table, columns: list[str]) -> str | None:
        """The one column whose values look like an encoding; a mistake if several may be meant."""
        likely = self._find_encodings(table, columns)
        encodings = [encoding for encoding in likely if not encoding.looks_random]
        if len(encodings) > 1:
            raise self._several(
                table, [encoding.line() for encoding in encodings], encodings[0].name
            )
        if encodings or not likely:
            return encodings[0].name if encodings else None
        name = likely[0].name
        what = f"column {name!r} of {table.name} looks like an encoding or like digests"
        texts = [*(self.config.columns or self._columns_before(table, None)), name]
        hint = (
            f"Name it: data.bits={name} for an encoding, data.uid={name} for an id, or for plain"
            " text"
        )
        hint += f" 'data.columns=[{','.join(dict.fromkeys(texts))}]'."
        raise UserError("data.bits", what, allowed=likely[0].line(), hint=hint)

    def _find_encodings(self, table: Table, columns: list[str]) -> list[LikelyEncoding]:
        return [] if isinstance(table, PeopleTable) else find_encodings(table, columns)

    def _several(self, table: Table, lines: list[str], first: str) -> UserError:
        return UserError(
            "data.bits",
            f"{table.name} has several columns that look like encodings",
            allowed=", ".join(lines),
            hint=(
                f"Name the encoding: data.bits={first}; name columns of plain text:"
                " data.columns=[A,B]."
            ),
        )

    def _columns_before(self, table: Table, bits: str | None) -> list[str]:
        """Every column before the encoding but the uid."""
        end = table.columns.index(bits) if bits else len(table.columns)
        return [name for name in table.columns[:end] if name != self.uid]

    def _text_columns(self, table: Table) -> list[str]:
        """The columns of plain text: those that settings name, or all before the encoding.

        The uid and other encodings are no plain text.
        """
        if self.config.columns is not None:
            require(
                bool(self.config.columns),
                "data.columns",
                "an empty list",
                hint="Name columns, or leave the setting out.",
            )
            return list(self.config.columns)
        found = self._columns_before(table, self.bits)
        others = self._find_encodings(table, found)
        if others and self.bits and self.config.bits is None:
            lines = [self.bits, *(encoding.line() for encoding in others)]
            raise self._several(table, lines, self.bits)
        self.left_out = others
        left_out = {encoding.name for encoding in others}
        found = [name for name in found if name not in left_out]
        require(
            bool(found),
            "data.columns",
            f"no column of {table.name} stands before the encoding",
            allowed=", ".join(table.columns),
            hint=_NAME_TEXTS,
        )
        return found

    def _text(self, column: pa.Array, name: str, source: str) -> pa.Array:
        column = decoded(column)
        kind = column.type
        require(
            is_text(kind) or is_plain(kind) or pa.types.is_null(kind),
            "data.columns",
            f"column {name!r} of {source} holds {kind}",
            allowed="texts",
            hint=_NAME_TEXTS,
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


class _Survey:
    """Counts of the first pass, over the training rows; `num_records`: of all splits."""

    num_records = 0
    num_rows = 0
    num_labels = 0
    without_label = 0
    num_inputs = 0
    bits_set = 0
    numbers_met = 0
    numbers: NDArray[np.int64] | None = None

    def __init__(self) -> None:
        self.hashed = GramIndex()
        self.label_counts = np.zeros(len(LABELS), dtype=np.int64)
        self.ids = _Ids()


class _Ids:
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
