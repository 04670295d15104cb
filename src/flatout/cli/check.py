"""`python -m flatout check SOURCE`: what a run would find in its data, before any training.

It takes data settings in the words of training (`data.label=stars`), and ends with the command that
trains on the data. Exit code 2 if a run would end with an error, 1 with `--strict` if there is a
warning, else 0.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

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
from flatout.data.checks.checkup import Checkup, SequenceCheckup, check, check_recordings
from flatout.data.checks.findings import Level, counted, lines_of
from flatout.data.sequences.settings import SequenceDataConfig, SequenceProblem
from flatout.data.texts.settings import TextDataConfig
from flatout.distributed.limits import keep_freed_memory
from flatout.errors import EXIT_CODE, UserError, require

if TYPE_CHECKING:
    from flatout.bits.checkup import BitCheckup

Settings = TypeVar("Settings")
Report: TypeAlias = "Checkup | SequenceCheckup | BitCheckup"
_OF_TEXTS = {"text", "label", "problem"}  # settings that only tables of texts have
OF_RECORDINGS = "data=sequence"  # the word that makes a run's data recordings
_MARKS = {
    Level.error: "[red]error[/red]  ",
    Level.warning: "[yellow]warning[/yellow]",
    Level.note: "note   ",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s SOURCE [data.KEY=VALUE ...] [--strict] [--json]"
    text = (
        "a file, a quoted pattern, a folder with one file per split or one folder per class, or a"
        " name of the Hub. data.KEY=VALUE sets the data as in training."
    )
    parser.add_argument("words", nargs="*", metavar="SOURCE", help=text)
    parser.add_argument(
        "--strict", action="store_true", help="exit code 1 where there is a warning"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(arguments: argparse.Namespace) -> None:
    is_named = OF_RECORDINGS in arguments.words
    key, source, settings = _split_words(
        [word for word in arguments.words if word != OF_RECORDINGS]
    )
    keep_freed_memory()
    # The data are of the kind that alone has one of the typed settings.
    names = {word.partition("=")[0].removeprefix("data.").partition(".")[0] for word in settings}
    of_texts = _names_of_settings(TextDataConfig)
    of_recordings = _names_of_settings(SequenceDataConfig) - of_texts
    of_bits = _names_of_settings(BitsDataConfig) - of_texts - {"sample"}
    problems_of_recordings = {f"data.problem={problem}" for problem in SequenceProblem}
    report: Report
    if is_named or names & of_recordings or problems_of_recordings & set(settings):
        report = check_recordings(read_settings(SequenceDataConfig, settings, **{key: source}))
    elif names & of_bits or (not names & _OF_TEXTS and has_encodings(source)):
        from flatout.bits.checkup import check_bits  # imports torch: for bit strings alone

        report = check_bits(read_settings(BitsDataConfig, settings, **{key: source}))
    else:
        report = check(read_settings(TextDataConfig, settings, **{key: source}))
    if arguments.json:
        print(json.dumps(report.as_dict(), indent=1, ensure_ascii=False))
    else:
        word = quoted(source)
        command = report.command(key, word, settings)
        show(report, command.replace(shlex.quote(word), _quote_for_shell(word)))
    if report.count(Level.error):
        sys.exit(EXIT_CODE)
    if arguments.strict and report.count(Level.warning):
        sys.exit(1)


def _quote_for_shell(word: str) -> str:
    """A word for a shell, readable where it has quotes for Hydra already.

    `'rows-[12].csv'` → `"'rows-[12].csv'"`, where `shlex` makes `''"'"'rows-[12].csv'"'"''`.
    """
    is_plain = "'" in word and not set(word) & set('"$`\\!')
    return f'"{word}"' if is_plain else shlex.quote(word)


def _names_of_settings(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


def _require_of_data(word: str) -> None:
    """Refuse `label=stars` and `model=rnn`: a setting that is none of the data's, or has no `data.`
    before it. A file may have such a name.
    """
    key, is_setting, _ = word.partition("=")
    if not is_setting or not re.fullmatch(r"[+\w.]+", key) or Path(word).exists():
        return
    kinds = (TextDataConfig, SequenceDataConfig, BitsDataConfig)
    hint = "Leave it out: check takes data.KEY=VALUE."
    if any(key.partition(".")[0] in _names_of_settings(kind) for kind in kinds):
        hint = f"Write data.{word}."
    raise UserError("check", f"{word!r} is no setting of the data", hint=hint)


def _split_words(words: list[str]) -> tuple[str, str, list[str]]:
    """The key of the source, the source, and the settings: `a.csv data.label=stars` gives
    ("source", "a.csv", ["data.label=stars"]).
    """
    sources = [
        word for word in words if not word.startswith(("data.", "+data.")) or "=" not in word
    ]
    for word in sources:
        _require_of_data(word)
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
        raise UserError(
            "check", f"two sources: {sources[0]!r} and {sources[1]!r}", allowed="one", hint=hint
        )
    if named:
        raise UserError(
            named[0].partition("=")[0], "SOURCE is what is checked", hint="Leave it out."
        )
    names_splits = any(
        setting.startswith(("data.validation=", "data.test=")) for setting in settings
    )
    return "train" if names_splits else "source", sources[0], settings


def read_settings(kind: type[Settings], words: Sequence[str], **values: Any) -> Settings:
    """Data settings from words such as `data.clean.leaks=drop`, read by Hydra as for training."""
    try:
        root = OmegaConf.create({"data": OmegaConf.structured(kind)})
        for name, value in values.items():
            OmegaConf.update(root, f"data.{name}", value)
        quoted_words = [quote_letters(word) for word in words]
        for override in OverridesParser.create().parse_overrides(quoted_words):
            _set(root, override)
        settings: Any = OmegaConf.to_object(root.data)
        return settings
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


def show(report: Report, command: str) -> None:
    """Print notes, then warnings, then errors: what matters most stands last, where the eye is."""
    console = Console(soft_wrap=True, highlight=False)
    levels = list(_MARKS)
    remarks = sorted(report.remarks, key=lambda remark: -levels.index(remark.level))
    # Of texts a note names all files first, with their folder. Of many recordings each line names
    # the one that it is about, and all in one way.
    lines = lines_of(remarks)
    if isinstance(report, SequenceCheckup):
        lines = [remark.line() for remark in remarks]
    for remark, line in zip(remarks, lines, strict=True):
        console.print(f"{_MARKS[remark.level]} {escape(line)}")
    for line in report.lines():
        console.print(escape(line))
    errors = report.count(Level.error)
    counts = f"{counted(errors, 'error')}, {counted(report.count(Level.warning), 'warning')}"
    console.print(f"{counts}; to train: {escape(command)}" if command and not errors else counts)
