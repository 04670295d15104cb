"""`python -m flatout evaluate RUN FILE`: a finished run's metrics on another labelled file.

Rows are read, answered and counted by the block, on all devices, so memory stays flat however long the file is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from rich.console import Console
from torch import Tensor

from flatout.bits.grams import label_index, plain_texts, raw_texts
from flatout.bits.predictor import GramPredictor
from flatout.bits.scores import GramMetrics
from flatout.cli.evaluate_recordings import score_answers, score_labels
from flatout.cli.rows import (
    FILES,
    add_computing,
    in_order,
    load_predictors,
    numbered_blocks,
    readable,
    require_text_columns,
    tell_of_lost_words,
)
from flatout.data.batches.flat_batch import multi_hot
from flatout.data.checks.cleaning import clean_block
from flatout.data.checks.findings import Findings
from flatout.data.checks.labels import normalise_labels
from flatout.data.checks.tagged_table import LISTS, TaggedTable
from flatout.data.checks.tags import TagCensus, as_bio
from flatout.data.problem import Problem
from flatout.data.store.progress import Progress
from flatout.data.tables.roles import Roles
from flatout.data.tables.sources import open_source, open_table
from flatout.data.tables.table import Table, require_columns
from flatout.errors import UserError, require
from flatout.inference.masked_words import refuse_masked_words
from flatout.inference.sequences import SequencePredictor
from flatout.inference.tags import TagPredictor
from flatout.inference.text import Predictor
from flatout.report.closing import class_table
from flatout.report.summary import json_safe
from flatout.tasks.calibration import Sureness
from flatout.tasks.metrics import MultiMetrics, TaskMetrics
from flatout.tasks.tagging import EntityScores

Advance = Callable[[int], None]
"""Is called with each number of rows done."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a finished run's folder")
    parser.add_argument(
        "file", metavar="FILE", help=f"{FILES} with rows and labels, or a folder of recordings; -: standard input"
    )
    parser.add_argument("--text", metavar="COLUMN", help="column of the texts (default: the run's)")
    parser.add_argument("--label", metavar="COLUMN", help="column of the labels (default: the run's)")
    parser.add_argument("--bits", metavar="COLUMN", help="column of the encodings, for a run on bit strings")
    add_computing(parser)
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON")


def run(arguments: argparse.Namespace) -> None:
    predictors = load_predictors(arguments)
    with readable(arguments.file, "evaluate") as file, Progress() as progress:
        opened = open_source if isinstance(predictors[0], SequencePredictor) else open_table
        found = _scored(arguments, predictors, opened(file, where="FILE"), progress.task("evaluating"))
    tell_of_lost_words(found.lost_words or 0, predictors[0])
    counts = {"rows": found.rows} | ({} if found.lost_words is None else {"lost_words": found.lost_words})
    if arguments.json:
        print(json.dumps(json_safe({**counts, **found.values}), indent=1))
        return
    for remark in found.remarks:
        print(remark)
    if per_class := [row for row in found.per_class if row["support"]]:
        Console(soft_wrap=True, highlight=False).print(class_table(per_class))
    for name, count in counts.items():
        print(f"{name:<17} {count:,}")
    for name, value in found.values.items():
        print(f"{name:<17} {value:.4f}")


