"""`python -m flatout predict RUN FILE`: predict each row of a file, in its order.

Rows are read, answered and written by the block, so memory stays flat however long the file is. A
run on texts answers classes, one on recordings their samples. A run on bit strings answers 2-grams
and, with `--rebuild`, the texts that they may come from.

With `--out FOLDER/` each file gets a file of answers (`answer_folder.py`), and `--on` spreads the
files over processes or machines.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from flatout.cli.answer_folder import answer_files
from flatout.cli.run_arguments import (
    FILES,
    add_computing,
    add_reading,
    choose_reading,
    file_options,
    input_file,
    load_predictors,
)
from flatout.data.checks.findings import counted
from flatout.data.store.progress import Progress
from flatout.data.tables.output import CONLL, CONLL_U, FORMATS, block_writer
from flatout.data.tables.reading import ReadingConfig
from flatout.data.tables.sources import files_in
from flatout.distributed import engine
from flatout.errors import require
from flatout.files import home_expanded
from flatout.inference.fingerprint import describe_drift
from flatout.inference.model_folder import WEIGHTS, ModelFolder
from flatout.inference.run_predictor import FileOptions, RunPredictor
from flatout.run_log import print_note

_MANY = "Write --out FOLDER/ for a folder of answers."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN", help="a finished run's folder")
    add(
        "file",
        metavar="FILE",
        help=f"{FILES} with the rows, or a folder of recordings; -: standard input",
    )
    add("--text", metavar="COLUMN", help="column of the texts (default: the run's)")
    add("--top-k", metavar="N", type=int, default=0, help="also the N likeliest labels of each row")
    text = "leave unsure answers out: of the others at most so many are wrong, as 5%% or 0.05"
    add("--at-error", metavar="SHARE", help=text)
    add("--bits", metavar="COLUMN", help="column of the encodings, for a run on bit strings")
    add("--rebuild", action="store_true", help="also rebuild texts from the 2-grams of encodings")
    add_reading(parser)
    add_computing(parser)
    text = (
        f"{', '.join(FORMATS)}, of tags {CONLL}, of parts of speech {CONLL_U} (default: csv on"
        " standard output); FOLDER/: a file of answers for each file"
    )
    add("--out", metavar="FILE", help=text)
    engine.add_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    if (parts := engine.parts_of(arguments, may_be_here=False)) is None:
        rows = _answer_part(arguments, *engine.part_of(arguments.part or "1/1"))
    else:
        require(_is_folder(arguments.out), "--on", "is for many files", hint=_MANY)
        answer_part = partial(_answer_part, arguments)
        rows = sum(engine.on_ray(answer_part, parts, Path(arguments.out), uses_gpu=True))
    if arguments.out is not None:
        print(f"written to {arguments.out}: {counted(rows, 'row')}")


def _answer_part(arguments: argparse.Namespace, number: int, count: int) -> int:
    """Answer part `number` of `count` of the files, and return how many rows it has.

    Of files a to e, part 2 of 2 has b and d. A single file is one part.
    """
    predictors = load_predictors(arguments)
    options = file_options(arguments)
    _refuse_unknown_options(options, predictors[0])
    if options.at_error is not None:
        for predictor in predictors:
            predictor.leave_out_unsure(options.at_error)
    reading = choose_reading(arguments)
    if _is_folder(arguments.out):
        answer_one = partial(answer, predictors=predictors, options=options, reading=reading)
        files = files_in(arguments.file, "FILE")
        _warn_of_inner_folders(arguments.file)
        of_part = slice(number - 1, None, count)
        recipe = _recipe_of_answers(arguments, options)
        with input_file(arguments, "predict"):
            rows = answer_files(files, Path(arguments.out), answer_one, of_part, recipe)
    else:
        require(arguments.part is None, "--part", "is of many files", hint=_MANY)
        with input_file(arguments, "predict") as file:
            rows = answer(file, arguments.out, predictors, options, reading)
    for line in predictors[0].notes():
        print_note(line)
    return rows


def _refuse_unknown_options(options: FileOptions, predictor: RunPredictor) -> None:
    """Refuse an option that has no effect on this run, such as `--bits` to one on texts."""
    require(options.top_k >= 0, "--top-k", f"{options.top_k}", allowed="1 or more")
    for name in ("text", "top_k", "at_error", "bits", "rebuild"):
        require(
            name in predictor.options or not getattr(options, name),
            f"--{name.replace('_', '-')}",
            f"this run answers {predictor.answers_to}",
            hint="Leave it out.",
        )


def _warn_of_inner_folders(folder: str) -> None:
    """Say that folders inside a folder of files are left out: their files are easily missed."""
    inner = [path.name for path in home_expanded(folder).glob("[!.]*/") if path.is_dir()]
    if inner:
        print_note(f"{folder}: folders in it are not read: {', '.join(inner[:3])}")


def _recipe_of_answers(arguments: argparse.Namespace, options: FileOptions) -> dict[str, Any]:
    """All that answers depend on but the rows; a folder answered with another is refused."""
    weights = pa.memory_map(str(ModelFolder.find(arguments.run).path / WEIGHTS)).read_buffer()
    return {
        "run": Path(arguments.run).resolve().name,
        "weights": xxhash.xxh3_64_hexdigest(weights),
        "exact": arguments.exact,
        "precision": arguments.precision,
        **{name: value for name, value in asdict(options).items() if value},
        "read": arguments.read,
        **({"with": arguments.answer_with} if arguments.answer_with else {}),
    }


def _is_folder(out: str | None) -> bool:
    return out is not None and (out.endswith("/") or Path(out).is_dir())


def answer(
    file: str,
    out: str | None,
    predictors: list[RunPredictor],
    options: FileOptions,
    reading: ReadingConfig,
) -> int:
    """Answer the rows of a file, and return how many there are."""
    table = predictors[0].open(file, "predict", reading)
    is_conll = out is not None and Path(out).suffix in (CONLL, CONLL_U)
    formats = predictors[0].formats
    with block_writer(out, reads=file, formats=formats) as write, Progress() as progress:
        advance = progress.task("predicting")
        rows = 0
        num_given = 0
        num_answers = 0
        unlike = list[NDArray[Any]]()
        replaced = list[str]()
        for answered in predictors[0].answer_table(table, options, predictors):
            write(answered.sentences if is_conll else answered.block)
            advance(answered.done)
            rows += answered.block.num_rows
            num_given += answered.num_given
            num_answers += answered.num_answers
            if answered.unlike is not None:
                unlike.append(answered.unlike)  # two bytes a row
            replaced = answered.replaced
        # Raised while the answers are being written, so that an older file of that name stays.
        require(
            rows > 0, "FILE", f"{table.name}: no row to answer", hint="Name a file that holds some."
        )
    if replaced:
        print_note(
            f"{table.name}: {', '.join(replaced)} left out: the answers have columns of that name"
        )
    if unlike and (line := describe_drift(np.concatenate(unlike))):
        print_note(f"{table.name}: {line}")
    if (abstention := predictors[0].abstention) is not None:
        counts = f"{num_given:,} of {num_answers:,} answers are given"
        print_note(f"{table.name}: {counts}; {abstention.promise()}")
    return rows
