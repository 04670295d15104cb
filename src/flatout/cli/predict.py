"""`python -m flatout predict RUN FILE`: every row of a file with what the run answers, in the
file's order.

Rows are read, answered and written by the block, so memory stays flat however long the file is. A
run on texts answers classes, one on recordings their samples, one on bit strings 2-grams and, on
request, texts they may have come from.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pyarrow as pa
import xxhash

from flatout.cli.answer_folder import answer_files
from flatout.cli.run_arguments import (
    FILES,
    add_computing,
    add_reading,
    file_options,
    load_predictors,
    readable,
    reading_of,
)
from flatout.data.store.progress import Progress
from flatout.data.tables.output import FORMATS, block_writer
from flatout.data.tables.reading import ReadingConfig
from flatout.data.tables.sources import files_in
from flatout.distributed import engine
from flatout.errors import require
from flatout.inference.run_predictor import WEIGHTS, FileOptions, ModelFolder, RunPredictor

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
    add("--bits", metavar="COLUMN", help="column of the encodings, for a run on bit strings")
    add("--rebuild", action="store_true", help="also rebuild texts from the 2-grams of encodings")
    add_reading(parser)
    add_computing(parser)
    text = (
        f"{', '.join(FORMATS)} (default: csv on standard output); FOLDER/: a file of answers for"
        " each file"
    )
    add("--out", metavar="FILE", help=text)
    engine.add_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    if (parts := engine.parts_of(arguments, may_be_here=False)) is None:
        rows = _answered(arguments, *engine.part_of(arguments.part or "1/1"))
    else:
        require(_is_folder(arguments.out), "--on", "is for many files", hint=_MANY)
        rows = sum(
            engine.on_ray(partial(_answered, arguments), parts, Path(arguments.out), uses_gpu=True)
        )
    if arguments.out is not None:
        print(f"written to {arguments.out}: {rows:,} rows")


def _answered(arguments: argparse.Namespace, number: int, count: int) -> int:
    predictors = load_predictors(arguments)
    options = file_options(arguments)
    require(options.top_k >= 0, "--top-k", f"{options.top_k}", allowed="1 or more")
    for name in (
        name for name in ("text", "top_k", "bits", "rebuild") if name not in predictors[0].options
    ):
        require(
            not getattr(options, name),
            f"--{name.replace('_', '-')}",
            f"this run answers {predictors[0].answers_to}",
            hint="Leave it out.",
        )
    reading = reading_of(arguments)
    if _is_folder(arguments.out):
        answer_one = partial(answer, predictors=predictors, options=options, way=reading)
        files = files_in(arguments.file, "FILE")
        own = slice(number - 1, None, count)
        if folders := [
            each.name for each in Path(arguments.file).expanduser().glob("[!.]*/") if each.is_dir()
        ]:
            print(
                f"{arguments.file}: folders in it are not read: {', '.join(folders[:3])}",
                file=sys.stderr,
            )
        weights = pa.memory_map(str(ModelFolder.find(arguments.run).path / WEIGHTS)).read_buffer()
        asked = {
            "run": Path(arguments.run).resolve().name,
            "weights": xxhash.xxh3_64_hexdigest(weights),
        }
        asked |= {"exact": arguments.exact, "precision": arguments.precision}
        asked |= {name: value for name, value in asdict(options).items() if value} | {
            "read": arguments.read
        }
        with readable(arguments, "predict"):
            rows = answer_files(files, Path(arguments.out), answer_one, own, asked)
    else:
        require(arguments.part is None, "--part", "is of many files", hint=_MANY)
        with readable(arguments, "predict") as file:
            rows = answer(file, arguments.out, predictors, options, reading)
    for line in predictors[0].notes():
        print(line, file=sys.stderr)
    return rows


def _is_folder(out: str | None) -> bool:
    return out is not None and (out.endswith("/") or Path(out).is_dir())


def answer(
    file: str,
    out: str | None,
    predictors: list[RunPredictor],
    options: FileOptions,
    way: ReadingConfig,
) -> int:
    """Answer a file; the number of its rows."""
    table = predictors[0].open(file, "predict", way)
    with block_writer(out, reads=file) as write, Progress() as progress:
        advance = progress.task("predicting")
        rows = 0
        replaced = list[str]()
        for found in predictors[0].answer_table(table, options, predictors):
            write(found.block)
            advance(found.done)
            rows += found.block.num_rows
            replaced = found.replaced
        # Raised while the answers are being written, so that an older file of that name stays.
        require(
            rows > 0, "FILE", f"{table.name}: no row to answer", hint="Name a file that holds some."
        )
    if replaced:
        print(
            f"{table.name}: {', '.join(replaced)} left out: the answers have columns of that name",
            file=sys.stderr,
        )
    return rows
