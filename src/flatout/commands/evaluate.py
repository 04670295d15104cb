"""`python -m flatout evaluate RUN FILE`: a finished run's metrics on another labelled file."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from rich.console import Console
from torch import Tensor

from flatout.bits.grams import label_index, plain_texts, raw_texts
from flatout.bits.scores import GramMetrics
from flatout.commands.rows import require_text_columns
from flatout.data.batch import multi_hot
from flatout.data.checks.cleaning import clean_block
from flatout.data.checks.findings import Findings
from flatout.data.checks.labels import normalise_labels
from flatout.data.checks.tagged_table import LISTS, TaggedTable
from flatout.data.checks.tags import TagCensus, as_bio
from flatout.data.problem import Problem
from flatout.data.roles import Roles
from flatout.data.sources import open_table
from flatout.data.table import require_columns
from flatout.errors import UserError
from flatout.inference import GramPredictor, Predictor, TagPredictor, answering_devices, load_predictor
from flatout.metrics import MultiMetrics, TaskMetrics
from flatout.report.closing import class_table
from flatout.report.summary import json_safe
from flatout.tasks.tagging import EntityScores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a finished run's folder")
    parser.add_argument(
        "file", metavar="FILE", help="csv, tsv, json, jsonl, parquet, arrow, npy or hdf5 with rows and labels"
    )
    parser.add_argument("--text", metavar="COLUMN", help="column of the texts (default: the run's)")
    parser.add_argument("--label", metavar="COLUMN", help="column of the labels (default: the run's)")
    parser.add_argument("--bits", metavar="COLUMN", help="column of the encodings, for a run on bit strings")
    parser.add_argument("--device", metavar="NAME", default="auto", help="cpu, cuda or cuda:N (default: a GPU if any)")
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON")


def run(arguments: argparse.Namespace) -> None:
    predictor = load_predictor(arguments.run, answering_devices(arguments.device)[0])
    if isinstance(predictor, GramPredictor):
        scores, rows = evaluate_grams(predictor, arguments.file, arguments.bits or predictor.bits_column)
        _show({"rows": rows, **scores}, arguments.json)
        return
    if isinstance(predictor, TagPredictor):
        scores, rows, per_type = evaluate_tags(predictor, arguments.file, arguments.text, arguments.label)
        if not arguments.json and per_type:
            Console(soft_wrap=True, highlight=False).print(class_table(per_type))
        _show({"rows": rows, **scores}, arguments.json)
        return
    roles = predictor.roles
    texts = roles.texts if arguments.text is None else (arguments.text,)
    roles = replace(roles, texts=texts, label=arguments.label or roles.label)
    metrics, findings = evaluate(predictor, arguments.file, roles)
    if not arguments.json:
        for remark in findings.remarks():
            print(f"{remark.source}: {remark.what}")
        if per_class := [row for row in metrics.per_class() if row["support"]]:
            Console(soft_wrap=True, highlight=False).print(class_table(per_class))
    _show({"rows": findings.rows_kept, **metrics.compute()}, arguments.json)


def _show(values: dict[str, float], is_json: bool) -> None:
    if is_json:
        print(json.dumps(json_safe(values), indent=1))
        return
    for name, value in values.items():
        print(f"{name:<16} {value:,}" if isinstance(value, int) else f"{name:<16} {value:.4f}")


def evaluate_grams(predictor: GramPredictor, file: str, bits: str) -> tuple[dict[str, float], int]:
    """Scores over all records of a file that holds encodings and plain texts, and how many there are."""
    table = open_table(file, where="FILE")
    columns = {f"column {number + 1} of the run": name for number, name in enumerate(predictor.text_columns)}
    require_columns(table, {"--bits": bits, **columns})
    metrics, index = GramMetrics(predictor.threshold), label_index()
    num_labels, first_row = len(predictor.labels.names), 0
    for block in table.blocks([bits, *predictor.text_columns]):
        rows = np.arange(first_row, first_row + block.num_rows)
        first_row += block.num_rows
        probabilities = predictor.outputs(predictor.encodings(block.column(bits), rows, table.name, bits))
        fields = [block.column(name).cast(pa.large_string()) for name in predictor.text_columns]
        ids, lengths = index.rows(plain_texts(raw_texts(fields)))
        offsets = torch.from_numpy(np.append(0, np.cumsum(lengths, dtype=np.int64)))
        metrics.update(probabilities, multi_hot(torch.from_numpy(ids), offsets, num_labels))
    return metrics.compute(), first_row


def evaluate_tags(
    predictor: TagPredictor, file: str, text: str | None, label: str | None
) -> tuple[dict[str, float], int, list[dict[str, Any]]]:
    """Scores over all rows of a file of words and tags, how many there are, and the scores of each type."""
    table = open_table(file, where="FILE")
    roles = replace(predictor.roles, texts=(text or predictor.roles.texts[0],), label=label or predictor.roles.label)
    require_columns(table, {"--text": roles.texts[0], "--label": roles.label})
    census = TagCensus(table.name)
    types = [name[2:] for name in predictor.names[1::2]]
    census.types |= {name: number for number, name in enumerate(types, 1)}
    scores, first_row = EntityScores(types), 0
    for block in TaggedTable(table, roles, "test", census).blocks(LISTS):
        words, tags = block.columns
        rows = np.arange(first_row, first_row + block.num_rows)
        first_row += block.num_rows
        given = census.numbered(tags, rows)
        if unknown := list(census.types)[len(types) :]:
            what = f"{table.name}: types that the run does not know: {', '.join(unknown[:5])}"
            raise UserError("--label", what, allowed=", ".join(types))
        found = predictor.tags(words)
        scores.add(found.ids, as_bio(given), found.offsets, np.zeros(len(rows), np.bool_))
    if first_row == 0:
        raise UserError("FILE", f"{file}: no rows")
    return scores.values(), first_row, [row for row in scores.per_type() if row["support"]]


def evaluate(predictor: Predictor, file: str, roles: Roles) -> tuple[TaskMetrics, Findings]:
    """Metrics over all rows of a file, and what was found in it."""
    table = open_table(file, where="FILE")
    require_text_columns(table, roles, label=roles.label)
    problem = predictor.labels.problem
    metrics = TaskMetrics.build(problem, predictor.labels.classes)
    if isinstance(metrics, MultiMetrics):
        metrics.thresholds.copy_(predictor.least_shares())
    findings = Findings(table.name)
    first_row = 0
    for block in table.blocks(roles.columns):
        rows = np.arange(first_row, first_row + block.num_rows)
        first_row += block.num_rows
        clean = clean_block(block, roles=roles, rows=rows, problem=problem, is_train=False, findings=findings)
        labels = normalise_labels(
            clean.labels, clean.rows, problem=problem, delimiter=predictor.label_delimiter, source=table.name
        )
        if len(clean.rows):
            metrics.update(predictor.outputs(clean.texts), _targets(predictor, labels, clean.rows, table.name))
    if findings.rows_kept == 0:
        raise UserError("FILE", f"{file}: no row has a label")
    return metrics, findings


def _targets(predictor: Predictor, labels: pa.Array, rows: np.ndarray, source: str) -> Tensor:
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
