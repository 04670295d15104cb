"""`python -m flatout predict RUN FILE`: every row of a file with what the run answers, in the file's order.

Rows are read, answered and written by the block, so memory stays flat however long the file is. A run on texts answers
classes; a run on bit strings answers 2-grams and, on request, the texts they may have come from.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch import Tensor

from flatout.bits.predictor import GramPredictor
from flatout.bits.reconstruct import Reconstructor
from flatout.cli.predict_recordings import predict_recordings
from flatout.cli.rows import (
    FILES,
    Numbered,
    add_computing,
    in_order,
    load_predictors,
    numbered_blocks,
    readable,
    require_text_columns,
    tell_of_lost_words,
)
from flatout.data.checks.cleaning import read_texts
from flatout.data.checks.findings import Findings
from flatout.data.checks.tagged_table import word_lists
from flatout.data.problem import Problem
from flatout.data.store.progress import Progress
from flatout.data.tables.output import FORMATS, block_writer
from flatout.data.tables.roles import Roles
from flatout.data.tables.sources import open_table
from flatout.data.tables.table import Table, require_columns
from flatout.errors import UserError
from flatout.inference.masked_words import refuse_masked_words
from flatout.inference.sequences import SequencePredictor
from flatout.inference.tags import TagPredictor
from flatout.inference.text import Predictor


@dataclass(frozen=True, slots=True)
class Answered:
    """A block of rows with what the run answers."""

    block: pa.RecordBatch
    replaced: list[str]
    """Columns of the file that gave way to answers of the same name."""
    lost_words: int = 0
    """Words that the model did not see."""


Answer = Callable[[Any, Numbered], Answered]
"""From a predictor, and a block with the number of its first row."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a finished run's folder")
    parser.add_argument(
        "file", metavar="FILE", help=f"{FILES} with the rows, or a folder of recordings; -: standard input"
    )
    parser.add_argument("--text", metavar="COLUMN", help="column of the texts (default: the run's)")
    parser.add_argument("--top-k", metavar="N", type=int, default=0, help="also the N likeliest labels of each row")
    parser.add_argument("--bits", metavar="COLUMN", help="column of the encodings, for a run on bit strings")
    parser.add_argument("--rebuild", action="store_true", help="also rebuild texts from the 2-grams of encodings")
    parser.add_argument("--names", metavar="FILE", help="known names, one a line, to rebuild texts with")
    add_computing(parser)
    parser.add_argument("--out", metavar="FILE", help=f"{', '.join(FORMATS)} (default: csv on standard output)")


def run(arguments: argparse.Namespace) -> None:
    predictors = load_predictors(arguments)
    if arguments.top_k < 0:
        raise UserError("--top-k", f"{arguments.top_k}", allowed="1 or more")
    refuse_masked_words(predictors[0], "predict")
    if isinstance(predictors[0], SequencePredictor):
        _refuse(arguments, ("text", "top_k", "bits", "rebuild", "names"), "this run answers recordings")
        predict_recordings(arguments, predictors[0])
        return
    with readable(arguments.file, "predict") as file:
        table = open_table(file, where="FILE")
        answer = _answer_of(arguments, predictors[0], table)
        blocks = numbered_blocks(table, list(table.columns))
        with block_writer(arguments.out) as write, Progress() as progress:
            advance, rows, lost, replaced = progress.task("predicting"), 0, 0, list[str]()
            for found in in_order(answer, predictors, blocks):
                write(found.block)
                advance(found.block.num_rows)
                rows += found.block.num_rows
                lost += found.lost_words
                replaced = found.replaced
    if replaced:
        names = ", ".join(replaced)
        print(f"{table.name}: {names} left out: the answers have columns of that name", file=sys.stderr)
    tell_of_lost_words(lost, predictors[0])
    if arguments.out is not None:
        print(f"written to {arguments.out}: {rows:,} rows")


def _answer_of(
    arguments: argparse.Namespace, predictor: Predictor | GramPredictor | TagPredictor, table: Table
) -> Answer:
    """How a block of the table is answered, by whichever kind of run."""
    if isinstance(predictor, Predictor):
        _refuse(arguments, ("bits", "rebuild", "names"), "this run answers texts")
        roles = predictor.roles if arguments.text is None else replace(predictor.roles, texts=(arguments.text,))
        if predictor.labels.problem is Problem.regression:
            _refuse(arguments, ("top_k",), "this run answers numbers")
        require_text_columns(table, roles)
        return partial(answers, roles=roles, name=table.name, top_k=arguments.top_k)
    if isinstance(predictor, TagPredictor):
        _refuse(arguments, ("bits", "rebuild", "names", "top_k"), "this run answers words with tags")
        column = arguments.text or predictor.roles.texts[0]
        require_columns(table, {"--text": column})
        return partial(tag_answers, column=column, name=table.name)
    _refuse(arguments, ("text", "top_k"), "this run answers encodings")
    names = [] if arguments.names is None else read_names(arguments.names)
    is_rebuilt = arguments.rebuild or bool(names)
    column = arguments.bits or predictor.bits_column
    require_columns(table, {"--bits": column})
    reconstructor = predictor.reconstructor(names) if is_rebuilt else None
    return partial(gram_answers, bits=column, name=table.name, reconstructor=reconstructor)


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(arguments, name):
            raise UserError(f"--{name.replace('_', '-')}", why, hint="Leave it out.")


