"""A table of plain records with their encoding as one more column."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from flatout.bits.columns import Form, write_bits, write_sets
from flatout.bits.encodings import EncodingConfig, EncodingKind
from flatout.bits.grams import raw_texts
from flatout.data.tables.table import Table

COLUMN = {EncodingKind.bloom: "bloomfilter", EncodingKind.minhash: "minhash", EncodingKind.twostep: "twostephash"}
"""Name of the column that each encoding is written to."""


def encoded(
    table: Table, columns: list[str], config: EncodingConfig, form: Form, *, uid: str, drops_text: bool
) -> Iterator[pa.RecordBatch]:
    """The table's blocks with the encoding before the uid, or at the end where there is none."""
    encoder, name = config.build(), COLUMN[config.kind]
    kept = [column for column in table.columns if column != name and (not drops_text or column == uid)]
    wanted = list(dict.fromkeys([*columns, *kept]))
    place = kept.index(uid) if uid in kept else len(kept)
    for block in table.blocks(wanted):
        fields = [pc.cast(block.column(column), pa.large_string()) for column in columns]
        made = encoder.encode(raw_texts(fields))
        column = write_sets(*made) if isinstance(made, tuple) else write_bits(made, form)
        arrays = [block.column(other) for other in kept]
        arrays.insert(place, column)
        names = [*kept[:place], name, *kept[place:]]
        yield pa.RecordBatch.from_arrays(arrays, names=names)
