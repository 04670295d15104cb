"""`python -m flatout predict RUN FILE`: every row of a file with what the run answers, in the file's order.

Rows are read, answered and written by the block, so memory stays flat however long the file is. A run on texts answers
classes; a run on bit strings answers 2-grams and, on request, the texts they may have come from; one on recordings
answers their samples.
"""

from __future__ import annotations

import argparse
import sys

from flatout.cli.rows import FILES, add_computing, file_options, load_predictors, readable
from flatout.data.store.progress import Progress
from flatout.data.tables.output import FORMATS, block_writer
from flatout.errors import UserError, require

_OPTIONS = ("text", "top_k", "bits", "rebuild", "names")


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
    predictor, options = predictors[0], file_options(arguments)
    if options.top_k < 0:
        raise UserError("--top-k", f"{options.top_k}", allowed="1 or more")
    with readable(arguments.file, "predict") as file:
        table = predictor.open(file, "predict")
        for name in (name for name in _OPTIONS if name not in predictor.options):
            what = f"this run answers {predictor.answers_to}"
            require(not getattr(options, name), f"--{name.replace('_', '-')}", what, hint="Leave it out.")
        with block_writer(arguments.out) as write, Progress() as progress:
            advance, rows, replaced = progress.task("predicting"), 0, list[str]()
            for found in predictor.answer_table(table, options, predictors):
                write(found.block)
                advance(found.done)
                rows += found.block.num_rows
                replaced = found.replaced
    if replaced:
        names = ", ".join(replaced)
        print(f"{table.name}: {names} left out: the answers have columns of that name", file=sys.stderr)
    for line in predictor.notes():
        print(line, file=sys.stderr)
    if arguments.out is not None:
        print(f"written to {arguments.out}: {rows:,} rows")
