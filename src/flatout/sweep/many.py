"""Run a list of trials, which `-m` with several values asks for, and resume it.

The words of the command are written into the folder, so that the same command with `resume=auto`
finds it. Trials that have finished then stay as they are, others resume from their checkpoints, and
trials without one are trained. Open this file to change what a list of trials prints at its end.
"""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout
from rich.console import Console

from flatout.data.store.lock import acquire, file_lock
from flatout.distributed.signals import Signals, requeue_with_slurm
from flatout.errors import RunBroke, UserError, as_seconds, require
from flatout.files import load_json, write_atomically
from flatout.masking import mask_words
from flatout.report.sweep_charts import is_number
from flatout.report.sweep_page import PAGE, SweepReport, TrialRow, spread, write_sweep
from flatout.sweep.settings import LauncherSettings
from flatout.sweep.trial import Board, Ending, Status, Trial
from flatout.sweep.trials import Slots, TimeLimits, make_slots, read_values, run_trials

WORDS = "multirun.json"
LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class Multirun:
    """The command that began some trials."""

    folder: Path
    words: list[str]
    again: str  # the command that resumes it
    is_again: bool = False  # whether this is that command


def run_all(
    trials: list[Trial], *, of: Multirun, launcher: LauncherSettings | None = None
) -> list[Ending]:
    """Run trials; returns their endings in the same order.

    A trial that fails does not stop the others. When all have ended, `RunBroke` names those that
    failed.
    """
    require(bool(trials), "hydra.sweeper", "the values of a setting name no trial")
    with alone_in(of.folder), print_resuming(of.again, of_slurm=of.is_again):
        _require_own_folders(trials)
        begun_by = {"schema": 1, "words": mask_words(of.words)}
        write_atomically(of.folder / WORDS, json.dumps(begun_by, indent=1, ensure_ascii=False))
        by_number: dict[int, Ending] = {}
        launcher = launcher or LauncherSettings()
        shares = make_slots(launcher.parallel, launcher.place)
        limits = TimeLimits(trial_s=as_seconds(launcher.limit, "launcher.limit"))
        try:
            _run_missing(trials, shares, limits, by_number)
        finally:
            # of an interrupted list the page shows how far it came
            ended = [by_number.get(trial.number) or _unfinished(trial) for trial in trials]
            if by_number or any(trial.folder.exists() for trial in trials):
                write_sweep(of.folder, report_of(trials, ended, of))
        print(*_over_seeds(trials, ended), f"page: {of.folder / PAGE}", sep="\n")
    failed = [
        f"trial {trial.number}: {ending.note}"
        for trial, ending in zip(trials, ended, strict=True)
        if ending.status is Status.failed
    ]
    if failed:
        parent = trials[0].folder.parent
        raise RunBroke(
            "\n".join(failed) + f"\n{len(failed)} of {len(trials)} trials failed. The output of"
            f" each is in {parent}/*/output.txt; resume=auto repeats the failed ones."
        )
    return ended


def _unfinished(trial: Trial) -> Ending:
    seen = read_values(trial.folder, f"val/{trial.job.metric}")
    note = "interrupted" if trial.folder.exists() else "not begun"
    return Ending(Status.stopped, 0.0, seen[-1] if seen else None, note=note)


def report_of(trials: Sequence[Trial], ended: Sequence[Ending], of: Multirun) -> SweepReport:
    """A sweep's report about trials that were named one by one, without a search."""
    job = trials[0].job
    rows = [_row(trial, ending, of.folder) for trial, ending in zip(trials, ended, strict=True)]
    judged = [row for row in rows if row.status == Status.complete and is_number(row.value)]
    choose = max if job.mode == "max" else min
    best = choose(judged, key=lambda row: row.value or 0.0, default=None)
    again = [] if best is None else [*job.command, *trials[rows.index(best)].overrides]
    # The values of each key, in the order of the trials: a dict keeps one of each, in order.
    space: dict[str, dict[str, None]] = {}
    for row in rows:
        for key, value in row.params.items():
            space.setdefault(key, {})[value] = None
    return SweepReport(
        name=job.name,
        command=of.again,
        metric=f"val/{job.metric}",
        mode=job.mode,
        space={key: ", ".join(values) for key, values in space.items()},
        trials=rows,
        best_overrides=shlex.join(mask_words(again)),
        seconds=sum(ending.seconds for ending in ended),
    )


def _row(trial: Trial, ending: Ending, folder: Path) -> TrialRow:
    shown = trial.folder
    if shown.is_relative_to(folder):
        shown = shown.relative_to(folder)
    return TrialRow(
        number=trial.number,
        status=ending.status.value,
        value=ending.value,
        seconds=ending.seconds,
        note=ending.note,
        metrics=ending.metrics,
        params=dict(word.lstrip("+~").partition("=")[::2] for word in mask_words(trial.changed)),
        folder=str(shown),
        curve=list(enumerate(read_values(trial.folder, f"val/{trial.job.metric}"), 1)),
    )


