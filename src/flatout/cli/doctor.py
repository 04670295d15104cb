"""`python -m flatout doctor RUN`: what limited a run, and what would fix it.

`--confirm` compares the verdict's override and the original, as short runs in processes of their
own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
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
from flatout.cli.words import is_of_training, key_of, with_secrets_typed
from flatout.distributed.processes import OUTPUT, warm_start
from flatout.errors import EXIT_CODE, RunBroke, UserError, require
from flatout.perf.measure import apart
from flatout.perf.measure.intervals import SpeedupInterval, speedup, take_turns
from flatout.perf.notes import measured_before
from flatout.perf.verdict.confirmation import (
    OverrideConfirmation,
    keep_confirmation,
    read_confirmations,
)
from flatout.perf.verdict.evidence import Evidence
from flatout.perf.verdict.findings import gain_of
from flatout.perf.verdict.gathering import evidence_in
from flatout.perf.verdict.rules import findings, verdict
from flatout.report.closing import plain_table
from flatout.report.summary import read_summary, versions
from flatout.run.run_folder import OVERRIDES, SETTINGS

ROUNDS = 3
_LEAST_STEPS = 60
_MOST_STEPS = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's folder, finished or not")
    parser.add_argument("--json", action="store_true", help="the verdict and its evidence as JSON")
    what = (
        "run the verdict's override and the original in turn, a few hundred steps each, and compare"
    )
    parser.add_argument("--confirm", action="store_true", help=what)
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
    evidence = evidence_in(arguments.run)
    if arguments.json:
        print(json.dumps({"verdict": verdict(evidence), "evidence": asdict(evidence)}, indent=1))
        return
    console = Console(highlight=False)
    found = findings(evidence)
    words = verdict(evidence)
    rows = f"{evidence.rows_per_batch:,.0f} rows a batch, {evidence.batches:,} batches"
    console.print(Text(f"where the time went: {rows}", style="bold"))
    console.print(_time_table(evidence))
    if evidence.tried:
        console.print(Text("\nwhat was tried at its end", style="bold"))
        console.print(_tried_table(evidence))
    console.print(Text("\nverdict", style="bold"))
    console.print(Text(words["sentence"]))
    if known := measured_before(words["override"]):
        console.print(Text(known))
    for other in found[1:]:
        console.print(Text(f"also {other.sentence()}"))
    for kept in read_confirmations(arguments.run):
        console.print(Text(f"confirmed {kept.sentence()}"))


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
            Text(tried.override), f"{tried.rows_per_s:,.0f}", f"{tried.as_was:,.0f}", gain
        )
    return table


def confirm(folder: Path, more: Sequence[str]) -> OverrideConfirmation:
    """Run the override of a run's verdict and the original settings in turn; `more` are words for
    both.
    """
    summary = read_summary(folder)
    evidence = evidence_in(folder)
    found = verdict(evidence)
    words = words_of(folder, summary, more)
    override = found["override"]
    steps = steps_of_a_round(evidence)
    require(
        bool(override),
        str(folder),
        f"nothing to confirm: {found['sentence']}",
        hint="Only an override of the command line can be confirmed.",
    )
    sides = sides_of(words, override, evidence, steps)
    print(
        f"confirm {override}: {ROUNDS} rounds of {steps} steps, in turn with the settings as they"
        " were",
        flush=True,
    )
    check = partial(
        require_same, folder, _settings(folder), {key_of(word) for word in [*more, *words]}
    )
    warm_start()
    with tempfile.TemporaryDirectory() as place:
        before, after = time_in_turn(
            sides, Path(place), ROUNDS, lambda original: check(_settings(original))
        )
    return OverrideConfirmation(
        override=override,
        predicted=predicted(found),
        measured=speedup(before, after),
        steps=steps,
        rates=(tuple(before), tuple(after)),
        device=str(summary["hardware"]["device"]),
        version=versions()["flatout"],
    )


def predicted(found: dict[str, Any]) -> SpeedupInterval | None:
    """The gain that a verdict promises, with its bounds."""
    if found["predicted_gain"] is None:
        return None
    names = ("predicted_gain", "gain_low", "gain_high")
    return SpeedupInterval(*(found[name] for name in names))


def words_of(folder: Path, summary: dict[str, Any], more: Sequence[str]) -> list[str]:
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
        typed = (folder / OVERRIDES).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(
            str(folder / OVERRIDES),
            f"cannot be read: {error.strerror}",
            hint="Without it a run cannot be repeated.",
        ) from None
    answers = (summary.get("tune") or {}).get("values") or {}
    measured = " ".join(f"{name}={as_word(value)}" for name, value in answers.items())
    kept = [word for word in typed if is_of_training(word)]
    kept = with_secrets_typed(kept, more, str(folder))
    quiet = "monitor.progress=false monitor.verdict=false tune=off"
    return with_override([*with_override(kept, measured), *more], quiet)


def steps_of_a_round(evidence: Evidence) -> int:
    """Optimizer steps of each short run: some seconds, and a whole epoch where that is not many
    more.
    """
    step_s = evidence.total_ms * evidence.accumulate / 1000
    steps = min(_MOST_STEPS, max(_LEAST_STEPS, round(3.0 / max(step_s, 1e-6))))
    epoch = math.ceil(evidence.steps / max(evidence.epochs, 1e-9))
    return epoch if steps < epoch <= min(2 * steps, _MOST_STEPS) else steps


def sides_of(words: list[str], override: str, evidence: Evidence, steps: int) -> list[list[str]]:
    """The original and the override, over the same number of rows; only the number of steps ends
    them.
    """
    fixed = max(_LEAST_STEPS, round(steps / _growth(override, evidence)))
    plain = with_override(words, "trainer.max_epochs=1000 checkpoint.patience=null")
    return [
        [*plain, f"++trainer.max_steps={steps}"],
        [*with_override(plain, override), f"++trainer.max_steps={fixed}"],
    ]


def _growth(override: str, evidence: Evidence) -> float:
    values = dict(word.split("=", 1) for word in override.split() if "=" in word)
    if (effective := values.get("data.effective_batch", "null")) != "null":
        return int(effective) / max(1, evidence.effective_batch or 1)
    rows = int(values.get("data.batch_size", evidence.batch_size or 1)) / (evidence.batch_size or 1)
    return rows * int(values.get("data.accumulate", evidence.accumulate)) / evidence.accumulate


def _settings(folder: Path) -> dict[str, Any]:
    try:
        return deciding_settings(yaml.safe_load((folder / SETTINGS).read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        raise UserError(
            str(folder / SETTINGS), "cannot be read", hint="Without it a run cannot be repeated."
        ) from None


def require_same(
    folder: Path, then: dict[str, Any], changed: set[str], now: dict[str, Any]
) -> None:
    """Refuse a run whose settings its words do not give: one from Python, or of files that have
    changed since.
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
    """A command line with an override; `~callbacks.NAME` takes away the words that add that
    callback.
    """
    if override.startswith("~"):
        kept = [word for word in words if not word.startswith(f"+{override[1:]}.")]
        return kept if len(kept) < len(words) else [*words, override]  # a file may have added it
    changed = {key_of(part) for part in override.split()}
    return [*(word for word in words if key_of(word) not in changed), *override.split()]


