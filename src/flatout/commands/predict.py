"""`python -m flatout predict RUN FILE`: every row of a file with its class and probability, in the file's order.

Rows are read, answered and written by the block, so memory stays flat however long the file is. The output is written
beside its place and renamed when it is whole.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from torch import Tensor

from flatout.data.checks import Findings, read_texts
from flatout.data.problem import Problem
from flatout.data.progress import Progress
from flatout.data.table import Table, open_table, require_columns
from flatout.errors import UserError
from flatout.inference import Predictor

FORMATS = (".csv", ".jsonl", ".parquet")
_ADDED = ("prediction", "probability")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a finished run's folder")
    parser.add_argument("file", metavar="FILE", help="csv, tsv, json, jsonl or parquet with the texts")
    parser.add_argument("--text", metavar="COLUMN", help="column of the texts (default: the run's)")
    parser.add_argument("--out", metavar="FILE", help=f"{', '.join(FORMATS)} (default: csv on standard output)")


def run(arguments: argparse.Namespace) -> None:
    predictor = Predictor.load(arguments.run)
    table = open_table(arguments.file, where="FILE")
    text = arguments.text or predictor.text_column
    require_columns(table, {"--text": text})
    schema_names = [name for name in table.columns if name not in _ADDED]
    with _writer(arguments.out) as write, Progress() as progress:
        told = progress.task("predicting")
        for block in answers(predictor, table, text, schema_names):
            write(block)
            told(block.num_rows)


def answers(predictor: Predictor, table: Table, text: str, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """The table's blocks with the columns `prediction` and `probability` added."""
    for block in table.blocks(columns):
        texts = read_texts(block.column(text), text, np.arange(block.num_rows), Findings(table.name))
        answer = answer_columns(predictor, predictor.outputs(pc.fill_null(texts, "")))
        names = [*block.schema.names, *answer]
        yield pa.RecordBatch.from_arrays([*block.columns, *answer.values()], names=names)


def answer_columns(predictor: Predictor, outputs: Tensor) -> dict[str, pa.Array]:
    """Logits as the columns that are written; whole blocks at once."""
    classes = pa.array(predictor.labels.classes)
    if predictor.labels.problem is Problem.regression:
        return {"prediction": pa.array(outputs.squeeze(-1).numpy())}
    if predictor.labels.problem is Problem.single:
        probabilities, ids = outputs.softmax(-1).max(-1)
        return {"prediction": classes.take(pa.array(ids.numpy())), "probability": pa.array(probabilities.numpy())}
    scores = outputs.sigmoid().numpy()
    row, column = np.nonzero(scores >= predictor.threshold)
    counts = np.bincount(row, minlength=len(scores))
    offsets = pa.array(np.append(0, np.cumsum(counts)).astype(np.int32))
    lists = (classes.take(pa.array(column)), pa.array(scores[row, column]))
    return dict(zip(_ADDED, (pa.ListArray.from_arrays(offsets, values) for values in lists), strict=True))


@contextmanager
def _writer(out: str | None) -> Iterator[Callable[[pa.RecordBatch], None]]:
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
    """Lists as one text each, separated by `|`, which is what a csv can hold."""
    columns = [
        pc.binary_join(column.cast(pa.list_(pa.string())), "|") if pa.types.is_list(column.type) else column
        for column in block.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=block.schema.names)