@dataclass(frozen=True, slots=True)
class Scored:
    """What a run's answers to a file are worth."""

    rows: int
    values: dict[str, float]
    per_class: list[dict[str, Any]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """What was found in the file."""
    lost_words: int | None = None
    """Words that a tagger did not see; None where answers are not word by word."""


def _scored(arguments: argparse.Namespace, predictors: list[Any], table: Table, advance: Advance) -> Scored:
    """The scores of whichever kind of run."""
    predictor = predictors[0]
    refuse_masked_words(predictor, "evaluate")
    if isinstance(predictor, SequencePredictor):
        return score_recordings(predictor, table, arguments.label, advance)
    if isinstance(predictor, GramPredictor):
        return score_grams(predictors, table, arguments.bits or predictor.bits_column, advance)
    texts = predictor.roles.texts if arguments.text is None else (arguments.text,)
    roles = replace(predictor.roles, texts=texts, label=arguments.label or predictor.roles.label)
    if isinstance(predictor, TagPredictor):
        return score_tags(predictors, table, roles, advance)
    return score_texts(predictors, table, roles, advance)


def score_recordings(predictor: SequencePredictor, table: Table, label: str | None, advance: Advance) -> Scored:
    """Over all answers to the recordings of a table that holds the targets too."""
    if not predictor.shape.labels:
        total, values = score_answers(predictor, table, advance)
        _require_rows(total, table)
        return Scored(total, values, remarks=predictor.notes.lines())
    total, metrics = score_labels(predictor, table, label, advance)
    _require_rows(total, table)
    return Scored(total, metrics.compute(), metrics.per_class(), predictor.notes.lines())


def score_grams(predictors: list[GramPredictor], table: Table, bits: str, advance: Advance) -> Scored:
    """Over all records of a table that holds encodings and plain texts."""
    predictor = predictors[0]
    columns = {f"column {number + 1} of the run": name for number, name in enumerate(predictor.text_columns)}
    require_columns(table, {"--bits": bits, **columns})
    index, num_labels = label_index(), len(predictor.labels.names)

    def labelled() -> Iterator[tuple[Any, Tensor]]:
        for first_row, block in numbered_blocks(table, [bits, *predictor.text_columns]):
            rows = np.arange(first_row, first_row + block.num_rows)
            fields = [block.column(name).cast(pa.large_string()) for name in predictor.text_columns]
            ids, lengths = index.rows(plain_texts(raw_texts(fields)))
            offsets = torch.from_numpy(np.append(0, np.cumsum(lengths, dtype=np.int64)))
            targets = multi_hot(torch.from_numpy(ids), offsets, num_labels)
            yield predictor.encodings(block.column(bits), rows, table.name, bits), targets

    metrics, total = GramMetrics(predictor.threshold), 0
    for probabilities, targets in in_order(_outputs, predictors, labelled()):
        metrics.update(probabilities, targets)
        total += len(targets)
        advance(len(targets))
    _require_rows(total, table)
    return Scored(total, metrics.compute())


def score_tags(predictors: list[TagPredictor], table: Table, roles: Roles, advance: Advance) -> Scored:
    """Over all rows of a table of words and tags, and of each type."""
    require_columns(table, {"--text": roles.texts[0], "--label": roles.label})
    census = TagCensus(table.name)
    types = [name[2:] for name in predictors[0].names[1::2]]
    census.types |= {name: number for number, name in enumerate(types, 1)}

    def labelled() -> Iterator[tuple[pa.Array, Any]]:
        for first_row, block in numbered_blocks(TaggedTable(table, roles, "test", census), LISTS):
            words, tags = block.columns
            given = census.numbered(tags, np.arange(first_row, first_row + block.num_rows))
            if unknown := list(census.types)[len(types) :]:
                what = f"{table.name}: types that the run does not know: {', '.join(unknown[:5])}"
                raise UserError("--label", what, allowed=", ".join(types))
            yield words, as_bio(given)

    scores, total, lost = EntityScores(types), 0, 0
    for found, given in in_order(_tags, predictors, labelled()):
        rows = len(found.offsets) - 1
        scores.add(found.ids, given, found.offsets, np.zeros(rows, np.bool_))
        total += rows
        lost += found.lost
        advance(rows)
    _require_rows(total, table)
    return Scored(total, scores.values(), scores.per_type(), lost_words=lost)


def score_texts(predictors: list[Predictor], table: Table, roles: Roles, advance: Advance) -> Scored:
    """Over all rows of a table that have a label, and of each class."""
    predictor = predictors[0]
    require_text_columns(table, roles, label=roles.label)
    problem, findings = predictor.labels.problem, Findings(table.name)
    metrics, sureness = TaskMetrics.build(problem, predictor.labels.classes), Sureness()
    if isinstance(metrics, MultiMetrics):
        metrics.thresholds.copy_(predictor.least_shares())

    def labelled() -> Iterator[tuple[pa.Array, Tensor]]:
        for first_row, block in numbered_blocks(table, roles.columns):
            rows = np.arange(first_row, first_row + block.num_rows)
            clean = clean_block(block, roles=roles, rows=rows, problem=problem, is_train=False, findings=findings)
            labels = normalise_labels(
                clean.labels, clean.rows, problem=problem, delimiter=predictor.label_delimiter, source=table.name
            )
            if len(clean.rows):
                yield clean.texts, _targets(predictor, labels, table.name)

    for outputs, targets in in_order(_outputs, predictors, labelled()):
        # Thresholds are of calibrated probabilities.
        metrics.update(outputs / predictor.temperature if problem is Problem.multi else outputs, targets)
        if problem is Problem.single:
            sureness.add(predictor.shares(outputs), targets)
        advance(len(targets))
    hint = "Name the column of labels with --label, or another file."
    require(findings.rows_kept > 0, "FILE", f"{table.name}: no row has a label", hint=hint)
    values = metrics.compute()
    if problem is Problem.single:
        values |= {"calibration_error": sureness.error(), "temperature": predictor.temperature}
    remarks = [f"{remark.source}: {remark.what}" for remark in findings.remarks()]
    return Scored(findings.rows_kept, values, metrics.per_class(), remarks)


def _outputs(predictor: Predictor | GramPredictor, piece: tuple[Any, Tensor]) -> tuple[Tensor, Tensor]:
    """What a run answers to the rows of a block, and what it should."""
    rows, targets = piece
    return predictor.outputs(rows), targets


def _tags(predictor: TagPredictor, piece: tuple[pa.Array, Any]) -> tuple[Any, Any]:
    words, given = piece
    return predictor.tags(words), given


def _require_rows(count: int, table: Table) -> None:
    require(count > 0, "FILE", f"{table.name}: no rows", hint="Name a file that holds some.")


def _targets(predictor: Predictor, labels: pa.Array, source: str) -> Tensor:
    """Labels as the run's class numbers; a class that the run never saw is a mistake."""
    classes = predictor.labels.classes
    if predictor.labels.problem is Problem.regression:
        return torch.from_numpy(labels.to_numpy(zero_copy_only=False).astype(np.float32))
    is_multi = predictor.labels.problem is Problem.multi
    values = pc.list_flatten(labels) if is_multi else labels
    ids = pc.index_in(values, pa.array(classes, pa.large_string()))
    if ids.null_count:
        unknown = pc.unique(values.filter(pc.is_null(ids))).to_pylist()
        what = f"{source}: labels that the run does not know: {', '.join(map(repr, unknown[:5]))}"
        raise UserError("--label", what, allowed=", ".join(classes[:20]))
    numbers = torch.from_numpy(ids.to_numpy(zero_copy_only=False).astype(np.int64))
    if not is_multi:
        return numbers
    counts = torch.from_numpy(pc.list_value_length(labels).to_numpy(zero_copy_only=False).astype(np.int64))
    hot = torch.zeros(len(labels), len(classes))
    hot[torch.repeat_interleave(torch.arange(len(labels)), counts), numbers] = 1.0
    return hot
