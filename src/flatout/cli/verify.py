"""`python -m flatout verify RUN|FOLDER FILE`: whether all forms of a model give the same answers.

A form is a way to compute them: another device, batches, an exported folder. The reference is fp32
on the CPU, each row alone. Exit code 1 where more answers changed than `--allow`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from flatout.cli.run_arguments import (
    FILES,
    add_part,
    add_reading,
    answering_devices,
    choose_reading,
    file_options,
    input_file,
)
from flatout.data.store.progress import Progress
from flatout.data.tables.sources import open_table
from flatout.data.tables.table import Table
from flatout.data.tokens.long_texts import Long
from flatout.engine.precision import Precision
from flatout.errors import require
from flatout.inference.folder_forms import forms_of_folder
from flatout.inference.folder_predictors import predictors_of_folder
from flatout.inference.forms import Form, forms_of_run
from flatout.inference.open_folder import is_transformers_folder
from flatout.inference.run_predictor import RunPredictor
from flatout.inference.verify import SplitAnswer, verify, write_certificate
from flatout.run.kinds import load_predictor
from flatout.tasks.abstention import HeldOutAnswers
from flatout.tasks.error_intervals import HeldOutErrors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN|FOLDER", type=Path, help="a finished run, or a folder of transformers")
    add("file", metavar="FILE", help=f"{FILES} with the rows; -: standard input")
    add(
        "--text",
        metavar="COLUMN",
        help="column of the texts (default: the run's; of a folder text)",
    )
    add("--bits", metavar="COLUMN", help="column of the encodings, for a run on bit strings")
    add(
        "--form",
        metavar="FOLDER",
        type=Path,
        action="append",
        help="an export to judge (default: RUN/export)",
    )
    add("--rows", metavar="N", type=int, default=10_000, help="the first N rows (default: 10000)")
    add(
        "--allow",
        metavar="N",
        default="0",
        help="answers that may change, as 3 or 0.1%% (default: 0)",
    )
    add("--at-error", metavar="SHARE", help="each leaves unsure answers out, as predict does: 5%%")
    add_part(parser)
    add("--device", metavar="NAME", default="auto", help="devices to judge (default: all GPUs)")
    add("--out", metavar="FILE", type=Path, help="write the certificate: verify.json")
    add_reading(parser)


def run(arguments: argparse.Namespace) -> None:
    require(arguments.rows > 0, "--rows", f"{arguments.rows}", allowed="1 or more")
    # A wrong number is refused now, before minutes pass in loading; a percentage needs the rows.
    _count_allowed(arguments.allow, 1)
    reference, forms, open_file = _find_forms(arguments)
    if arguments.at_error is not None:
        for form in (reference, *forms):
            form.predictor.leave_out_unsure(arguments.at_error)
    with input_file(arguments, "verify") as file, Progress() as progress:
        table = open_file(file)
        all_rows = reference.predictor.rows(table, file_options(arguments))
        rows = list(itertools.islice(all_rows, arguments.rows))
        reference.predictor.require_rows(len(rows), table)
        allowed = _count_allowed(arguments.allow, len(rows))
        width = max(len(form.name) for form in forms)
        print(f"{table.name}: {len(rows):,} rows; reference: {reference.name}, fp32")
        done = []
        advance = progress.task("asking", total=len(rows) * (1 + len(forms)))
        expected = [SplitAnswer.of(answer) for answer in reference.answers(rows)]
        for form in forms:
            done.append(verify(form, rows, expected))
            print(done[-1].line(width), flush=True)
            advance(len(rows))
    holds = all(verified.holds(allowed) for verified in done)
    verdict = "each form holds" if holds else "not each form holds"
    print(f"{verdict}, {allowed:,} changed rows allowed")
    if arguments.out is not None:
        about = {
            "file": table.name,
            "rows": len(rows),
            "reference": f"{reference.name}, fp32",
            "allowed": allowed,
            "at_error": arguments.at_error,
        }
        write_certificate(arguments.out, about, done, allowed)
    if not holds:
        sys.exit(1)


def _find_forms(
    arguments: argparse.Namespace,
) -> tuple[Form, list[Form], Callable[[str], Table]]:
    """The reference, all forms that are compared with it, and the function that opens the file."""
    if is_transformers_folder(arguments.run):
        require(
            not arguments.form,
            "--form",
            "only a run has other forms",
            hint="Name each folder by itself.",
        )
        is_plain = not (arguments.bits or arguments.read or arguments.device != "auto")
        require(is_plain, "--bits, --read, --device", "are for runs", hint="Leave them out.")
        reference, forms = forms_of_folder(arguments.run, arguments.text or "text")
        return reference, forms, lambda file: open_table(file, where="FILE")
    part = arguments.answer_with
    require(
        part is None or not arguments.form,
        "--form",
        f"exports answer as the run does, and not --with {part}",
        hint="Leave one of them out.",
    )
    predictor = load_predictor(arguments.run, "cpu", Precision.fp32, answer_with=part)
    usual = arguments.run / "export"
    folders = list(arguments.form or [])
    # An exported tokenizer cuts long texts, so a run that reads them in windows answers otherwise.
    if not (folders or part) and usual.is_dir() and predictor.long_texts.kind is Long.cut:
        folders.append(usual)
    exports = dict[str, RunPredictor]()
    for folder in folders:
        for name, export in predictors_of_folder(predictor, folder).items():
            export.held_out = HeldOutAnswers.read(folder)
            export.held_out_errors = HeldOutErrors.read(folder)
            exports[name] = export
    devices = answering_devices(arguments.device)
    beside = [
        load_predictor(arguments.run, device, answer_with=part)
        for device in devices
        if device != torch.device("cpu")
    ]

    def open_file(file: str) -> Table:
        return predictor.open(file, "verify", choose_reading(arguments))

    return *forms_of_run(predictor, beside, exports), open_file


def _count_allowed(allowed: str, rows: int) -> int:
    """Rows that may change: of 2,000 rows `3` → 3, `0.1%` → 2."""
    try:
        count = float(allowed.removesuffix("%")) * (rows / 100 if allowed.endswith("%") else 1)
    except ValueError:
        count = -1
    require(
        0 <= count < math.inf,
        "--allow",
        repr(allowed),
        allowed="a number of rows, or a percentage: 3, 0.1%",
    )
    return int(count)
