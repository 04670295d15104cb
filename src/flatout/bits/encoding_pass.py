"""The second pass over records of people: each is encoded, labelled and written.

    in    records of all splits, and the survey of the first pass
    out   columns of a store: the encoding, 2-grams as targets, the plain text, row numbers

1,024 bits are 128 bytes on disk, in memory and on the bus. The plain text shows after training how
much of a record was rebuilt. Open this file to change what a store holds of a record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.bits.columns import known_numbers
from flatout.bits.encodings import Packed
from flatout.bits.grams import FIELD_END, encode_targets
from flatout.bits.source import BitSource, Record
from flatout.data.checks.seen import Advance
from flatout.data.store.store import Column, StoreWriter, smallest_token_type
from flatout.data.tables.splits import bytes_of
from flatout.errors import require

if TYPE_CHECKING:
    from flatout.bits.survey_pass import BitSurvey


class BitEncodingPass:
    """Writes the records of a source."""

    def __init__(self, source: BitSource, survey: BitSurvey) -> None:
        self.source = source
        self.survey = survey
        self.is_set = survey.numbers is not None
        self.bits_set = 0  # in all encodings of the training rows

    def write(self, writer: StoreWriter, advance: Advance) -> dict[str, dict[str, int]]:
        """Write all records.

        Return for each split the rows, and the bytes of bits or the numbers of all sets.
        """
        survey = self.survey
        splits = self.source.config.split_names(self.source.tables)
        writers = {split: writer.split(split, self._columns()) for split in splits}
        totals = {split: {"rows": 0, "tokens": 0} for split in splits}
        encode = self.source.reader()
        # A column where all records have the same bits is surely not the one that was meant.
        differ = self.is_set
        firsts = list[Packed]()
        for split, record in self.source.records(advance):
            raw = record.raw
            encoded = encode(record)
            if isinstance(encoded, tuple):
                encoded = known_numbers(encoded, survey.numbers)
                totals[split]["tokens"] += len(encoded[0])
            else:
                totals[split]["tokens"] += encoded.size
                if split == "train":
                    self.bits_set += int(np.bitwise_count(encoded).sum())
                    firsts = firsts or [*encoded[:1]]
                    differ = differ or bool(len(encoded) and (encoded != firsts[0]).any())
            grams = encode_targets(raw, survey.hashed)
            writers[split].append(
                tokens=encoded, targets=grams, texts=_text_bytes(record), rows=record.rows
            )
            totals[split]["rows"] += len(raw)
        require(
            differ or totals["train"]["rows"] < 2,
            "data.bits",
            f"every record of {self.source.name} has the same bits",
            hint="Name the column of the encodings.",
        )
        self._require_rows(totals)
        return totals

    def _columns(self) -> dict[str, Column]:
        tokens = Column("uint8", width=self.survey.num_inputs // 8)
        if self.is_set:
            tokens = Column(smallest_token_type(self.survey.num_inputs), ragged=True)
        return {
            "tokens": tokens,
            "targets": Column("uint16", ragged=True),
            "texts": Column("uint8", ragged=True),
            "rows": Column("int64"),
        }

    def _require_rows(self, totals: dict[str, dict[str, int]]) -> None:
        for split, total in totals.items():
            where = f"data.{split}" if split in self.source.tables else "data.source"
            require(
                total["rows"] > 0,
                where,
                f"no records are left for the {split} split of {self.source.name}",
                hint=(
                    f"Give more records, raise data.{split}_share, or name a file:"
                    f" data.{split}=FILE."
                ),
            )


def _text_bytes(record: Record) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """The fields of each record, lower-cased and parted, as UTF-8; and how many bytes each has."""
    parted = pc.binary_join_element_wise(*record.fields, pa.scalar(FIELD_END, pa.large_string()))
    data, bounds = bytes_of(pc.utf8_lower(parted))
    return data, np.diff(bounds).astype(np.int32)
