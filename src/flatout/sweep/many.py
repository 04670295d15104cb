"""A list of trials, from first to last: what `-m` with several values asks for, and how to resume
it.

The words of the command are written into the folder, so that the same command with `resume=auto`
finds it: trials that have finished are left as they are, others go on from their checkpoints, or
are trained where there are none.
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
from flatout.files import write_atomically
from flatout.masking import mask_words
from flatout.report.summary import read_summary
from flatout.report.sweep_charts import is_number
from flatout.report.sweep_page import PAGE, SweepReport, TrialRow, spread, write_sweep
from flatout.sweep.settings import LauncherSettings
from flatout.sweep.trial import Board, Ending, Status, Trial
from flatout.sweep.trials import Slots, endings, read_values, slots

WORDS = "multirun.json"
LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class Multirun:
    """The command that trials are of."""

    folder: Path
    words: list[str]
    again: str  # the command that resumes it
    is_again: bool = False


def run_all(
    trials: list[Trial], *, of: Multirun, launcher: LauncherSettings | None = None
) -> list[Ending]:
    """How each trial ended, in their order.

    Where some failed the others still run; then they are named.
    """
    with alone_in(of.folder), to_go_on(of.again, of_slurm=of.is_again):
        _require_own_folders(trials)
        begun_by = {"schema": 1, "words": mask_words(of.words)}
        write_atomically(of.folder / WORDS, json.dumps(begun_by, indent=1, ensure_ascii=False))
        found = dict[int, Ending]()
        launcher = launcher or LauncherSettings()
        shares = slots(launcher.parallel, launcher.place)
        limit_s = as_seconds(launcher.limit, "launcher.limit")
        try:
            _run_all(trials, shares, limit_s, found)
        finally:  # of a list that is interrupted the table says how far it came
            ended = [found.get(trial.number) or _unfinished(trial) for trial in trials]
            if found or any(trial.folder.exists() for trial in trials):
                write_sweep(of.folder, report_of(trials, ended, of))
        print(*_over_seeds(trials, ended), f"page: {of.folder / PAGE}", sep="\n")
    pairs = zip(trials, ended, strict=True)
    if words := [
        f"trial {trial.number}: {ending.note}"
        for trial, ending in pairs
        if ending.status is Status.failed
    ]:
        hint = (
            f"The output of each is in {trials[0].folder.parent}/*/output.txt; resume=auto repeats"
            " the failed ones."
        )
        raise RunBroke("\n".join([*words, f"{len(words)} of {len(trials)} trials failed. {hint}"]))
    return ended


def _unfinished(trial: Trial) -> Ending:
    seen = read_values(trial.folder, f"val/{trial.job.metric}")
    note = "interrupted" if trial.folder.exists() else "not begun"
    return Ending(Status.stopped, 0.0, seen[-1] if seen else None, note=note)


def report_of(trials: Sequence[Trial], ended: Sequence[Ending], of: Multirun) -> SweepReport:
    """What the page of a sweep shows, of trials that were named one by one."""
    job = trials[0].job
    rows = [_row(trial, ending, of.folder) for trial, ending in zip(trials, ended, strict=True)]
    judged = [row for row in rows if row.status == Status.complete and is_number(row.value)]
    best = (max if job.mode == "max" else min)(
        judged, key=lambda row: row.value or 0.0, default=None
    )
    again = [] if best is None else ["python", "-m", "train", *trials[rows.index(best)].overrides]
    space: dict[str, dict[str, None]] = {}
    for key, value in (pair for row in rows for pair in row.params.items()):
        space.setdefault(key, {})[value] = None
    return SweepReport(
        name=job.config.name,
        command=of.again,
        metric=f"val/{job.metric}",
        mode=job.mode,
        space={key: ", ".join(values) for key, values in space.items()},
        trials=rows,
        best_overrides=shlex.join(mask_words(again)),
        seconds=sum(ending.seconds for ending in ended),
    )


def _row(trial: Trial, ending: Ending, folder: Path) -> TrialRow:
    return TrialRow(
        number=trial.number,
        status=ending.status.value,
        value=ending.value,
        seconds=ending.seconds,
        note=ending.note,
        metrics=ending.metrics,
        params=dict(word.lstrip("+~").partition("=")[::2] for word in mask_words(trial.changed)),
        folder=str(
            trial.folder.relative_to(folder)
            if trial.folder.is_relative_to(folder)
            else trial.folder
        ),
        curve=list(enumerate(read_values(trial.folder, f"val/{trial.job.metric}"), 1)),
    )


def _over_seeds(trials: Sequence[Trial], ended: Sequence[Ending]) -> list[str]:
    """Mean and spread of the metric that decides, of trials in which the seed is all
    that differs.
    """
    alike: dict[str, list[Mapping[str, float]]] = {}
    for trial, ending in zip(trials, ended, strict=True):
        others = [word for word in trial.changed if not word.startswith("seed=")]
        if ending.metrics and len(others) < len(trial.changed):
            alike.setdefault(shlex.join(others), []).append(ending.metrics)
    lines = []
    for setting, runs in ((setting, runs) for setting, runs in alike.items() if len(runs) > 1):
        names = [name for name in sorted(runs[0]) if name.endswith(f"/{trials[0].job.metric}")]
        means = ", ".join(spread(name, runs) for name in names)
        lines.append(f"{setting}{' ' if setting else ''}over {len(runs)} seeds: {means}")
    return lines


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """A folder of many trials, made where it is not there, for this process alone."""
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


def _run_all(
    trials: list[Trial], shares: Slots, limit_s: float | None, found: dict[int, Ending]
) -> None:
    job = trials[0].job  # the first one's metric, where they differ
    found |= _finished(trials, job.metric)
    waiting = iter([trial for trial in trials if trial.number not in found])
    board = Board(job.config.name, f"val/{job.metric}", job.mode, len(trials))
    for trial in trials:
        if trial.number in found:
            board.started(trial)
            board.ended(trial, found[trial.number])
    if len(found) == len(trials):
        board.close()
        print(
            f"resume: every trial in {trials[0].folder.parent} has finished; there is nothing left"
            " to train"
        )
        return
    running = endings(
        lambda: next(waiting, None), shares, board, metric=job.metric, limit_s=limit_s
    )
    with closing(board), closing(running):
        found.update((trial.number, ending) for trial, ending in running)
    Console(highlight=False).print(board.table())


def begun_with(folder: Path) -> list[str] | None:
    """The words that began the trials in a folder; None where it is no such folder."""
    try:
        words = json.loads((folder / WORDS).read_text(encoding="utf-8"))["words"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return mask_words(map(str, words)) if isinstance(words, list) else None


def newest_of(words: Sequence[str], place: Path) -> Path | None:
    """The newest folder in a place that these words have begun."""
    folders = sorted(
        (path.parent for path in place.glob(f"*/{WORDS}")), key=lambda path: path.name, reverse=True
    )
    return next((folder for folder in folders if begun_with(folder) == mask_words(words)), None)


def _finished(trials: list[Trial], metric: str) -> dict[int, Ending]:
    found = {}
    for trial in trials:
        if trial.is_again and trial.job.is_finished(trial.folder, trial.overrides):
            summary = read_summary(trial.folder)
            metrics = {
                name: value for name, value in summary["metrics"].items() if value is not None
            }
            value = metrics.get(f"val/{metric}")
            seconds = summary["training"]["seconds"] or 0.0
            found[trial.number] = Ending(
                Status.complete, seconds, value, metrics, note="had finished before"
            )
    return found


def _require_own_folders(trials: list[Trial]) -> None:
    """Nothing that lies there is overwritten, and no two trials write to one place."""
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
def to_go_on(command: str, *, of_slurm: bool = False) -> Iterator[None]:
    """Let a signal end what is done here as Ctrl-C does: trials are stopped, then the command to
    resume is printed.
    """
    # The exit code is 128 + its number; a second signal waits for nothing. `of_slurm`: SLURM may
    # give it again.
    with Signals(has_echo=True):
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as left:
            number = int(left.code or 0) - 128 if isinstance(left, SystemExit) else signal.SIGINT
            queued = requeue_with_slurm(number) if of_slurm else None
            with suppress(OSError):  # the terminal may be what has gone
                print("\n".join(filter(None, [f"to resume: {command}", queued])), flush=True)
            raise
