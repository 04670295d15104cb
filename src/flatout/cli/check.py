"""`python -m flatout check SOURCE`: what a run would find in its data, in seconds and before any training.

Takes the settings of a run in the same words (`data.label=stars`), and ends with the command that trains on the data.
Exit code 2 where a run would end with an error, 1 with `--strict` where there is a warning, else 0.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys

from rich.console import Console
from rich.markup import escape

from flatout.cli.check_recordings import are_of_recordings, lines_of_recordings, train_command
from flatout.data.checks.checkup import Checkup, check
from flatout.data.checks.findings import Level, Remark, counted, lines_of
from flatout.data.checks.lengths import Lengths
from flatout.data.problem import Problem
from flatout.data.sequences.checkup import SequenceCheckup, check_recordings
from flatout.data.sequences.settings import SequenceDataConfig
from flatout.data.text import TextDataConfig
from flatout.engine.allocator import keep_freed_memory
from flatout.errors import EXIT_CODE, UserError
from flatout.inference.dotted_settings import with_overrides

_BAR = 40
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
    found: Checkup | SequenceCheckup
    if are_of_recordings(settings):
        found = check_recordings(with_overrides(SequenceDataConfig, settings, "data", **{key: source}))
    else:
        found = check(with_overrides(TextDataConfig, settings, "data", **{key: source}))
    if arguments.json:
        print(json.dumps(found.as_dict(), indent=1, ensure_ascii=False))
    elif isinstance(found, SequenceCheckup):
        show_recordings(found, train_command(key, source, settings))
    else:
        show(found, f"python -m train data.{key}={shlex.quote(source)} {shlex.join(settings)}".rstrip())
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


def _names_parts(settings: list[str]) -> bool:
    """Whether other splits are named, so that SOURCE is the training rows alone."""
    return any(setting.startswith(("data.validation=", "data.test=")) for setting in settings)


def show(found: Checkup, command: str) -> None:
    """Print what matters most last, where the eye is."""
    console = Console(soft_wrap=True, highlight=False)
    _show_remarks(console, found.remarks)
    for split, lengths in found.lengths.items():
        console.print(f"\n{split}: {lengths.line()}")
        for line in bars(lengths):
            console.print(f"  {line}")
    rows = ", ".join(f"{split} {count:,}" for split, count in found.rows.items())
    console.print(f"\nrows for {rows or 'nothing'}")
    more = " model=transformer task=mlm" if found.problem is Problem.none else ""
    _show_counts(console, found, command + more if found.problem is not Problem.tags else "")


def show_recordings(found: SequenceCheckup, command: str) -> None:
    """The same of recordings."""
    console = Console(soft_wrap=True, highlight=False)
    _show_remarks(console, found.remarks)
    for line in ["", *lines_of_recordings(found), ""]:
        console.print(escape(line))
    _show_counts(console, found, command)


def _show_remarks(console: Console, remarks: list[Remark]) -> None:
    remarks = sorted(remarks, key=lambda remark: list(_MARKS).index(remark.level), reverse=True)
    for remark, line in zip(remarks, lines_of(remarks), strict=True):
        console.print(f"{_MARKS[remark.level]} {escape(line)}")


def _show_counts(console: Console, found: Checkup | SequenceCheckup, command: str) -> None:
    errors, warnings = found.count(Level.error), found.count(Level.warning)
    counts = f"{counted(errors, 'error')}, {counted(warnings, 'warning')}"
    console.print(f"{counts}{'; to train: ' + escape(command) if command and not errors else ''}")


def bars(lengths: Lengths) -> list[str]:
    """A bar for each doubling of the length."""
    histogram = lengths.as_dict()["histogram"]
    most = max((bar["rows"] for bar in histogram), default=1)
    width = max((len(f"{bar['from']:,}–{bar['to']:,}") for bar in histogram), default=0)
    return [
        f"{bar['from']:,}–{bar['to']:,}".rjust(width)
        + f"  {'█' * max(1, round(_BAR * bar['rows'] / most))} {bar['rows']:,}"
        for bar in histogram
    ]
