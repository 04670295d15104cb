"""`python -m flatout evaluate RUN FILE`: a finished run's metrics on another labelled file.

Rows are read, answered and counted by the block, on all devices, so memory stays flat however long
the file is.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from flatout.cli.run_arguments import (
    FILES,
    add_computing,
    add_reading,
    choose_reading,
    file_options,
    has_training_bytes,
    input_file,
    is_trained_on,
    load_predictors,
)
from flatout.data.store.progress import Progress
from flatout.errors import UserError, require
from flatout.inference.model_folder import ModelFolder
from flatout.report.closing import class_table, share_table
from flatout.report.run_report import interval_text
from flatout.report.summary import json_safe
from flatout.run.run_folder import require_no_link_outside
from flatout.run_log import print_line, print_note

if TYPE_CHECKING:
    from flatout.inference.run_predictor import Scored


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN", help="a finished run's folder")
    add(
        "file",
        metavar="FILE",
        help=f"{FILES} with rows and labels, or a folder of recordings; -: standard input",
    )
    add("--text", metavar="COLUMN", help="column of the texts (default: the run's)")
    add("--label", metavar="COLUMN", help="column of the labels (default: the run's)")
    add("--bits", metavar="COLUMN", help="column of the encodings, for a run on bit strings")
    add_reading(parser)
    add_computing(parser)
    add("--json", action="store_true", help="print the metrics as JSON")
    text = "let predict --at-error go by these rows, instead of the validation rows"
    add("--calibrate", action="store_true", help=text)


def run(arguments: argparse.Namespace) -> None:
    if arguments.calibrate:
        require(
            arguments.answer_with is None,
            "--calibrate",
            f"is of the run's own answers, and not of --with {arguments.answer_with}",
            hint="Leave one of them out.",
        )
        require_no_link_outside(Path(arguments.run))  # before minutes of answering
        _require_unseen(arguments.file, is_trained_on(arguments.run, arguments.file))
    predictors = load_predictors(arguments)
    with input_file(arguments, "evaluate") as file, Progress() as progress:
        table = predictors[0].open(file, "evaluate", choose_reading(arguments))
        if arguments.calibrate:
            _require_unseen(arguments.file, has_training_bytes(arguments.run, table))
        advance = progress.task("evaluating")
        scored = predictors[0].score_table(table, file_options(arguments), predictors, advance)
    # Warnings go beside the metrics, so that standard output can be piped into another program.
    for warning in dict.fromkeys([*scored.warnings, *predictors[0].notes()]):
        print_note(warning)
    if arguments.calibrate:
        _keep_answers(scored, ModelFolder.find(arguments.run).path)
    cuts = [] if scored.held_out is None else scored.held_out.facts()
    if arguments.json:
        metrics = {**scored.counts, **scored.values, "intervals": scored.intervals}
        metrics["abstention"] = cuts
        metrics["answer_intervals"] = scored.answer_intervals
        print(json.dumps(json_safe(metrics), indent=1))
        return
    _print_scores(scored, cuts)


def _require_unseen(file: str, is_seen: bool) -> None:
    rows = "these rows" if file == "-" else file
    require(
        not is_seen,
        "--calibrate",
        f"the run has learned from {rows}, where it errs less than elsewhere",
        hint="Name rows that training has not seen.",
    )


def _keep_answers(scored: Scored, folder: Path) -> None:
    """Let `predict --at-error` go by these answers; those of before stay where it cannot."""
    answers = scored.held_out or scored.held_out_errors
    if answers is None:
        raise UserError("--calibrate", "this run leaves no answer out", hint="Leave it out.")
    if scored.held_out_errors is not None and not scored.held_out_errors.facts():
        raise UserError(
            "--calibrate",
            "too few recordings to promise any interval",
            hint="Name a file with more, or leave it out: the intervals of before stay.",
        )
    try:
        answers.write(folder)
    except OSError as error:
        raise UserError(
            "--calibrate",
            f"cannot write in {folder}: {error.strerror or error}",
            hint="Make room, or copy the run to a folder that you may write to.",
        ) from error


def _print_scores(scored: Scored, cuts: Sequence[Mapping[str, float]]) -> None:
    """The metrics, those of each class, and the error of the surest answers."""
    for remark in scored.remarks:
        print_line(remark)
    # A class without a row in this file has no score here.
    if per_class := [row for row in scored.per_class if row["support"]]:
        Console(soft_wrap=True, highlight=False).print(class_table(per_class))
    for name, count in scored.counts.items():
        print(f"{name:<17} {count:,}")
    for name, value in scored.values.items():
        number = "–" if math.isnan(value) else f"{value:.4f}"
        print(f"{name:<17} {number}{interval_text(scored.intervals.get(name))}")
    if cuts:
        Console(soft_wrap=True, highlight=False).print(share_table(cuts[::2]))
