"""`python -m flatout audit …`: what keeps the score of a data set from rising.

It may be wrong labels, too few rows, hard rows, or luck. The command takes the words of `python -m
train`, or the folder of a run, whose data it reads. Linear models are trained in folds. For a run,
its own model is trained in folds too; with `model.pretrained` an encoder reads the texts.
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
import time
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.cli.train import start_measuring
from flatout.cli.typed import require_typed_again
from flatout.cli.words import is_of_training, with_secrets_typed
from flatout.errors import UserError, about_settings, as_seconds, check_settings, require, setting
from flatout.files import read_modest
from flatout.masking import mask_words
from flatout.run_log import print_line

if TYPE_CHECKING:  # heavy modules are imported after the command line is read
    from flatout.audit.network_view import TrainInFolds
    from flatout.audit.texts import TextViews
    from flatout.config import RunConfig

NEXT_ROWS = "next_rows.csv"
# Words that are settings of an audit; all others are settings of its data, or a run's folder.
_NAMES = ("folds", "rows", "column", "out", "unlabelled", "top", "for")
_NUMBERS = ("folds", "rows", "top")  # those that are whole numbers
# Words of a run that are kept where its classes are not trusted: those of its data and encoder.
_OF_DATA = (
    "data=",
    "data.",
    "task=",
    "experiment=",
    "--config-dir=",
    "model=",
    "model.pretrained=",
)
# Settings are composed as for a training, which needs a task and a model that fit the data. An
# audit reads neither, so you need not type them: `data.problem=tags` brings `task=tagging`.
_IMPLIED = {
    "data.problem=tags": ("task=tagging", "model=transformer"),
    "data=tagged_tweets": ("task=tagging", "model=transformer"),
    "data.problem=label": ("model=rnn",),
    "data.pair=true": ("model=transformer",),
    "data=sequence": ("task=sequence", "model=rnn"),
    "data=cells": ("task=sequence", "model=rnn"),
    "data=bits": ("task=grams", "model=bitmlp"),
    "data=people": ("task=grams", "model=bitmlp"),
}


@dataclass(kw_only=True, slots=True)
class AuditConfig:
    """Settings of an audit, which are typed as words; `time` is typed as `for`."""

    folds: int = setting(
        5, "Folds that the quick model answers, each by a model of the others.", least=2, most=50
    )
    rows: int = setting(20_000, "Most texts or bit strings looked at, drawn at random.", least=40)
    column: str | None = setting(
        None, "A column by whose values scores are parted, too.", example="author"
    )
    out: str = setting("audit", "Folder of suspects.csv or worst.csv, and audit.html.")
    unlabelled: str | None = setting(
        None, "Texts, of which next_rows.csv says which to label next.", example="FILE"
    )
    top: int = setting(200, "So many rows to label next.", least=1)
    time: str = setting(
        "10m", "How long a run's model may train in folds, or model.pretrained=FOLDER read."
    )

    def __post_init__(self) -> None:
        check_settings(self)
        as_seconds(self.time, "for")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s RUN | data.source=FILE [key=value ...]"
    parser.add_argument(
        "words", metavar="WORD", nargs="*", help="a run's folder, or data settings as for training"
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    about = about_settings(AuditConfig)
    examples = dict[str, str]()
    for field in fields(AuditConfig):
        examples[field.name] = (
            f"{_word_of(field.name)}={about[field.name].example or field.default}"
        )
    parser.epilog = "\n".join(
        f"{examples[name]:<18} {setting_of.does}" for name, setting_of in about.items()
    )


def run(arguments: argparse.Namespace) -> None:
    config, words = _split_words(arguments.words)
    summary = dict[str, Any]()
    if words and ("=" not in words[0] or Path(words[0]).is_dir()):
        words, summary = _read_run(Path(words[0]), words[1:])
    words += _imply_words(words)
    command = shlex.join(["python", "-m", "flatout", "audit", *mask_words(arguments.words)])
    start_measuring(words, lambda settings, _: audit(settings, config, command, summary))


def _split_words(words: list[str]) -> tuple[AuditConfig, list[str]]:
    """The settings of the audit, and other words: `data=bits folds=3` → folds 3; `data=bits`."""
    typed = dict[str, Any]()
    others = list[str]()
    for word in words:
        key, _, value = word.partition("=")
        if key in _NAMES:
            typed["time" if key == "for" else key] = _as_number(key, value)
        else:
            others.append(word)
    return AuditConfig(**typed), others


def _word_of(name: str) -> str:
    """How a setting is typed: `for` is a keyword of Python, so no field has that name."""
    return "for" if name == "time" else name


def _as_number(key: str, value: str) -> str | int:
    """The value of a word, as a number where its setting is one."""
    if key not in _NUMBERS:
        return value
    require(value.lstrip("-").isdecimal(), key, f"{value!r} does not fit", allowed="a whole number")
    return int(value)


def _read_run(folder: Path, more_words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """The words that a run was trained with and those typed after it, and the run's summary."""
    from flatout.cli.settings import as_word
    from flatout.report.summary import read_summary
    from flatout.run.answers import settable_answers

    file = folder / "overrides.txt"
    require(
        file.is_file(),
        "audit",
        f"no run in {folder}" if folder.is_dir() else f"no such folder: {folder}",
        hint="Name the folder of a run, or data settings: data.source=FILE.",
    )
    summary = read_summary(folder)
    words_of_run = read_modest(file).splitlines()
    words = [word for word in words_of_run if is_of_training(word)]
    words = with_secrets_typed(words, more_words, "audit")
    # A `_target_` names code of the folder's author, which an audit of a folder does not run.
    if any("_target_" in word or "optim.optimizer=" in word for word in words_of_run):
        print_line("network: left out: the run has classes of its own")
        words = [word for word in words_of_run if word.lstrip("+").startswith(_OF_DATA)]
        # Without its training time the run's own model takes no part in the folds.
        summary["training"] = None
    # What `tune=auto` measured is part of the run, and the audit must not measure it again.
    words += [f"{key}={as_word(value)}" for key, value in settable_answers(summary).items()]
    require_typed_again(words, more_words, "audit")
    return [*(word for word in words if word not in more_words), *more_words], summary


