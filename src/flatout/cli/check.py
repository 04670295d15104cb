"""`python -m flatout check SOURCE`: what a run would find in its data, in seconds and before any training.

Takes the settings of a run in the same words (`data.label=stars`), and ends with the command that trains on the data.
Exit code 2 where a run would end with an error, 1 with `--strict` where there is a warning, else 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.markup import escape

from flatout.data.checks.checkup import check
from flatout.data.checks.findings import Level, counted, lines_of
from flatout.data.problem import Problem
from flatout.data.sequences.checkup import check_recordings
from flatout.data.sequences.choices import SequenceProblem
from flatout.data.sequences.settings import SequenceDataConfig
from flatout.data.text import TextDataConfig
from flatout.engine.allocator import keep_freed_memory
from flatout.errors import EXIT_CODE, UserError
from flatout.inference.dotted_settings import with_overrides

_STRICT_CODE = 1
_MARKS = {Level.error: "[red]error[/red]  ", Level.warning: "[yellow]warning[/yellow]", Level.note: "note   "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s SOURCE [data.KEY=VALUE ...] [--strict] [--json]"
    parser.add_argument(
        "words",
        nargs="*",
        metavar="SOURCE",
        help="a file, a quoted pattern, a folder with one file per split or one folder per class, or a name of the Hub."
        " data.KEY=VALUE sets the data as in training.",
    )
    parser.add_argument("--strict", action="store_true", help="exit code 1 where there is a warning")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(arguments: argparse.Namespace) -> None:
    source, settings = _parted(arguments.words)
    keep_freed_memory()
    key = "train" if _names_parts(settings) else "source"
    kind = kind_of(settings)
    found = kind.check(with_overrides(kind.settings, settings, "data", **{key: source}))
    if arguments.json:
        print(json.dumps(found.as_dict(), indent=1, ensure_ascii=False))
    else:
        show(found, found.command(key, source, settings))
    if found.count(Level.error):
        sys.exit(EXIT_CODE)
    if arguments.strict and found.count(Level.warning):
        sys.exit(_STRICT_CODE)


def _parted(words: list[str]) -> tuple[str, list[str]]:
    """The source, and the settings around it."""
    sources = [word for word in words if not word.startswith(("data.", "+data.")) or "=" not in word]
    settings = [word.removeprefix("+") for word in words if word not in sources]
    hint = "Write python -m flatout check SOURCE data.KEY=VALUE."
    if not sources:
        raise UserError("check", "no SOURCE", allowed="a file, a folder, or a name of the Hub", hint=hint)
    if len(sources) > 1:
        raise UserError("check", f"what is {sources[1]!r} beside {sources[0]!r}?", hint=hint)
    for name in ("source", "train"):
        if any(setting.startswith(f"data.{name}=") for setting in settings):
            raise UserError(f"data.{name}", "SOURCE is what is checked", hint="Leave it out.")
    return sources[0], settings


@dataclass(frozen=True, slots=True)
class Checked:
    """Data that can be checked; beside the table of kinds, which needs torch."""

    settings: type
    problems: type[StrEnum]
    check: Callable[[Any], Any]


_TEXTS = Checked(TextDataConfig, Problem, check)
_OTHERS = (Checked(SequenceDataConfig, SequenceProblem, check_recordings),)


def kind_of(words: list[str]) -> Checked:
    """Texts, unless a setting is one that only other data have."""
    names = {word.partition("=")[0].removeprefix("data.").partition(".")[0] for word in words}
    for other in _OTHERS:
        own = {each.name for each in fields(other.settings)} - {each.name for each in fields(_TEXTS.settings)}
        if names & own or {f"data.problem={problem}" for problem in other.problems} & set(words):
            return other
    return _TEXTS


def _names_parts(settings: list[str]) -> bool:
    """Whether other splits are named, so that SOURCE is the training rows alone."""
    return any(setting.startswith(("data.validation=", "data.test=")) for setting in settings)


def show(found: Any, command: str) -> None:
    """Print what matters most last, where the eye is."""
    console = Console(soft_wrap=True, highlight=False)
    remarks = sorted(found.remarks, key=lambda remark: list(_MARKS).index(remark.level), reverse=True)
    for remark, line in zip(remarks, lines_of(remarks), strict=True):
        console.print(f"{_MARKS[remark.level]} {escape(line)}")
    for line in found.lines():
        console.print(escape(line))
    errors, warnings = found.count(Level.error), found.count(Level.warning)
    counts = f"{counted(errors, 'error')}, {counted(warnings, 'warning')}"
    console.print(f"{counts}{'; to train: ' + escape(command) if command and not errors else ''}")
