"""Blocks of rows written as csv, jsonl or parquet: to standard output, or to a file that appears when it is whole."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from flatout.errors import UserError

FORMATS = (".csv", ".jsonl", ".parquet")


@contextmanager
def block_writer(out: str | None) -> Iterator[Callable[[pa.RecordBatch], None]]:
    """Writes blocks to standard output, or to a file that appears when it is whole."""
    if out is None:
        yield _format_writer(sys.stdout.buffer, ".csv")[0]
        sys.stdout.buffer.flush()
        return
    path = Path(out)
    if path.suffix not in FORMATS:
        raise UserError("--out", f"cannot write {path.suffix or path.name}", allowed=", ".join(FORMATS))
    if not path.parent.is_dir():
        raise UserError("--out", f"no such folder: {path.parent}")
    beside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with beside.open("wb") as file:
            write, close = _format_writer(file, path.suffix)
            yield write
            close()
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _format_writer(file: BinaryIO, suffix: str) -> tuple[Callable[[pa.RecordBatch], None], Callable[[], None]]:
    """How blocks are written in one format, and how that ends."""
    opened: list[Any] = []

    def write_csv(block: pa.RecordBatch) -> None:
        options = pa_csv.WriteOptions(include_header=not opened)
        opened.append(True)
        pa_csv.write_csv(_flat_lists(block), file, options)

    def write_jsonl(block: pa.RecordBatch) -> None:
        file.writelines(json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n" for row in block.to_pylist())

    def write_parquet(block: pa.RecordBatch) -> None:
        if not opened:
            opened.append(pq.ParquetWriter(file, block.schema))
        opened[0].write_batch(block)

    def close() -> None:
        if suffix == ".parquet" and opened:
            opened[0].close()

    return {".csv": write_csv, ".jsonl": write_jsonl, ".parquet": write_parquet}[suffix], close


def _flat_lists(block: pa.RecordBatch) -> pa.RecordBatch:
    """Lists as one text each, separated by `|`, which is what a csv can hold; lists of more than words as JSON."""
    return pa.RecordBatch.from_arrays([_flat(column) for column in block.columns], names=block.schema.names)


def _flat(column: pa.Array) -> pa.Array:
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        return column
    if pa.types.is_nested(column.type.value_type):
        return pa.array([json.dumps(each, ensure_ascii=False) for each in column.to_pylist()], pa.string())
    return pc.binary_join(column.cast(pa.list_(pa.string())), "|")
