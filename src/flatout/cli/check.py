"""`python -m flatout check SOURCE`: what a run would find in its data, in seconds and before any
training.

Takes the settings of a run in the same words (`data.label=stars`), and ends with the command that
trains on the data. Exit code 2 where a run would end with an error, 1 with `--strict` where there
is a warning, else 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.markup import escape

from flatout.bits.recognise import has_encodings
from flatout.bits.settings import BitsDataConfig
from flatout.cli.words import quote_letters, quoted
from flatout.data.checks.findings import Level, counted, lines_of
from flatout.data.checkup import check, check_recordings
from flatout.data.sequences.settings import SequenceDataConfig, SequenceProblem
from flatout.data.text import TextDataConfig
from flatout.distributed.limits import keep_freed_memory
from flatout.errors import EXIT_CODE, UserError, require

Settings = TypeVar("Settings")
_OF_TEXTS = {"text", "label", "problem"}
"""Settings that say that a table is one of texts."""
OF_RECORDINGS = "data=sequence"
"""The word by which a run's data are recordings, as the command that a check ends with has it."""
_MARKS = {
    Level.error: "[red]error[/red]  ",
    Level.warning: "[yellow]warning[/yellow]",
    Level.note: "note   ",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s SOURCE [data.KEY=VALUE ...] [--strict] [--json]"
    text = (
        "a file, a quoted pattern, a folder with one file per split or one folder per class, or a"
        " name of the Hub."
    )
    text += " data.KEY=VALUE sets the data as in training."
    parser.add_argument("words", nargs="*", metavar="SOURCE", help=text)
    parser.add_argument(
        "--strict", action="store_true", help="exit code 1 where there is a warning"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(arguments: argparse.Namespace) -> None:
    is_named = OF_RECORDINGS in arguments.words
    key, source, settings = _parted([word for word in arguments.words if word != OF_RECORDINGS])
    keep_freed_memory()
    names = {word.partition("=")[0].removeprefix("data.").partition(".")[0] for word in settings}
    of_recordings = {each.name for each in fields(SequenceDataConfig)} - {
        each.name for each in fields(TextDataConfig)
    }
    problems_of_recordings = {f"data.problem={problem}" for problem in SequenceProblem}
    are_recordings = is_named or names & of_recordings or problems_of_recordings & set(settings)
    of_bits = {each.name for each in fields(BitsDataConfig)} - {
        each.name for each in fields(TextDataConfig)
    }
    kind: type = TextDataConfig
    look: Callable[[Any], Any] = check
    if are_recordings:
        kind = SequenceDataConfig
        look = check_recordings
    elif names & (of_bits - {"sample"}) or (not names & _OF_TEXTS and has_encodings(source)):
        from flatout.bits.checkup import check_bits  # imports torch: for bit strings alone

        kind = BitsDataConfig
        look = check_bits
    found = look(read_settings(kind, settings, **{key: source}))
    if arguments.json:
        print(json.dumps(found.as_dict(), indent=1, ensure_ascii=False))
    else:
        show(found, found.command(key, quoted(source), settings))
    if found.count(Level.error):
        sys.exit(EXIT_CODE)
    if arguments.strict and found.count(Level.warning):
        sys.exit(1)


def _parted(words: list[str]) -> tuple[str, str, list[str]]:
    """The key of the source, the source, and the settings around it."""
    sources = [
        word for word in words if not word.startswith(("data.", "+data.")) or "=" not in word
    ]
    settings = [word.removeprefix("+") for word in words if word not in sources]
    hint = "Write python -m flatout check SOURCE data.KEY=VALUE."
    named = [setting for setting in settings if setting.startswith(("data.source=", "data.train="))]
    if not sources and len(named) == 1:
        key, _, source = named[0].removeprefix("data.").partition("=")
        return key, source.strip("'\""), [setting for setting in settings if setting not in named]
    require(
        bool(sources),
        "check",
        "no SOURCE",
        allowed="a file, a folder, or a name of the Hub",
        hint=hint,
    )
    if len(sources) > 1:
        raise UserError("check", f"what is {sources[1]!r} beside {sources[0]!r}?", hint=hint)
    if named:
        raise UserError(
            named[0].partition("=")[0], "SOURCE is what is checked", hint="Leave it out."
        )
    names_splits = any(
        setting.startswith(("data.validation=", "data.test=")) for setting in settings
    )
    return "train" if names_splits else "source", sources[0], settings


def read_settings(kind: type[Settings], words: Sequence[str], **given: Any) -> Settings:
    """Settings of data from words such as `data.clean.leaks=drop`, which Hydra reads as it does for
    training.
    """
    try:
        root = OmegaConf.create({"data": OmegaConf.structured(kind)})
        for name, value in given.items():
            OmegaConf.update(root, f"data.{name}", value)
        for word in OverridesParser.create().parse_overrides(
            [quote_letters(word) for word in words]
        ):
            _set(root, word)
        found: Any = OmegaConf.to_object(root.data)
        return found
    except (HydraException, OmegaConfBaseException):
        from flatout.cli.composing import explain_errors  # imports torch: for a mistake alone

        with explain_errors():
            raise


def _set(root: DictConfig, word: Override) -> None:
    key = word.get_key_element()
    group = key.rpartition(".")[0]
    require(
        key.startswith("data."),
        "command line",
        f"cannot read {word.input_line!r}",
        hint="Write data.KEY=VALUE.",
    )
    require(
        not word.is_sweep_override(),
        key,
        "several values for one check",
        hint=f"Write '{key}=[FIRST,SECOND]'.",
    )
    require(
        OmegaConf.is_dict(OmegaConf.select(root, group)), key, f"{group} is no group of settings"
    )
    is_group = is_dataclass(OmegaConf.get_type(OmegaConf.select(root, key)))
    require(
        not is_group or isinstance(word.value(), dict),
        key,
        "is a group of settings",
        hint=f"Name one of them: {key}.NAME=VALUE.",
    )
    OmegaConf.update(root, key, word.value())


def show(found: Any, command: str) -> None:
    """Print what matters most last, where the eye is."""
    console = Console(soft_wrap=True, highlight=False)
    remarks = sorted(
        found.remarks, key=lambda remark: list(_MARKS).index(remark.level), reverse=True
    )
    for remark, line in zip(remarks, lines_of(remarks), strict=True):
        console.print(f"{_MARKS[remark.level]} {escape(line)}")
    for line in found.lines():
        console.print(escape(line))
    errors, warnings = found.count(Level.error), found.count(Level.warning)
    counts = f"{counted(errors, 'error')}, {counted(warnings, 'warning')}"
    console.print(f"{counts}{'; to train: ' + escape(command) if command and not errors else ''}")
