"""`python -m flatout ladder`: measure what each optimisation brings on your data and machine.

A ladder begins with a program as people usually write it; each rung adds one optimisation. The
command reads its words, finds or chooses the ladder, and prints the table; `ladder/` measures.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from flatout.cli.train import start_measuring
from flatout.cli.words import HELP, conf_folder, conf_options
from flatout.distributed.processes import warm_start
from flatout.errors import UserError, as_seconds, nearest, require
from flatout.ladder.rungs import Ladder, find_ladder, read_ladder
from flatout.masking import mask_words

if TYPE_CHECKING:  # heavy modules are imported after the command line is read
    from flatout.config import RunConfig
    from flatout.run.job import RunJob

# Words of this command; others are settings of a run.
_OWN = re.compile(r"\+*(ladder|for|seeds)=(.*)", re.DOTALL)
# The kind of data that each option of `data=` has, to compare it with the ladder's.
_KIND_OF_OPTION = dict.fromkeys(("text", "headlines", "tweets", "tagged_tweets"), "text")
_KIND_OF_OPTION |= {"bits": "bits", "people": "bits", "sequence": "sequence", "cells": "sequence"}
_MODEL_OF_PROGRAM = {
    "headlines": "bilstm",
    "tweets": "transformer",
    "bloom": "bitmlp",
    "battery": "rnn",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [+ladder=NAME] [for=10m] [seeds=3] [key=value ...]"
    parser.add_argument(
        "words", metavar="WORD", nargs="*", help="+ladder=NAME and any key=value, as for training"
    )
    parser.add_argument(
        "--config-dir", metavar="FOLDER", help="settings of yours, its ladder/ among them"
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = HELP["ladder"]


@dataclass(frozen=True, slots=True)
class LadderWords:
    """What the words of a ladder say."""

    named: Ladder | None  # None: one is chosen for the data
    folders: list[Path]  # with ladders
    budget_s: float
    seeds: int
    settings: list[str]
    """Words of `python -m train` that all of its runs share."""


def read_words(words: Sequence[str], config_dir: str | None) -> LadderWords:
    """`UserError` for a ladder that does not exist, or does not fit the other words."""
    options = {word[1]: word[2] for word in map(_OWN.fullmatch, words) if word}
    typed = [word for word in words if not _OWN.fullmatch(word)]
    _require_settings(typed)
    conf = conf_options(config_dir)
    folders = [folder / "ladder" for folder in (*map(Path, conf[1:]), conf_folder())]
    ladder = None
    if "ladder" in options:
        path = find_ladder(options["ladder"], folders)
        ladder = read_ladder(path)
        require_kind(ladder, typed)
    seeds = options.get("seeds", "0")
    require(seeds.isdecimal(), "seeds", repr(seeds), allowed="0, 2, 3, …")
    budget_s = as_seconds(options.get("for", "8m"), "for")
    assert budget_s is not None, "only a word that is left out has no seconds"
    # The ladder's settings come first, so that typed words change them.
    shared = [] if ladder is None else list(ladder.settings)
    return LadderWords(ladder, folders, budget_s, int(seeds), [*conf, *shared, *typed])


def run(arguments: argparse.Namespace) -> None:
    warm_start()  # it imports beside us what the measuring processes will need
    said = read_words(arguments.words, arguments.config_dir)
    conf = conf_options(arguments.config_dir)
    command = shlex.join(["python", "-m", "flatout", "ladder", *conf, *mask_words(arguments.words)])
    asked = {"budget_s": said.budget_s, "seeds": said.seeds, "command": command}
    start_measuring(said.settings, partial(climb, said.named, said.folders, asked))


def _require_settings(typed: Sequence[str]) -> None:
    """Refuse a word that sets nothing, such as the name of a ladder without `+ladder=`."""
    for word in typed:
        if "=" not in word and not word.startswith(("-", "~")):
            names = sorted(path.stem for path in (conf_folder() / "ladder").glob("*.yaml"))
            near = nearest(word, names)
            hint = f"Did you mean +ladder={near}?" if near else "Write key=value, as for training."
            raise UserError(
                f"ladder {word}", "sets nothing", allowed=f"ladders: {', '.join(names)}", hint=hint
            )


def require_kind(ladder: Ladder, typed: Sequence[str]) -> None:
    """Refuse an option of other data or of another model than the ladder is for."""
    # Composed with it, the ladder's own settings would fail with a key that you never typed.
    hint = "Leave +ladder out: rungs for your data are then chosen."
    for word in typed:
        group, _, option = word.lstrip("+").partition("=")
        if group == "data" and _KIND_OF_OPTION.get(option, ladder.kind) != ladder.kind:
            raise UserError(
                "+ladder",
                (
                    f"{ladder.name} needs {ladder.kind} data, and data={option} is"
                    f" {_KIND_OF_OPTION[option]} data"
                ),
                hint=hint,
            )
        if group == "model" and option != _MODEL_OF_PROGRAM.get(ladder.program, option):
            raise UserError("+ladder", f"{ladder.name} has no rungs for model={option}", hint=hint)


def climb(
    named: Ladder | None,
    places: list[Path],
    asked: dict[str, Any],
    config: RunConfig,
    words: list[str],
) -> None:
    """Measure the named ladder, or one that is chosen for these data, and print its table.

    `places`: folders with ladders. `asked`: what `run_ladder` takes by name: budget, seeds,
    command.
    """
    from flatout.files import numbered
    from flatout.ladder.case import choose_ladder
    from flatout.ladder.closing import closing_lines, ladder_table
    from flatout.ladder.run_ladder import run_ladder
    from flatout.run.claimed_folders import name_folder
    from flatout.run.job import RunJob

    config.require_ours("ladder", "there is none for parts of your own", hint="Leave them out.")
    ladder = named or choose_ladder(config.data, config.model, places)
    if named is None:
        print(
            f"rungs chosen for your data: {', '.join(rung.name for rung in ladder.rungs)}",
            flush=True,
        )
    # Two ladders may begin in the same second: the first to make a folder has it.
    for folder in numbered(name_folder(Path(config.output) / f"ladder_{ladder.name}").absolute()):
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    results = run_ladder(ladder, RunJob(config), partial(compose_run, words), folder, **asked)
    console = Console(highlight=False)
    console.width = max(console.width, 150)  # piped into a file it would be cut at 80
    console.print(ladder_table(results))
    for line in closing_lines(results):
        console.print(Text(line))
    console.print(Text(f"ladder folder: {folder}"), soft_wrap=True)


def compose_run(words: list[str], more: Sequence[str]) -> RunJob:
    """The run of these words with the words of one rung after them."""
    from hydra import compose

    from flatout.cli.boundary import read_config
    from flatout.cli.composing import explain_errors
    from flatout.run.job import RunJob

    all_words = [*words, *more]
    with explain_errors():
        return RunJob(read_config(compose("train", overrides=all_words), all_words))