def _imply_words(words: list[str]) -> list[str]:
    """Words that only a training asks for, but for those whose setting is typed."""
    typed = {word.partition("=")[0].lstrip("+") for word in words}
    if "experiment" in typed:
        return []
    for word, implied in _IMPLIED.items():
        if word in words:
            return [other for other in implied if other.partition("=")[0] not in typed]
    return []


def audit(settings: RunConfig, config: AuditConfig, command: str, summary: dict[str, Any]) -> None:
    """Audit the data of some settings; `summary`: that of the run, empty where none is named."""
    from flatout.audit.findings import SUSPECTS
    from flatout.audit.number_report import WORST
    from flatout.audit.texts import PAGE
    from flatout.run.kinds import kind_of

    settings.require_ours(
        "audit",
        "reads no data of your own",
        hint="Name data.source=FILE.",
    )
    began = time.perf_counter()
    folder = Path(config.out)
    reads_texts = kind_of(settings.data).keeps_rows
    _refuse_unused(settings, config)
    table = folder / (SUSPECTS if reads_texts else WORST)
    _require_writable(folder)
    require(
        not table.exists(),
        "out",
        f"{table} is there already",
        hint=f"Name another: out=FOLDER; {table.name} may hold what you decided.",
    )
    measure = _audit_texts if reads_texts else _audit_numbers
    measure(settings, config, command, summary)
    print_line(f"{table}, {folder / PAGE}: {time.perf_counter() - began:.0f} s")


def _refuse_unused(settings: RunConfig, config: AuditConfig) -> None:
    """Refuse settings of an audit that do nothing for this kind of data."""
    from flatout.data.problem import Problem
    from flatout.run.kinds import kind_of

    usual = AuditConfig()
    kind = kind_of(settings.data)
    require(
        kind.rows != "sequences" or config.rows == usual.rows,
        "rows",
        "all recordings are read in an audit of them",
        hint="Leave it out.",
    )
    unused = list[str]()
    if not kind.keeps_rows:
        unused = ["unlabelled", "top", "time", "column"]
    elif settings.data.problem is Problem.tags:
        unused = ["unlabelled", "top"]
    for name in unused:
        require(
            getattr(config, name) == getattr(usual, name),
            _word_of(name),
            "is for texts with one class a row",
            hint="Leave it out.",
        )
    require(
        config.top == usual.top or config.unlabelled is not None or not kind.keeps_rows,
        "top",
        "says how many rows of unlabelled= to label next",
        hint="Name them: unlabelled=FILE.",
    )


