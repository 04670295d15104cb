"""`python -m flatout export RUN`: write a finished run as files for transformers or ONNX.

The files are checked before their folder gets its name: their answers must equal the run's own.
`--for here` measures each form of a text classifier on this machine, and writes the best one.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError

from flatout.cli.run_arguments import FILES, add_reading, choose_reading, input_file
from flatout.distributed.limits import processor_name
from flatout.engine.precision import Precision
from flatout.errors import REFUSALS, UserError, first_line, require
from flatout.inference.here import (
    BEST,
    HEAD,
    as_measurable,
    choose,
    measure_forms,
    quantise,
    remarks,
    write_best,
)
from flatout.inference.model_folder import ModelFolder
from flatout.inference.onnx_file import ONNX
from flatout.inference.run_predictor import FileOptions
from flatout.report.summary import read_summary
from flatout.run.kinds import kind_of_run, load_predictor
from flatout.run.run_folder import require_no_link_outside


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="folder of a finished run")
    add("--out", metavar="FOLDER", type=Path, help="folder that is made (default: RUN/export)")
    text = f"write {ONNX}, beside the folder of an encoder; needs flatout[onnx]"
    add("--onnx", action="store_true", help=text)
    text = (
        "measure each form of a run that classifies texts, and write the one best here"
        " (default: RUN/here)"
    )
    add("--for", dest="machine", choices=["here"], help=text)
    add("--rows", metavar="FILE", help=f"{FILES} with labelled rows to measure on, for --for here")
    add(
        "--best", choices=list(BEST), help="what to choose by, for --for here (default: throughput)"
    )
    add(
        "--allow-points",
        metavar="N",
        type=float,
        help="points that a form of --for here may lose (default: 0.5)",
    )
    add("--licence", metavar="NAME", help="named in the model card of --for here")
    add_reading(parser)


def run(arguments: argparse.Namespace) -> None:
    # a link in it would lead what is written, or copied, elsewhere
    require_no_link_outside(arguments.run)
    folder: Path = arguments.out or arguments.run / ("here" if arguments.machine else "export")
    if arguments.machine:
        _run_here(arguments, folder)
        return
    for name in ("rows", "best", "allow_points", "licence"):
        is_given = getattr(arguments, name) is not None
        require(
            not is_given, f"--{name.replace('_', '-')}", "is for --for here alone", hint="Add it."
        )
    model = ModelFolder.find(arguments.run)
    settings = model.settings()
    with model.read():
        kind = settings["model"]["kind"]
        predictor = kind_of_run(settings).predictor
        predictor.require_exportable(str(arguments.run), kind, onnx=arguments.onnx)
    if arguments.onnx:
        _require_onnx()
    with _complete_folder(folder) as beside:
        lines = predictor.export_run(arguments.run, beside, folder, onnx=arguments.onnx)
        _keep_abstention(arguments.run, beside)
    print("\n".join([f"written to {folder}", *lines]))


def _run_here(arguments: argparse.Namespace, folder: Path) -> None:
    best = arguments.best or next(iter(BEST))
    points = 0.5 if arguments.allow_points is None else arguments.allow_points
    require(points >= 0, "--allow-points", f"{points:g}", allowed="0 or more")
    run = ModelFolder.find(arguments.run)
    where = str(arguments.run)
    # Each form is compared with fp32 on the CPU, where an answer depends on no other row.
    any_predictor = load_predictor(arguments.run, "cpu", Precision.fp32)
    any_predictor.require_exportable(where, run.settings()["model"]["kind"], onnx=True)
    predictor = as_measurable(any_predictor, where)
    require(
        arguments.rows is not None,
        "--for here",
        "needs labelled rows",
        hint="Name their file with --rows FILE.",
    )
    _require_onnx()
    with (
        _complete_folder(folder) as beside,
        input_file(arguments, "export", arguments.rows) as file,
    ):
        table = predictor.open(file, "export", choose_reading(arguments))
        # Scored first, so that mistakes in the rows are found before minutes pass in quantising.
        scored = predictor.score_table(table, FileOptions(), [predictor], lambda rows: None)
        predictor.export_run(arguments.run, beside, folder, onnx=True)
        _keep_abstention(arguments.run, beside)
        left_out = quantise(beside, predictor.rows(table, FileOptions()))
        machine = f"{table.name}, {processor_name()}, {torch.get_num_threads()} threads"
        print("\n".join([*left_out, machine, HEAD]))
        forms = measure_forms(
            predictor, scored, beside, table, lambda line: print(line, flush=True)
        )
        chosen = choose(forms, best, points, predictor.labels.problem)
        about = {
            "best": best,
            "points": points,
            "licence": arguments.licence or "",
            "scored": scored.counts["rows"],
            "file": Path(table.name).name,
            **_read_model_card(run.path.parent),
        }
        write_best(beside, predictor, forms, chosen, about)
    print("\n".join([*remarks(forms, chosen, best), f"written to {folder}"]))


def _keep_abstention(run: Path, folder: Path) -> None:
    """Copy what tells which answers may be given at which error."""
    for pattern in ("abstention.*", "intervals.*"):
        for file in ModelFolder.find(run).path.glob(pattern):
            shutil.copy(file, folder)


def _read_model_card(run: Path) -> dict[str, Any]:
    """What the model card says of the run: its name, its data, and the rows of each split."""
    # an exported `model` folder may lie without its run
    summary = read_summary(run) if (run / "summary.json").is_file() else {}
    data = summary.get("data") or {}
    name = summary.get("experiment") or run.resolve().name
    rows = data.get("rows")
    counts = rows.items() if isinstance(rows, dict) else ()
    return {
        "name": str(name),
        "data": Path(str(data.get("source", "a table"))).name,
        "rows": {split: count for split, count in counts if type(count) is int},
    }


def _require_onnx() -> None:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    require(
        not missing,
        "--onnx",
        f"needs the package {', '.join(missing)}",
        hint="Install it with pip install 'flatout[onnx]'.",
    )


@contextmanager
def _complete_folder(folder: Path) -> Iterator[Path]:
    """A new folder to write into, which is renamed to `folder` at the end.

    After an error it is removed, so a folder of that name is always complete.
    """
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    require(
        is_free,
        "--out",
        f"{folder} exists",
        hint="Name another folder with --out, or remove this one.",
    )
    target = folder.resolve()
    beside = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        beside.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            "--out",
            f"cannot write {folder}: {error.strerror}",
            hint="Name a folder that you may write to.",
        ) from None
    try:
        yield beside
        if target.exists():
            target.rmdir()
        beside.rename(target)
    except (OSError, SafetensorError) as error:
        if _is_about_reading(error, (beside, target)):
            raise UserError(
                str(error.filename),
                f"cannot be read: {error.strerror}",
                hint="See who may read it, or name another run.",
            ) from None
        # each library writes by itself, and this is what all of them raise on a full disk
        raise UserError(
            "--out",
            f"cannot write {folder}: {first_line(error)}",
            hint="Name a folder where there is room, and which you may write.",
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _is_about_reading(
    error: OSError | SafetensorError, written: Sequence[Path]
) -> TypeGuard[OSError]:
    """Whether an error names a file elsewhere than in the folders that are being written."""
    if not isinstance(error, OSError) or error.filename is None or error.errno in REFUSALS:
        return False
    named = Path(error.filename).absolute()
    return not any(map(named.is_relative_to, written))
