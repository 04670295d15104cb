"""`python -m flatout predict RUN FILE`: every row of a file with what the run answers, in the file's order.

Rows are read, answered and written by the block, so memory stays flat however long the file is. A run on texts answers
classes; a run on bit strings answers 2-grams and, on request, the texts they may have come from.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch import Tensor

from flatout.data.checks.cleaning import read_texts
from flatout.data.checks.findings import Findings
from flatout.data.output import FORMATS, block_writer
from flatout.data.problem import Problem
from flatout.data.progress import Progress
from flatout.data.roles import Roles
from flatout.data.sources import open_table
from flatout.data.table import Table, require_columns
from flatout.errors import UserError
from flatout.inference import GramPredictor, Predictor, load_predictor

_ADDED = ("prediction", "probability", "rebuilt", "candidates")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a finished run's folder")
    parser.add_argument("file", metavar="FILE", help="csv, tsv, json, jsonl, parquet, arrow, npy or hdf5 with the rows")
    parser.add_argument("--text", metavar="COLUMN", help="column of the texts (default: the run's)")
    parser.add_argument("--bits", metavar="COLUMN", help="column of the encodings, for a run on bit strings")
    parser.add_argument("--rebuild", action="store_true", help="also rebuild texts from the 2-grams of encodings")
    parser.add_argument("--names", metavar="FILE", help="known names, one a line, to rebuild texts with")
    parser.add_argument("--out", metavar="FILE", help=f"{', '.join(FORMATS)} (default: csv on standard output)")


def run(arguments: argparse.Namespace) -> None:
    predictor = load_predictor(arguments.run)
    table = open_table(arguments.file, where="FILE")
    if isinstance(predictor, Predictor):
        _refuse(arguments, ("bits", "rebuild", "names"), "this run answers texts")
        roles = predictor.roles if arguments.text is None else replace(predictor.roles, texts=(arguments.text,))
        blocks = answers(predictor, table, roles, _kept_columns(table))
    else:
        _refuse(arguments, ("text",), "this run answers encodings")
        names = [] if arguments.names is None else read_names(arguments.names)
        is_rebuilt = arguments.rebuild or bool(names)
        column = arguments.bits or predictor.bits_column
        blocks = gram_answers(predictor, table, column, _kept_columns(table), names if is_rebuilt else None)
    with block_writer(arguments.out) as write, Progress() as progress:
        told = progress.task("predicting")
        for block in blocks:
            write(block)
            told(block.num_rows)


def _kept_columns(table: Table) -> list[str]:
    return [name for name in table.columns if name not in _ADDED]


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(arguments, name):
            raise UserError(f"--{name}", why, mend="Leave it out.")


def answers(predictor: Predictor, table: Table, roles: Roles, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """The table's blocks with the columns `prediction` and `probability` added."""
    require_text_columns(table, roles)
    for block in table.blocks(columns):
        texts, _ = read_texts(block, roles, np.arange(block.num_rows), Findings(table.name))
        yield _with_columns(block, answer_columns(predictor, predictor.outputs(pc.fill_null(texts, ""))))


def require_text_columns(table: Table, roles: Roles, **others: str) -> None:
    """Check that the columns of the texts are there, and `others` by the options that name them."""
    texts = {"--text" if number == 0 else f"--text[{number}]": name for number, name in enumerate(roles.texts)}
    require_columns(table, {**texts, **{f"--{option}": name for option, name in others.items()}})


def gram_answers(
    predictor: GramPredictor, table: Table, bits: str, columns: list[str], names: list[str] | None
) -> Iterator[pa.RecordBatch]:
    """The table's blocks with 2-grams and their probabilities, and with rebuilt texts where `names` is a list."""
    require_columns(table, {"--bits": bits})
    reconstructor = None if names is None else predictor.reconstructor(names)
    first_row = 0
    for block in table.blocks(columns, rows_per_block=16_384):
        rows = np.arange(first_row, first_row + block.num_rows)
        first_row += block.num_rows
        encodings = predictor.encodings(block.column(bits), rows, table.name, bits)
        probabilities = predictor.outputs(encodings)
        found = _chosen(pa.array(predictor.labels.names), probabilities, predictor.threshold)
        if reconstructor is not None:
            rebuilt = list(reconstructor.candidates(predictor.detected(encodings).numpy()))
            found["rebuilt"] = pa.array([each.texts[0] if each.texts else None for each in rebuilt], pa.string())
            found["candidates"] = pa.array([each.texts for each in rebuilt], pa.list_(pa.string()))
        yield _with_columns(block, found)


def read_names(file: str) -> list[str]:
    """Names of a text file, one a line."""
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("--names", f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
    names = [line.strip() for line in lines if line.strip()]
    if not names:
        raise UserError("--names", f"{file} names nobody", mend="Write one name a line.")
    return names


def answer_columns(predictor: Predictor, outputs: Tensor) -> dict[str, pa.Array]:
    """Logits as the columns that are written; whole blocks at once."""
    classes = pa.array(predictor.labels.classes)
    if predictor.labels.problem is Problem.regression:
        return {"prediction": pa.array(outputs.squeeze(-1).numpy())}
    if predictor.labels.problem is Problem.single:
        probabilities, ids = outputs.softmax(-1).max(-1)
        return {"prediction": classes.take(pa.array(ids.numpy())), "probability": pa.array(probabilities.numpy())}
    return _chosen(classes, outputs.sigmoid(), predictor.threshold)


def _chosen(classes: pa.Array, probabilities: Tensor, threshold: float) -> dict[str, pa.Array]:
    """The classes of each row at or above the threshold, and their probabilities, as lists."""
    scores = probabilities.numpy()
    row, column = np.nonzero(scores >= threshold)
    counts = np.bincount(row, minlength=len(scores))
    offsets = pa.array(np.append(0, np.cumsum(counts)).astype(np.int32))
    lists = (classes.take(pa.array(column)), pa.array(scores[row, column]))
    return dict(zip(_ADDED[:2], (pa.ListArray.from_arrays(offsets, values) for values in lists), strict=True))


def _with_columns(block: pa.RecordBatch, added: dict[str, pa.Array]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([*block.columns, *added.values()], names=[*block.schema.names, *added])
