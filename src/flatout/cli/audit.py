"""`python -m flatout audit …`: why the score stopped: labels, rows, the next thousand rows, and
luck.

Takes the words of `python -m train`, or the folder of a run, whose data it looks at. Linear models
are trained in folds; beside them the run's own model is, or a pretrained encoder reads the texts.
"""

from __future__ import annotations

import argparse
import os
import shlex
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.cli.train import start_measuring
from flatout.cli.words import is_of_training, with_secrets_typed
from flatout.errors import about_settings, as_seconds, check_settings, require, setting
from flatout.masking import mask_words
from flatout.run_log import print_line

if TYPE_CHECKING:  # heavy modules are imported after the command line is read
    from flatout.config import RunConfig

PAGE = "audit.html"
NEXT_ROWS = "next_rows.csv"
_NAMES = ("folds", "rows", "column", "out", "unlabelled", "top", "for")
_OF_DATA = (
    "data=",
    "data.",
    "task=",
    "experiment=",
    "--config-dir=",
    "model=",
    "model.pretrained=",
)
"""Words of a run that are about its data, and its pretrained encoder."""
_IMPLIED = {
    **dict.fromkeys(
        ("data.problem=tags", "data=tagged_tweets"), ("task=tagging", "model=transformer")
    ),
    "data.problem=label": ("model=rnn",),
    "data.pair=true": ("model=transformer",),
    **dict.fromkeys(("data=sequence", "data=cells"), ("task=sequence", "model=rnn")),
    **dict.fromkeys(("data=bits", "data=people"), ("task=grams", "model=bitmlp")),
}  # what only a training would ask for


@dataclass(kw_only=True, slots=True)
class AuditConfig:
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
    words = {
        each.name: f"{each.name}={about[each.name].example or each.default}"
        for each in fields(AuditConfig)
    }
    words["time"] = words["time"].replace("time", "for")
    parser.epilog = "\n".join(f"{words[name]:<18} {each.does}" for name, each in about.items())


def run(arguments: argparse.Namespace) -> None:
    own = {
        key: value
        for key, _, value in (word.partition("=") for word in arguments.words)
        if key in _NAMES
    }
    words = [word for word in arguments.words if word.partition("=")[0] not in own]
    config = AuditConfig(
        **{"time" if key == "for" else key: _number(key, value) for key, value in own.items()}
    )
    of = dict[str, Any]()
    if words and ("=" not in words[0] or Path(words[0]).is_dir()):
        from flatout.cli.settings import as_word
        from flatout.report.summary import read_summary

        folder = Path(words[0])
        file = folder / "overrides.txt"
        what = f"no run in {folder}" if folder.is_dir() else f"no such folder: {folder}"
        require(
            file.is_file(),
            "audit",
            what,
            hint="Name the folder of a run, or data settings: data.source=FILE.",
        )
        of = read_summary(folder)
        theirs = file.read_text(encoding="utf-8").splitlines()
        tuned = ((of.get("tune") or {}).get("values") or {}).items()
        kept = [word for word in theirs if is_of_training(word)]
        kept = with_secrets_typed(kept, words[1:], "audit")
        # a class of one's own, which nobody trusts here
        if any("_target_" in word for word in theirs):
            print_line("network: left out: the run has classes of its own")
            kept = [word for word in theirs if word.lstrip("+").startswith(_OF_DATA)]
            of["training"] = None
        words = [*kept, *(f"{key}={as_word(value)}" for key, value in tuned), *words[1:]]
    given = {word.partition("=")[0].lstrip("+") for word in words}
    implied = next((implied for word, implied in _IMPLIED.items() if word in words), ())
    words += [word for word in implied if not {word.partition("=")[0], "experiment"} & given]
    command = shlex.join(["python", "-m", "flatout", "audit", *mask_words(arguments.words)])
    start_measuring(words, lambda settings, _: audit(settings, config, command, of))


def _number(key: str, value: str) -> Any:
    if key not in ("folds", "rows", "top"):
        return value
    require(value.lstrip("-").isdecimal(), key, f"{value!r} does not fit", allowed="a whole number")
    return int(value)


def audit(settings: RunConfig, config: AuditConfig, command: str, of: dict[str, Any]) -> None:
    from flatout.audit.findings import SUSPECTS
    from flatout.audit.number_report import WORST
    from flatout.data.problem import Problem
    from flatout.run.kinds import kind_of

    require(
        not settings.has_own_parts,
        "audit",
        "reads no data of your own",
        hint="Name data.source=FILE.",
    )
    began = time.perf_counter()
    folder = Path(config.out)
    kind = kind_of(settings.data)
    reads_texts = kind.keeps_rows
    is_usual = kind.rows != "sequences" or config.rows == AuditConfig().rows
    require(is_usual, "rows", "all recordings are read in an audit of them", hint="Leave it out.")
    measure, name = (_audit_texts, SUSPECTS) if reads_texts else (_audit_numbers, WORST)
    others = (
        ["unlabelled", "top"] if not reads_texts or settings.data.problem is Problem.tags else []
    )
    for each in others if reads_texts else [*others, "time", "column"]:
        is_usual = getattr(config, each) == getattr(AuditConfig(), each)
        key = each.replace("time", "for")
        require(is_usual, key, "is for texts with one class a row", hint="Leave it out.")
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    is_writable = place.is_dir() and os.access(place, os.W_OK)
    table = folder / name
    require(is_writable, "out", f"cannot write to {folder}", hint="Name another: out=FOLDER.")
    require(
        not table.exists(),
        "out",
        f"{table} is there already",
        hint=f"Name another: out=FOLDER; {name} may hold what you decided.",
    )
    measure(settings, config, command, of)
    print_line(f"{table}, {folder / PAGE}: {time.perf_counter() - began:.0f} s")