def _require_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made, before anything is measured."""
    parents = (folder.absolute(), *folder.absolute().parents)
    nearest = next(parent for parent in parents if parent.exists())
    try:
        # by trying: some file systems refuse what their permissions allow
        with tempfile.TemporaryDirectory(dir=nearest, prefix=".flatout-"):
            pass
    except OSError:
        raise UserError(
            "out", f"cannot write to {folder}", hint="Name another: out=FOLDER."
        ) from None


def _require_same_source(summary: dict[str, Any], source: str) -> None:
    """Refuse other data than the run's, where a run is audited."""
    of_run = (summary.get("data") or {}).get("source")
    require(
        of_run in (None, source),
        "audit",
        f"the run read {of_run}, these settings read {source}",
        hint="Start it where the run was started, or name data.source=FILE.",
    )


def _audit_texts(
    settings: RunConfig, config: AuditConfig, command: str, summary: dict[str, Any]
) -> None:
    from flatout.audit.next_rows import write_next_rows
    from flatout.audit.read_rows import read_audit_rows, read_unlabelled
    from flatout.audit.texts import measure_texts, report_texts
    from flatout.data.tables.output import explain_disk_errors

    folder = Path(config.out)
    rows = read_audit_rows(settings.data, config.folds, config.rows, config.column)
    _require_same_source(summary, rows.files[0])
    unlabelled = list[str]()
    if config.unlabelled is not None:
        unlabelled = read_unlabelled(settings.data, config.unlabelled)
    run_s = (summary.get("training") or {}).get("seconds")
    views = _choose_views(settings, config, run_s)
    max_length = settings.data.max_length
    measured = measure_texts(rows, config.folds, max_length, views, print_line)
    with explain_disk_errors(folder, "out"):
        report_texts(measured, config.folds, folder, command, print_line)
    if config.unlabelled is not None:
        path = folder / NEXT_ROWS
        with explain_disk_errors(path, "out"):
            count = write_next_rows(rows, unlabelled, config.unlabelled, config.top, path)
        print_line(f"{path}: {count:,} rows of {config.unlabelled} to label next")


def _choose_views(settings: RunConfig, config: AuditConfig, run_s: float | None) -> TextViews:
    """The run's own model in folds, where the run took `run_s`, and a pretrained encoder."""
    from flatout.audit.texts import TextViews
    from flatout.models.contract import is_pretrained
    from flatout.run.folds import answers_in_folds

    limit_s = as_seconds(config.time, "for") or 0.0
    train_in_folds: TrainInFolds | None = None
    if run_s:
        train_in_folds = partial(
            answers_in_folds, settings, run_s=run_s, limit_s=limit_s, say=print_line
        )
    return TextViews(
        train_in_folds=train_in_folds,
        encoder=settings.model if is_pretrained(settings.model) else None,
        precision=settings.precision,
        limit_s=limit_s,
    )


def _audit_numbers(
    settings: RunConfig, config: AuditConfig, command: str, summary: dict[str, Any]
) -> None:
    from flatout.audit.number_report import WORST, describe_numbers, write_numbers
    from flatout.audit.number_rows import read_number_rows
    from flatout.audit.numbers import measure_numbers
    from flatout.audit.texts import PAGE
    from flatout.data.tables.output import explain_disk_errors
    from flatout.run.kinds import kind_of

    data = kind_of(settings.data).data.of(settings.data)
    data.setup()
    _require_same_source(summary, data.info.source)
    measured = measure_numbers(read_number_rows(data, config.rows), config.folds)
    for line in describe_numbers(measured):
        print_line(line)
    folder = Path(config.out)
    title = f"Audit of {data.info.source}"
    with explain_disk_errors(folder, "out"):
        folder.mkdir(parents=True, exist_ok=True)
        write_numbers(measured, title, command, folder / WORST, folder / PAGE)