def _over_seeds(trials: Sequence[Trial], ended: Sequence[Ending]) -> list[str]:
    """A line for trials that differ in the seed alone: mean and spread of the metric that decides.

    seed=1 model=cnn; seed=2 model=cnn; seed=1 model=rnn    →    model=cnn over 2 seeds: …
    """
    alike: dict[str, list[Mapping[str, float]]] = {}
    for trial, ending in zip(trials, ended, strict=True):
        others = [word for word in trial.changed if not word.startswith("seed=")]
        if ending.metrics and len(others) < len(trial.changed):
            alike.setdefault(shlex.join(others), []).append(ending.metrics)
    lines = []
    for setting, runs in alike.items():
        if len(runs) > 1:
            names = [name for name in sorted(runs[0]) if name.endswith(f"/{trials[0].job.metric}")]
            means = ", ".join(spread(name, runs) for name in names)
            lines.append(f"{setting} over {len(runs)} seeds: {means}".lstrip())
    return lines


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder of many trials for this process, and make it if it is missing.

    Another process that holds it is a `UserError`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            "hydra.sweep.dir",
            f"cannot make {folder}: {error.strerror}",
            hint="Set output=FOLDER to a writable folder.",
        ) from None
    lock = file_lock(folder / LOCK)
    try:
        acquire(lock, 0)
    except Timeout:
        raise UserError(
            "sweep", f"another process is at work in {folder}", hint="Wait for it, or end it."
        ) from None
    try:
        yield
    finally:
        lock.release()


def _run_missing(
    trials: list[Trial], shares: Slots, limits: TimeLimits, endings: dict[int, Ending]
) -> None:
    """Run the trials that have not finished before, and put all endings into `endings` by number.

    They are put there one by one: an interruption leaves those it has.
    """
    job = trials[0].job  # the first one's metric, where they differ
    endings |= _finished(trials, job.metric)
    waiting = iter([trial for trial in trials if trial.number not in endings])
    board = Board(job.name, f"val/{job.metric}", job.mode, len(trials))
    for trial in trials:
        if trial.number in endings:
            board.started(trial)
            board.ended(trial, endings[trial.number])
    if len(endings) == len(trials):
        board.close()
        print(
            f"resume: every trial in {trials[0].folder.parent} has finished; there is nothing left"
            " to train"
        )
        return
    running = run_trials(lambda: next(waiting, None), shares, board, limits=limits)
    with closing(board), closing(running):
        for trial, ending in running:
            endings[trial.number] = ending
    Console(highlight=False).print(board.table())


def begun_with(folder: Path) -> list[str] | None:
    """The words that began the trials in a folder, masked; None if it holds no list of trials."""
    try:
        words = load_json(folder / WORDS)["words"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return mask_words(map(str, words)) if isinstance(words, list) else None


def newest_of(words: Sequence[str], parent: Path) -> Path | None:
    """The newest folder in a place that these words have begun."""
    masked = mask_words(words)
    folders = [path.parent for path in parent.glob(f"*/{WORDS}")]
    # their names are the times at which they began
    for folder in sorted(folders, key=lambda folder: folder.name, reverse=True):
        if begun_with(folder) == masked:
            return folder
    return None


def _finished(trials: list[Trial], metric: str) -> dict[int, Ending]:
    """Endings of resumed trials that have nothing left to train, read from their folders."""
    endings = {}
    for trial in trials:
        if trial.is_again and trial.job.is_finished(trial.folder, trial.overrides):
            seconds, metrics = trial.job.read_ending(trial.folder)
            endings[trial.number] = Ending(
                Status.complete,
                seconds=seconds,
                value=metrics.get(f"val/{metric}"),
                metrics=metrics,
                note="had finished before",
            )
    return endings


def _require_own_folders(trials: list[Trial]) -> None:
    """Refuse folders that hold something already, and two trials with one folder."""
    seen: set[Path] = set()
    for trial in trials:
        is_free = trial.is_again or not trial.folder.exists() or not any(trial.folder.iterdir())
        require(
            is_free,
            "hydra.sweep.dir",
            f"{trial.folder} holds something already",
            hint=(
                "Choose another hydra.sweep.dir, or add resume=auto to resume the trials of the"
                " same command."
            ),
        )
        require(
            trial.folder not in seen,
            "hydra.sweep.subdir",
            f"{trial.folder} twice",
            hint="Put the trial's number into it: 'hydra.sweep.subdir=${hydra.job.num}'.",
        )
        seen.add(trial.folder)


@contextmanager
def print_resuming(command: str, *, of_slurm: bool = False) -> Iterator[None]:
    """Within it, a signal ends the work as Ctrl-C does; then the command to resume is printed.

    A second signal ends the process at once. `of_slurm`: SLURM may queue the same command again.
    """
    with Signals(has_echo=True):
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as left:
            number: int = signal.SIGINT
            if isinstance(left, SystemExit):
                # the exit code after a signal is 128 + its number
                number = int(left.code or 0) - 128
            queued = requeue_with_slurm(number) if of_slurm else None
            # the terminal may be closed
            with suppress(OSError):
                print("\n".join(filter(None, [f"to resume: {command}", queued])), flush=True)
            raise
