"""`python -m flatout doctor RUN`: what limited a run, and what would fix it.

`--confirm` trains the original settings and the verdict's override in turn, and compares their rows
a second. Each time it is a short run in another process. This file has the command lines of these
runs; how long they are and what is kept of them is in `perf/verdict/confirmation.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flatout.callbacks.clock import PARTS
from flatout.checkpoints.same_run import deciding_settings
from flatout.cli.settings import as_word
from flatout.cli.train import main
from flatout.cli.typed import require_typed_again
from flatout.cli.words import is_of_training, key_of, with_secrets_typed
from flatout.distributed.processes import OUTPUT, warm_start
from flatout.errors import EXIT_CODE, RunBroke, UserError, printable, printable_lines, require
from flatout.files import load_yaml, read_modest, values_of
from flatout.perf.measure import apart
from flatout.perf.measure.intervals import speedup, take_turns
from flatout.perf.notes import measured_before
from flatout.perf.verdict.confirmation import (
    OverrideConfirmation,
    count_override_steps,
    count_steps,
    keep_confirmation,
    promised_speedup,
    read_confirmations,
)
from flatout.perf.verdict.evidence import Evidence
from flatout.perf.verdict.findings import gain_of
from flatout.perf.verdict.gathering import evidence_in
from flatout.perf.verdict.rules import findings, verdict
from flatout.report.closing import plain_table
from flatout.report.summary import FILE as SUMMARY
from flatout.report.summary import read_summary, versions
from flatout.run.answers import settable_answers
from flatout.run.claimed_folders import OVERRIDES, SETTINGS

ROUNDS = 3
# keys that a verdict's override may name, beside callbacks to be left out
_OF_VERDICTS = (
    "checkpoint.every_minutes",
    "checkpoint.every_steps",
    "compile",
    "data.accumulate",
    "data.batch_size",
    "data.effective_batch",
    "data.feed",
    "data.workers",
    "model.compute",
    "model.freeze_layers",
    "model.reuse",
    "monitor.flush_every",
    "precision",
    "threads",
    "trainer.check_val_every_n_epoch",
    "trainer.val_check_interval",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's folder, finished or not")
    parser.add_argument("--json", action="store_true", help="the verdict and its evidence as JSON")
    words_of_confirm = (
        "run the verdict's override and the original in turn, a few hundred steps each, and compare"
    )
    parser.add_argument("--confirm", action="store_true", help=words_of_confirm)
    words = "with --confirm: words for both, such as +allow_targets=[mypackage]"
    parser.add_argument("words", metavar="WORD", nargs="*", help=words)


def run(arguments: argparse.Namespace) -> None:
    if arguments.confirm:
        confirmed = confirm(arguments.run, arguments.words)
        for number, (before, after) in enumerate(zip(*confirmed.rates, strict=True), 1):
            print(f"round {number}: {before:,.0f} rows/s as it was, {after:,.0f} with the override")
        print(confirmed.sentence())
        print(f"kept in {keep_confirmation(arguments.run, confirmed)}")
        return
    if arguments.words:
        raise UserError(
            "doctor", f"{arguments.words[0]!r}: words belong to --confirm", hint="Add --confirm."
        )
    if arguments.run.suffix == ".py" or (
        str(arguments.run) == "run" and not arguments.run.exists()
    ):
        raise UserError(
            "doctor",
            f"{arguments.run} is no folder of a run",
            hint="For a script of yours write python -m flatout doctor run train.py.",
        )
    with values_of(arguments.run / SUMMARY):
        show(arguments)


def show(arguments: argparse.Namespace) -> None:
    """Print the verdict of a run, or its values as JSON."""
    evidence = evidence_in(arguments.run)
    if arguments.json:
        print(json.dumps({"verdict": verdict(evidence), "evidence": asdict(evidence)}, indent=1))
        return
    console = Console(highlight=False)
    causes = findings(evidence)
    words = verdict(evidence)
    rows = f"{evidence.rows_per_batch:,.0f} rows a batch, {evidence.batches:,} batches"
    console.print(Text(f"where the time went: {rows}", style="bold"))
    console.print(_time_table(evidence))
    if evidence.tried:
        console.print(Text("\nwhat was tried at its end", style="bold"))
        console.print(_tried_table(evidence))
    console.print(Text("\nverdict", style="bold"))
    console.print(Text(printable_lines(words["sentence"])))
    if known := measured_before(words["override"]):
        console.print(Text(printable_lines(known)))
    for other in causes[1:]:
        console.print(Text(printable_lines(f"also {other.sentence()}")))
    for confirmation in read_confirmations(arguments.run):
        console.print(Text(printable_lines(f"confirmed {confirmation.sentence()}")))


def _time_table(evidence: Evidence) -> Table:
    table = plain_table("part", "ms a batch", "share")
    for part in filter(evidence.ms.get, PARTS):
        table.add_row(part, f"{evidence.ms[part]:.2f}", f"{evidence.share(part):.1%}")
    table.add_row("all", f"{evidence.total_ms:.2f}", "")
    return table


def _tried_table(evidence: Evidence) -> Table:
    table = plain_table("override", "rows/s of the model", "as it was", "the run would be")
    for tried in evidence.tried:
        gain = str(gain_of(evidence, tried))
        table.add_row(
            Text(printable(tried.override)),
            f"{tried.rows_per_s:,.0f}",
            f"{tried.as_was:,.0f}",
            gain,
        )
    return table


def confirm(folder: Path, more: Sequence[str]) -> OverrideConfirmation:
    """Train a run's original settings and the override of its verdict in turn.

    `more`: words that both command lines get.
    """
    summary = read_summary(folder)
    evidence = evidence_in(folder)
    values = verdict(evidence)
    override = values["override"]
    steps = count_steps(evidence)
    require(
        bool(override),
        str(folder),
        f"nothing to confirm: {values['sentence']}",
        hint="Only an override of the command line can be confirmed.",
    )
    words = read_words(folder, summary, more)
    require_typed_again(override.split(), more, str(folder))
    _require_of_a_verdict(override, folder)
    sides = build_sides(words, override, evidence, steps)
    print(
        f"confirm {override}: {ROUNDS} rounds of {steps} steps, in turn with the settings as they"
        " were",
        flush=True,
    )
    settings = _read_settings(folder)
    changed = {key_of(word) for word in [*more, *words]}

    def check_original(short_run: Path) -> None:
        require_same(folder, settings, changed, _read_settings(short_run))

    warm_start()
    with tempfile.TemporaryDirectory() as parent:
        before, after = measure_in_turn(sides, Path(parent), ROUNDS, check_original)
    return OverrideConfirmation(
        override=override,
        predicted=promised_speedup(values),
        measured=speedup(before, after),
        steps=steps,
        rates=(tuple(before), tuple(after)),
        device=str(summary["hardware"]["device"]),
        version=versions()["flatout"],
    )


def _require_of_a_verdict(override: str, folder: Path) -> None:
    """Refuse an override that no verdict names: the summary of a run may come from others."""
    for word in override.split():
        is_callback = word.startswith("~callbacks.") and "=" not in word
        require(
            is_callback or key_of(word) in _OF_VERDICTS,
            str(folder),
            f"its verdict names {word}, which no verdict does",
            hint="Its summary.json was changed: train the run again.",
        )


def read_words(folder: Path, summary: dict[str, Any], more: Sequence[str]) -> list[str]:
    """The command line that trains a run again, from what its folder holds."""
    theirs = (summary.get("versions") or {}).get("flatout")
    ours = versions()["flatout"]
    require(
        theirs == ours,
        str(folder),
        f"trained by flatout {theirs}, this is {ours}: its settings may mean something else",
        hint="Train it again with this version.",
    )
    try:
        typed = read_modest(folder / OVERRIDES).splitlines()
    except OSError as error:
        raise UserError(
            str(folder / OVERRIDES),
            f"cannot be read: {error.strerror}",
            hint="Without it a run cannot be repeated.",
        ) from None
    # The run measured some of its settings. They are typed out, and `tune=off` below keeps the
    # short runs from measuring again: both sides would otherwise train with other answers.
    answers = settable_answers(summary)
    measured = " ".join(f"{name}={as_word(value)}" for name, value in answers.items())
    words = [word for word in typed if is_of_training(word)]
    words = with_secrets_typed(words, more, str(folder))
    quiet = "monitor.progress=false monitor.verdict=false tune=off"
    words = with_override(words, measured)
    require_typed_again(words, more, str(folder))
    return with_override([*(word for word in words if word not in more), *more], quiet)


def build_sides(words: list[str], override: str, evidence: Evidence, steps: int) -> list[list[str]]:
    """The command lines of the original and of the override, over the same number of rows."""
    # Only the number of steps may end them: an epoch's end or a patience would cut one side short.
    plain = with_override(words, "trainer.max_epochs=1000 checkpoint.patience=null")
    override_steps = count_override_steps(override, evidence, steps)
    return [
        [*plain, f"++trainer.max_steps={steps}"],
        [*with_override(plain, override), f"++trainer.max_steps={override_steps}"],
    ]


def _read_settings(folder: Path) -> dict[str, Any]:
    try:
        return deciding_settings(load_yaml(folder / SETTINGS))
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        raise UserError(
            str(folder / SETTINGS), "cannot be read", hint="Without it a run cannot be repeated."
        ) from None


def require_same(
    folder: Path, then: dict[str, Any], changed: set[str], now: dict[str, Any]
) -> None:
    """Refuse a run whose words now give other settings than it had.

    It was started from Python, or a settings file has changed since. `changed`: keys that the
    words set on purpose.
    """
    for key in sorted(then.keys() | now.keys()):
        if then.get(key) != now.get(key) and key not in changed:
            raise UserError(
                str(folder),
                f"its words give other settings: {key} was {then.get(key)} and is {now.get(key)}",
                hint=(
                    "A run from Python, or of a changed file in conf/, cannot be confirmed. Try the"
                    " override there."
                ),
            )


def with_override(words: Sequence[str], override: str) -> list[str]:
    """A command line with an override in the place of what was typed for its keys.

    `a=1 b=2` with `b=3 c=4` → `a=1 b=3 c=4`. With `~callbacks.NAME` the words that add that
    callback are left out.
    """
    if override.startswith("~"):
        kept = [word for word in words if not word.startswith(f"+{override[1:]}.")]
        # where no word adds the callback a file does, and Hydra takes it out
        return kept if len(kept) < len(words) else [*words, override]
    changed = {key_of(part) for part in override.split()}
    return [*(word for word in words if key_of(word) not in changed), *override.split()]


def train_apart(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Train in another process and return the summary of the run.

    A UserError there is raised here; any other end is a RunBroke with the last line it printed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    output = folder.with_suffix(".txt")
    train = partial(main, [*words, f"hydra.run.dir={folder}"])
    try:
        apart.run(train, environment={OUTPUT: str(output)})
    except apart.Failed as failed:
        printed = ""
        if output.is_file():
            printed = output.read_text(encoding="utf-8", errors="replace").strip()
        last = printed.splitlines()[-1] if printed else failed.why
        if failed.code == EXIT_CODE:
            raise UserError("", last) from None
        raise RunBroke(f"python -m train {' '.join(words)}: {failed.why}: {last}") from None
    return read_summary(folder)


def measure_in_turn(
    sides: Sequence[Sequence[str]],
    parent: Path,
    rounds: int,
    check: Callable[[Path], None] | None = None,
) -> list[list[float]]:
    """Rows a second of each command line, one rate a round.

    `check` gets the folder of the first run, so that other settings are found before the rest of
    the rounds are trained.
    """
    numbers = itertools.count(1)

    def measure_rate(words: Sequence[str]) -> float:
        number = next(numbers)
        folder = parent / f"run-{number}"
        evidence = Evidence.from_dict(train_apart(words, folder)["evidence"])
        if check is not None and number == 1:
            check(folder)
        # A run's evidence leaves out its first few steps, which are slower.
        return 1000 * evidence.rows_per_batch / evidence.total_ms

    return take_turns([partial(measure_rate, words) for words in sides], least=rounds)
