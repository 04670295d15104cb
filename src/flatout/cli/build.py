"""`python -m flatout build …`: the store of a run's data, built without training, where no GPU waits for it.

Takes the words of `python -m train`, and the settings that decide the store are the same: the run finds it. What a kill
has left is removed, and a store that is there is opened.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flatout.cli.train import start_measuring
from flatout.errors import require
from flatout.run_log import print_line

if TYPE_CHECKING:  # heavy modules are imported after the command line is read
    from flatout.config import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s data.source=FILE [+experiment=NAME] [key=value ...]"
    parser.add_argument("words", metavar="WORD", nargs="*", help="+experiment=NAME and any key=value, as for training")


def run(arguments: argparse.Namespace) -> None:
    start_measuring(arguments.words, build)


def build(config: RunConfig, overrides: Sequence[str]) -> None:
    """Build or open the store, with the lines that a run would print of its data."""
    from flatout.run.kinds import kind_of
    from flatout.run_log import PrintLog

    hint = "Call prepare_data of your DataModule."
    require(not config.has_own_parts, "build", "a module or data of your own have no store", hint=hint)
    data = kind_of(config.data).data.of(config.data, seed=config.seed, log=PrintLog())
    data.prepare_data()
    data.setup()
    info = data.info
    print_line(f"store: {info.store.folder}; python -m train with the same data.… settings opens it")