def _audit_texts(
    settings: RunConfig, config: AuditConfig, command: str, of: dict[str, Any]
) -> None:
    import numpy as np

    from flatout.audit.encoder_view import read_encoder
    from flatout.audit.findings import SUSPECTS, find_findings
    from flatout.audit.measure import measure, scale_answers
    from flatout.audit.next_rows import write_next_rows
    from flatout.audit.read_rows import read_audit_rows, read_unlabelled
    from flatout.audit.rows import deal_folds
    from flatout.audit.text_report import describe_texts, write_suspects, write_text_page
    from flatout.run.folds import answers_in_folds

    folder = Path(config.out)
    is_used = config.top == AuditConfig().top or config.unlabelled is not None
    require(
        is_used,
        "top",
        "says how many rows of unlabelled= to label next",
        hint="Name them: unlabelled=FILE.",
    )
    rows = read_audit_rows(settings.data, config.folds, config.rows, config.column)
    _require_same(of, rows.files[0])
    waiting = (
        None if config.unlabelled is None else read_unlabelled(settings.data, config.unlabelled)
    )
    limit_s = as_seconds(config.time, "for") or 0.0
    length = settings.data.max_length
    beside = None
    view = "network"
    if run_s := (of.get("training") or {}).get("seconds"):
        taught = (rows.texts, np.array(rows.classes, object)[rows.labels])
        folds = deal_folds(rows, config.folds)
        if rows.sentences is not None:
            taught = (rows.sentences.words, rows.sentences.tags)
            folds = rows.sentences.find_folds(rows, folds)
        answers = answers_in_folds(
            settings, *taught, rows.classes, folds, run_s, limit_s, print_line
        )
        if answers is not None:
            answers = rows.average_words(answers) if rows.is_tagged else answers
            if unread := int((~answers.any(axis=1)).sum()):
                print_line(
                    f"network: {unread:,} rows lie beyond data.max_length; words alone judge them"
                )
            beside = scale_answers(answers)
    # an encoder's; no other model has it
    is_pretrained = getattr(settings.model, "pretrained", None) is not None
    if beside is None and is_pretrained and not rows.is_tagged:
        view = "encoder"
        beside = read_encoder(
            settings.model, list(rows.texts), length, settings.precision, limit_s, print_line
        )
    measured = measure(rows, config.folds, length, print_line, beside, view)
    for line in describe_texts(measured, config.folds):
        print_line(line)
    findings = find_findings(measured, str(folder / SUSPECTS))
    print_line("" if findings else "no finding is worth 0.3 points")
    for number, finding in enumerate(findings, 1):
        print_line(f"{number}. {finding.line()}")
    folder.mkdir(parents=True, exist_ok=True)
    write_suspects(measured, folder / SUSPECTS)
    write_text_page(measured, findings, f"Audit of {rows.files[0]}", command, folder / PAGE)
    if waiting is not None and config.unlabelled is not None:
        count = write_next_rows(rows, waiting, config.unlabelled, config.top, folder / NEXT_ROWS)
        print_line(f"{folder / NEXT_ROWS}: {count:,} rows of {config.unlabelled} to label next")


def _require_same(of: dict[str, Any], found: str) -> None:
    asked = (of.get("data") or {}).get("source")
    hint = "Start it where the run was started"
    require(
        asked in (None, found),
        "audit",
        f"the run read {asked}, these settings read {found}",
        hint=f"{hint}, or name data.source=FILE.",
    )


def _audit_numbers(
    settings: RunConfig, config: AuditConfig, command: str, of: dict[str, Any]
) -> None:
    from flatout.audit.number_report import WORST, describe_numbers, write_numbers
    from flatout.audit.number_rows import read_number_rows
    from flatout.audit.numbers import measure_numbers
    from flatout.run.kinds import kind_of

    data = kind_of(settings.data).data.of(settings.data)
    data.setup()
    _require_same(of, data.info.source)
    measured = measure_numbers(read_number_rows(data, config.rows), config.folds)
    for line in describe_numbers(measured):
        print_line(line)
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    write_numbers(measured, f"Audit of {data.info.source}", command, folder / WORST, folder / PAGE)
