"""`splits.parquet` of a run folder: which row of its table each row of each split is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flatout.data.store.store import Store

SPLIT_ROWS = "splits.parquet"


def save_split_rows(store: Store, path: Path) -> None:
    """Write which row of its table, counted from 1, each row of each split is."""
    schema = pa.schema([("split", pa.dictionary(pa.int8(), pa.string())), ("row", pa.int64())])
    with pq.ParquetWriter(
        path, schema, column_encoding={"row": "DELTA_BINARY_PACKED"}, use_dictionary=["split"]
    ) as file:
        for name, split in store.splits.items():
            rows = pa.array(split.fixed("rows") + 1)
            words = pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(rows), np.int8)), pa.array([name]))
            file.write_table(pa.Table.from_arrays([words, rows], schema=schema))