def answers(predictor: Predictor, piece: Numbered, *, roles: Roles, name: str, top_k: int = 0) -> Answered:
    """A block of the table of that name, with the columns `prediction` and `probability` added."""
    _, block = piece
    texts, _ = read_texts(block, roles, np.arange(block.num_rows), Findings(name))
    return _with_columns(block, answer_columns(predictor, predictor.outputs(pc.fill_null(texts, "")), top_k))


def tag_answers(predictor: TagPredictor, piece: Numbered, *, column: str, name: str) -> Answered:
    """A block with a tag for each word, and the entities."""
    _, block = piece
    words = word_lists(block.column(column), name=column, table=name, key="--text")
    found = predictor.tags(words)
    names = pa.array(predictor.names).take(pa.array(found.ids))
    rows = predictor.read(words.to_pylist(), found)
    return _with_columns(
        block,
        {
            "prediction": pa.ListArray.from_arrays(pa.array(found.offsets.astype(np.int32)), names),
            "entities": pa.array([[asdict(each) for each in row.entities] for row in rows], _ENTITIES),
        },
        found.lost,
    )


_ENTITIES = pa.list_(
    pa.struct(
        [
            ("type", pa.string()),
            ("text", pa.string()),
            ("start", pa.int64()),
            ("stop", pa.int64()),
            ("probability", pa.float32()),
        ]
    )
)


def gram_answers(
    predictor: GramPredictor,
    piece: Numbered,
    *,
    bits: str,
    name: str,
    reconstructor: Reconstructor | None,
) -> Answered:
    """A block with 2-grams and their probabilities, and with rebuilt texts where there is a reconstructor."""
    first_row, block = piece
    rows = np.arange(first_row, first_row + block.num_rows)
    encodings = predictor.encodings(block.column(bits), rows, name, bits)
    probabilities = predictor.outputs(encodings)
    found = _chosen(pa.array(predictor.labels.names), probabilities, predictor.threshold)
    if reconstructor is not None:
        rebuilt = list(reconstructor.candidates(predictor.detected(encodings).numpy()))
        found["rebuilt"] = pa.array([each.texts[0] if each.texts else None for each in rebuilt], pa.string())
        found["candidates"] = pa.array([each.texts for each in rebuilt], pa.list_(pa.string()))
    return _with_columns(block, found)


def read_names(file: str) -> list[str]:
    """Names of a text file, one a line."""
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "--names",
            f"cannot read {file}: {getattr(error, 'strerror', None) or error}",
            hint="Name a text file with one name in each line.",
        ) from None
    names = [line.strip() for line in lines if line.strip()]
    if not names:
        raise UserError("--names", f"{file} holds no name", hint="Write one name a line.")
    return names


def answer_columns(predictor: Predictor, outputs: Tensor, top_k: int = 0) -> dict[str, pa.Array]:
    """Logits as the columns that are written; whole blocks at once."""
    classes = pa.array(predictor.labels.classes)
    if predictor.labels.problem is Problem.regression:
        return {"prediction": pa.array(outputs.squeeze(-1).numpy())}
    shares = predictor.shares(outputs)
    if predictor.labels.problem is Problem.single:
        probabilities, ids = shares.max(-1)
        answered = {"prediction": classes.take(pa.array(ids.numpy())), "probability": pa.array(probabilities.numpy())}
    else:
        answered = _chosen(classes, shares, predictor.least_shares())
    return answered | (_top(classes, shares, top_k) if top_k else {})


def _top(classes: pa.Array, shares: Tensor, top_k: int) -> dict[str, pa.Array]:
    """The likeliest classes of each row, the best first."""
    values, ids = shares.topk(min(top_k, shares.shape[1]), dim=-1)
    width = ids.shape[1]
    offsets = pa.array(np.arange(len(ids) + 1, dtype=np.int32) * width)
    names, found = classes.take(pa.array(ids.flatten().numpy())), pa.array(values.flatten().numpy())
    return {
        "top_labels": pa.ListArray.from_arrays(offsets, names),
        "top_probabilities": pa.ListArray.from_arrays(offsets, found),
    }


def _chosen(classes: pa.Array, probabilities: Tensor, threshold: float | Tensor) -> dict[str, pa.Array]:
    """The classes of each row at or above the threshold, and their probabilities, as lists."""
    scores = probabilities.numpy()
    row, column = np.nonzero((probabilities >= threshold).numpy())
    counts = np.bincount(row, minlength=len(scores))
    offsets = pa.array(np.append(0, np.cumsum(counts)).astype(np.int32))
    names, shares = classes.take(pa.array(column)), pa.array(scores[row, column])
    return {
        "prediction": pa.ListArray.from_arrays(offsets, names),
        "probability": pa.ListArray.from_arrays(offsets, shares),
    }


def _with_columns(block: pa.RecordBatch, added: dict[str, pa.Array], lost_words: int = 0) -> Answered:
    """A block with its answers, in place of columns of the same names."""
    kept = [number for number, name in enumerate(block.schema.names) if name not in added]
    replaced = [name for name in block.schema.names if name in added]
    columns = [*(block.column(number) for number in kept), *added.values()]
    names = [*(block.schema.names[number] for number in kept), *added]
    return Answered(pa.RecordBatch.from_arrays(columns, names=names), replaced, lost_words)
