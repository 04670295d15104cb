"""`python -m flatout build …`: the store of a run's data, built without training, where no GPU
waits for it.

Takes the words of `python -m train`, and the settings that decide the store are the same: the run
finds it. A store that is there is opened. Texts are encoded by the unit, and a build that was
killed continues with the unit it began: `--part 2/8` encodes a part of them alone, for jobs that
share a disk, and a build without it lists them in a store.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from flatout.cli.train import start_measuring
from flatout.data.checks.findings import counted
from flatout.distributed import engine
from flatout.errors import require
from flatout.run_log import print_line

if TYPE_CHECKING:  # heavy modules are imported after the command line is read
    from flatout.config import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s data.source=FILE [+experiment=NAME] [key=value ...]"
    parser.add_argument(
        "words",
        metavar="WORD",
        nargs="*",
        help="+experiment=NAME and any key=value, as for training",
    )
    engine.add_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    start_measuring(arguments.words, partial(build, arguments=arguments))


def build(config: RunConfig, overrides: Sequence[str], arguments: argparse.Namespace) -> None:
    """Build or open the store, with the lines that a run would print of its data."""
    from flatout.data.store.cache import Cache
    from flatout.data.text_preparation import (
        compare_with_part_before,
        encode_part,
        why_rows_are_encoded_again,
    )
    from flatout.run.kinds import kind_of
    from flatout.run_log import RunLog

    require(
        not config.has_own_parts,
        "build",
        "a module or data of your own have no store",
        hint="Call prepare_data of your DataModule.",
    )
    kind = kind_of(config.data)
    parts = engine.parts_of(arguments, may_be_here=True)
    where = "--part" if arguments.part else "--on" if parts else ""
    require(
        kind.in_parts or not where,
        where,
        "parts are of texts without tags",
        hint="Build without it: one process is enough.",
    )
    part = None if arguments.part is None else engine.part_of(arguments.part)
    if kind.in_parts and (why := why_rows_are_encoded_again(config.data)):
        print_line(f"more rows later encode all rows again: {why}")
    if part is not None:
        number, count = part
        if line := compare_with_part_before(config.data, count):
            print_line(line)
        units, found = encode_part(config.data, number, count)
        print_line(
            f"part {number}/{count}: {counted(units, 'unit')}, {found} of them encoded before"
        )
        print_line("when all parts are there, the same command without --part writes their store")
        return
    if parts is not None:
        # each machine has a usual cache of its own
        place = Cache(config.data.cache).folder.absolute()
        do = partial(encode_part, replace(config.data, cache=str(place)))
        on = str(arguments.on)
        each = (
            engine.in_processes(do, parts)
            if on == engine.Place.here
            else engine.on_ray(do, parts, place)
        )
        print_line(
            f"{on}: {counted(sum(units for units, _ in each), 'unit')} in"
            f" {counted(len(each), 'part')}"
        )
    data = kind.data.of(config.data, seed=config.seed, log=RunLog())
    data.prepare_data()
    data.setup()
    print_line(
        f"store: {data.info.store.folder}; python -m train with the same data.… settings opens it"
    )
