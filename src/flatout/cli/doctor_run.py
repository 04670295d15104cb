"""`python -m flatout doctor run SCRIPT`: what limits the trainings of a user's script.

The script runs in this process as it does by itself. At its end the verdict is printed and kept as
`verdict.json` and a page. With `--against` its pace is compared with that of an earlier training.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from flatout.errors import UserError, require
from flatout.perf.verdict.kept import KeptVerdict, compare_with, paces_to_compare, read_baseline
from flatout.perf.verdict.watched_script import (
    JudgedTraining,
    ScriptWatch,
    cut_traceback,
    run_script,
)
from flatout.run_log import print_line

_SLOWER = 1  # the exit code of a training that is slower than allowed
_WHERE = "doctor run"
_VERDICT = "verdict.json"
_OPTIONS = ("--output", "--against", "--fail-below")
_LARGEST_RATIO = 2.0  # a larger one is a percentage by mistake
_WAITED = 0.05  # fraction of the time without a core, from which on it is printed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "script", type=Path, help="a script with a Trainer of Lightning or transformers"
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, help="the script's own arguments")
    about = "folder of verdict.json and verdict.html (default: doctor)"
    parser.add_argument("--output", type=Path, default=Path("doctor"), metavar="FOLDER", help=about)
    about = "compare steps a second with those in an earlier verdict.json"
    parser.add_argument("--against", type=Path, metavar="FILE", help=about)
    about = "exit with code 1 below this fraction of the earlier steps a second, such as 0.9"
    parser.add_argument("--fail-below", type=float, metavar="RATIO", help=about)


def run(arguments: argparse.Namespace) -> None:
    script: Path = arguments.script
    require(script.is_file(), _WHERE, f"there is no script {script}", hint="Name a file of Python.")
    limit: float | None = arguments.fail_below
    is_ratio = limit is None or 0 < limit < _LARGEST_RATIO
    require(is_ratio, "--fail-below", f"{limit}", allowed="a ratio such as 0.9")
    needs_baseline = limit is not None and arguments.against is None
    require(
        not needs_baseline,
        "--fail-below",
        f"{limit} of nothing",
        hint="Add --against verdict.json.",
    )
    baseline = None if arguments.against is None else read_baseline(arguments.against)
    _require_output(arguments)
    if behind := [word for word in arguments.words if word.partition("=")[0] in _OPTIONS]:
        print_line(f"doctor: {behind[0]} goes to {script}: options of doctor run stand before it")
    watch = ScriptWatch()
    with watch.watching():
        ended_by = run_script(script, arguments.words)
    is_first_rank = os.environ.get("RANK", "0") == "0"
    training = _report(watch.trainings, arguments) if is_first_rank else None
    _end_as_the_script(script, ended_by)
    if baseline is not None and is_first_rank:
        _compare(training, baseline, limit)


def _require_output(arguments: argparse.Namespace) -> None:
    """Refuse an output that is a file, or that would take the place of the baseline."""
    folder: Path = arguments.output
    is_free = folder.is_dir() or not folder.exists()
    require(is_free, "--output", f"{folder} is a file", hint="Name a folder.")
    kept = folder / _VERDICT
    against: Path | None = arguments.against
    is_kept = against is None or not kept.exists() or not kept.samefile(against)
    require(
        is_kept,
        "--against",
        f"{against} would be replaced by the verdict that is compared with it",
        hint="Name another folder: --output FOLDER.",
    )


def _report(trainings: list[JudgedTraining], arguments: argparse.Namespace) -> KeptVerdict | None:
    """Write the verdict of the longest training that has one; None if there was no training."""
    from flatout.report.verdict_page import write_verdict_page

    script: Path = arguments.script
    finished = [training for training in trainings if training.kept is not None]
    if not finished:
        why = "no training in it came to its end" if trainings else "nothing was trained in it"
        print_line(f"doctor: no verdict of {script}: {why} by Lightning's or transformers' Trainer")
        return None
    # a short first training may take long, as it imports; a verdict needs enough steps
    with_verdict = [training for training in finished if training.kept and training.kept.verdict]
    longest = max(with_verdict or finished, key=lambda training: training.seconds)
    judged = longest.kept
    assert judged is not None
    if len(trainings) > 1:
        number = trainings.index(longest) + 1
        about = f"{longest.seconds:.0f} s"
        print_line(
            f"doctor: {len(trainings)} trainings in {script}; the verdict is of number {number},"
            f" the longest{' with a verdict' if with_verdict else ''} ({about})"
        )
        # of a single training it has just been printed
        print_line(
            f"doctor: {judged.why_none if judged.verdict is None else judged.verdict['sentence']}"
        )
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / _VERDICT).exists():
        print_line(f"doctor: {folder / _VERDICT} was there, and is replaced")
    judged.save(folder / _VERDICT)
    command = shlex.join([str(script), *arguments.words])
    page = write_verdict_page(folder / "verdict.html", command, judged.as_dict())
    print_line(f"doctor: kept in {folder / _VERDICT} and {page}")
    return judged


def _end_as_the_script(script: Path, ended_by: BaseException | None) -> None:
    """End with the script's own exit code, and with its own traceback where it has failed."""
    if ended_by is None or (isinstance(ended_by, SystemExit) and not ended_by.code):
        return
    if not isinstance(ended_by, Exception):  # SystemExit, KeyboardInterrupt
        raise ended_by
    cut_traceback(script, ended_by)
    sys.excepthook(type(ended_by), ended_by, ended_by.__traceback__)
    sys.exit(1)


def _compare(judged: KeptVerdict | None, baseline: dict[str, Any], limit: float | None) -> None:
    """Print how the pace compares with the baseline's; exit with code 1 below the limit."""
    paces = None if judged is None else paces_to_compare(judged, baseline)
    if judged is None or paces is None:
        why = "no training was long enough" if judged is not None else "nothing was trained"
        raise UserError("--against", f"nothing to compare: {why}", hint="Train 50 steps or more.")
    pace, before = paces
    ratio = compare_with(pace, before, judged.machine, baseline["machine"])
    if isinstance(ratio, str):
        print_line(f"doctor: {ratio}")
        return
    steps = f"{pace.value:,.1f} steps/s, {before['value']:,.1f} before"
    print_line(f"doctor: {steps}: {ratio} as fast")
    if judged.waiting_share >= _WAITED:
        share = f"{judged.waiting_share:.0%}"
        print_line(f"doctor: other processes had its core {share} of the time, which is left out")
    # Only where even the upper bound is too low: a noisy machine must not fail anybody's CI.
    if limit is not None and ratio.high < limit:
        bound = f"the upper bound {ratio.high:.2f}"
        print_line(f"doctor: slower than allowed: {bound} is below {limit:g}")
        sys.exit(_SLOWER)