def train_apart(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """The summary of a run in a process of its own; a mistake there is a mistake here."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    output = folder.with_suffix(".txt")
    try:
        apart.run(
            partial(main, [*words, f"hydra.run.dir={folder}"]), environment={OUTPUT: str(output)}
        )
    except apart.Failed as failed:
        printed = (
            output.read_text(encoding="utf-8", errors="replace").strip() if output.is_file() else ""
        )
        last = printed.splitlines()[-1] if printed else failed.why
        if failed.code == EXIT_CODE:
            raise UserError("", last) from None
        raise RunBroke(f"python -m train {' '.join(words)}: {failed.why}: {last}") from None
    return read_summary(folder)


def time_in_turn(
    sides: Sequence[Sequence[str]],
    place: Path,
    rounds: int,
    check: Callable[[Path], None] | None = None,
) -> list[list[float]]:
    """Rows a second of each command line in each round; `check` sees the folder of the very first
    run.
    """
    numbers = itertools.count(1)

    def rate(words: Sequence[str]) -> float:
        number = next(numbers)
        folder = place / f"run-{number}"
        evidence = Evidence.from_dict(train_apart(words, folder)["evidence"])
        if check is not None and number == 1:
            check(folder)
        # all is counted but the first few steps
        return 1000 * evidence.rows_per_batch / evidence.total_ms

    return take_turns([partial(rate, words) for words in sides], least=rounds)
