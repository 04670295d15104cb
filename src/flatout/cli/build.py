"""`python -m flatout build …`: build the store of a run's data before training, without a GPU.

It takes the words of `python -m train`; a run with the same data settings then opens this store. A
store that is there already is opened. Texts are encoded in units, and a build that was killed
continues with the unit it began. `--part 2/8` encodes only a part of the units, for jobs that share
a disk; a build without it then lists all units in a store.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from flatout.cli.train import add_words, start_measuring
from flatout.data.checks.findings import counted
from flatout.distributed import engine
from flatout.errors import require
from flatout.run_log import print_line

if TYPE_CHECKING:  # heavy modules are imported after the command line is read
    from flatout.config import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s data.source=FILE [+experiment=NAME] [key=value ...]"
    add_words(parser)
    engine.add_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    start_measuring(arguments.words, partial(build, arguments=arguments))


def build(config: RunConfig, overrides: Sequence[str], arguments: argparse.Namespace) -> None:
    """Build or open the store, and print what a run would print about its data."""
    from flatout.data.store.cache import Cache
    from flatout.data.texts.parts import (
        compare_with_part_before,
        encode_part,
        why_rows_are_encoded_again,
    )
    from flatout.run.kinds import kind_of
    from flatout.run_log import RunLog

    config.require_ours(
        "build",
        "a module or data of your own have no store",
        hint="Call prepare_data of your DataModule.",
    )
    kind = kind_of(config.data)
    parts = engine.parts_of(arguments, may_be_here=True)
    where = "--part" if arguments.part else "--on"
    require(
        kind.in_parts or not (arguments.part or parts),
        where,
        "only texts without tags are built in parts",
        hint="Build without it: one process is enough.",
    )
    part = None if arguments.part is None else engine.part_of(arguments.part)
    if kind.in_parts and (why := why_rows_are_encoded_again(config.data)):
        print_line(f"more rows later encode all rows again: {why}")
    if part is not None:
        number, count = part
        if line := compare_with_part_before(config.data, count):
            print_line(line)
        units, before = encode_part(config.data, number, count)
        print_line(
            f"part {number}/{count}: {counted(units, 'unit')}, {before} of them encoded before"
        )
        print_line("when all parts are there, the same command without --part writes their store")
        return
    if parts is not None:
        # named in full: the usual cache of another machine is another folder
        cache = Cache(config.data.cache).folder.absolute()
        encode = partial(encode_part, replace(config.data, cache=str(cache)))
        if arguments.on == engine.Place.here:
            encoded = engine.in_processes(encode, parts)
        else:
            encoded = engine.on_ray(encode, parts, cache)
        units = sum(units_of_part for units_of_part, _ in encoded)
        print_line(f"{arguments.on}: {counted(units, 'unit')} in {counted(len(encoded), 'part')}")
    data = kind.data.of(config.data, seed=config.seed, log=RunLog())
    data.prepare_data()
    data.setup()
    print_line(
        f"store: {data.info.store.folder}; python -m train with the same data.… settings opens it"
    )
