"""`BitData`: a table of people as a Lightning DataModule.

Records are encoded, or read as bits, with the 2-grams of each one as labels, into a store.

Two passes over the source, by the block: the first numbers the grams (and the numbers of a two-step hash) that the
training rows hold, the second writes. 1,024 bits are 128 bytes on disk, in memory and on the bus. Each record keeps
three things: its encoding, its grams, and its plain text, which shows after training how much of it was rebuilt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.bits.columns import BitColumn, Form, known_numbers
from flatout.bits.data import KNOWN_BITS, BitsDataConfig, Record, RecordSource
from flatout.bits.encodings import EncodingKind, Packed, Sets
from flatout.bits.grams import FIELD_END, LABELS, GramIndex, label_index, padded, plain_texts, targets_of
from flatout.bits.info import BitInfo
from flatout.data.store.cache import Cache, Recipe
from flatout.data.store.progress import Progress
from flatout.data.store.store import SCHEMA, Column, StoreWriter
from flatout.data.store_data import StoreData
from flatout.data.tables.prints import fingerprints_of, require_unchanged
from flatout.data.tables.splits import bytes_of
from flatout.errors import UserError, require

_MOST_HASHED = 6_144


class BitData(StoreData[BitsDataConfig, BitInfo]):
    """Records of people with their encodings, or encoded here; the 2-grams of a record are its labels.

    >>> data = BitData(source="people.csv", bits="bloomfilter", batch_size=256)  # doctest: +SKIP
    >>> trainer.fit(module, datamodule=data)  # doctest: +SKIP
    """

    settings = BitsDataConfig

    def open_store(self) -> BitInfo:
        return BitsPreparation(self.config).open()


class BitsPreparation(RecordSource):
    """From the tables of some records to a store, a stage a method."""

    def open(self) -> BitInfo:
        """The store, built where it is missing."""
        source, recipe = self.tables["train"].name, self._recipe()
        store, report = Cache(self.config.cache).open_or_build(source, recipe, partial(self._build, recipe["source"]))
        return BitInfo(store=store, report=report, source=source)

    def _recipe(self) -> Recipe:
        config, (validation_share, test_share) = self.config, self.config.taken_shares(self.tables)
        return {
            "kind": "bits",
            "source": fingerprints_of(self.tables, Cache(self.config.cache).folder),
            "read": asdict(config.read),
            "column": {"text": self.columns, "bits": self.bits, "uid": self.uid},
            "form": config.form.value,
            "encoding": None if self.bits else config.encoding.without_secret(),
            "vocabulary": config.vocabulary,
            "split": {"validation_share": validation_share, "test_share": test_share, "seed": config.split_seed},
            "schema": SCHEMA,
        }

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
        """First pass: the grams, and the numbers of a two-step hash, that training rows hold; uids are checked."""
        survey = _Survey()
        counts: Counter[int] = Counter()
        encode = self._reader() if self._holds_sets() else None
        for split, record in self.records(progress.task("reading"), with_bits=encode is not None):
            survey.num_records += len(record.rows)
            if split != "train":
                continue
            raw = record.raw
            if len(survey.hashed) < _MOST_HASHED:
                survey.hashed.rows(padded(raw))
            ids, lengths = label_index().rows(plain_texts(raw))
            survey.label_counts += np.bincount(ids, minlength=len(LABELS))
            survey.num_labels += len(ids)
            survey.without_label += int((lengths == 0).sum())
            survey.num_rows += len(raw)
            if encode is not None:
                found, times = np.unique(encode(record)[0], return_counts=True)
                counts.update(dict(zip(found.tolist(), times.tolist(), strict=True)))
        survey.hashed = GramIndex(survey.hashed.names[:_MOST_HASHED], is_frozen=True)
        if counts:
            commonest = sorted(counts, key=lambda number: (-counts[number], number))[: self.config.vocabulary]
            survey.numbers, survey.numbers_met = np.sort(np.array(commonest)), len(counts)
            survey.num_inputs = len(commonest)
        elif encode is None:
            survey.num_inputs = self.config.encoding.num_bits if self.bits is None else self._column.num_bits or 0
        what = f"no records are left for training in {self.tables['train'].name}"
        hint = "Give more records, or lower data.validation_share and data.test_share."
        require(bool(survey.num_rows), "data.source", what, hint=hint)
        return survey

    def _holds_sets(self) -> bool:
        """Whether encodings are sets of numbers, read off the first records where no setting says so."""
        if self.bits is None:
            return self.config.encoding.kind is EncodingKind.twostep
        self._reader()(self.first())
        return self._column.form is Form.numbers

    def _write(self, writer: StoreWriter, survey: _Survey, progress: Progress) -> dict[str, dict[str, int]]:
        """Second pass, over all records; of each split its rows, and its bytes of bits or numbers of sets."""
        is_set = survey.numbers is not None
        tokens = Column("uint16", ragged=True) if is_set else Column("uint8", width=survey.num_inputs // 8)
        targets, texts = Column("uint16", ragged=True), Column("uint8", ragged=True)
        columns = {"tokens": tokens, "targets": targets, "texts": texts, "rows": Column("int64")}
        writers = {split: writer.split(split, columns) for split in self.config.split_names(self.tables)}
        totals = {split: {"rows": 0, "tokens": 0} for split in writers}
        encode = self._reader()
        for split, record in self.records(progress.task("writing")):
            raw = record.raw
            encoding = encode(record)
            encoded = known_numbers(encoding, survey.numbers) if isinstance(encoding, tuple) else encoding
            # Texts are the fields of each record, lower-cased and parted, as UTF-8.
            parted = pc.binary_join_element_wise(*record.fields, pa.scalar(FIELD_END, pa.large_string()))
            data, bounds = bytes_of(pc.utf8_lower(parted))
            stored = data[bounds[0] : bounds[-1]], np.diff(bounds).astype(np.int32)
            writers[split].append(
                tokens=encoded, targets=targets_of(raw, survey.hashed), texts=stored, rows=record.rows
            )
            totals[split]["rows"] += len(raw)
            totals[split]["tokens"] += len(encoded[0]) if isinstance(encoded, tuple) else encoded.size
            if split == "train" and not is_set:
                survey.bits_set += int(np.bitwise_count(encoded).sum())
        for split, total in totals.items():
            if total["rows"] == 0:
                where = f"data.{split}" if split in self.tables else "data.source"
                what = f"no records are left for the {split} split of {self.tables['train'].name}"
                hint = f"Give more records, raise data.{split}_share, or name a file: data.{split}=FILE."
                raise UserError(where, what, hint=hint)
        return totals

    def _reader(self) -> Callable[[Record], Packed | Sets]:
        """What turns a block of records into encodings: the bits they came with, or an encoder."""
        if self.bits is None:
            encoder = self.config.encoding.build()
            return lambda record: encoder.encode(record.raw)
        self._column = column = BitColumn(self.bits, self.tables["train"].name, self.config.form)

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
        if survey.numbers is not None:
            about = f"sets of {totals['train']['tokens'] / rows:.0f} known numbers a record"
            about += f", {survey.num_inputs:,} of {survey.numbers_met:,} numbers kept"
        else:
            about = f"{survey.bits_set / max(1, rows):.1f} of {survey.num_inputs:,} bits set on average"
        lines.append(f"encoding: {self._encoding_line()}, {about}")
        seen = f"{int((survey.label_counts > 0).sum()):,} of {len(LABELS):,} seen in training"
        kept = "the first " if len(survey.hashed) == _MOST_HASHED else ""
        pairs = f"{kept}{len(survey.hashed):,} different pairs in the raw texts"
        lines.append(f"2-grams: {survey.num_labels / max(1, rows):.1f} a record, {seen}; {pairs}")
        if survey.without_label:
            lines.append(f"{self.tables['train'].name}: {survey.without_label:,} records without a 2-gram kept")
        return lines

    def _encoding_line(self) -> str:
        if self.bits is None:
            return self.config.encoding.line()
        return f"column {self.bits} of {self.tables['train'].name}, read as {self._column.form}"


class _Survey:
    """What the first pass found in the training rows; `num_records` are those of all splits."""

    num_records = num_rows = num_labels = without_label = num_inputs = bits_set = numbers_met = 0
    numbers: NDArray[np.int64] | None = None

    def __init__(self) -> None:
        self.hashed, self.label_counts = GramIndex(), np.zeros(len(LABELS), dtype=np.int64)
