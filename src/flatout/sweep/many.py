"""A list of trials, from first to last: what `-m` with several values asks for, and how to resume it.

The words of the command are written into the folder, so that the same command with `resume=auto` finds it: trials that
have finished are left as they are, others go on from their checkpoints, or are trained where there are none.
A signal stops them as Ctrl-C does.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout
from rich.console import Console

from flatout.data.store.lock import acquire, file_lock
from flatout.distributed.signals import Signals, requeue_with_slurm
from flatout.errors import RunBroke, UserError, as_seconds, require
from flatout.files import write_atomically
from flatout.report.summary import read_summary
from flatout.sweep.trial import Board, Ending, Status, Trial
from flatout.sweep.trials import endings, slots

WORDS, LOCK = "multirun.json", ".lock"


@dataclass(frozen=True, slots=True)
class Multirun:
    """The command that trials are of."""

    folder: Path
    words: list[str]
    again: str
    """The command that resumes it."""
    is_again: bool = False
    """Whether it is resumed."""


def run_all(
    trials: list[Trial], *, parallel: int = 1, limit: str | None = None, of: Multirun | None = None
) -> list[Ending]:
    """How each trial ended, in their order. Where some failed the others still run; then they are named."""
    if of is None:
        return _run_all(trials, parallel, limit)
    with alone_in(of.folder), to_go_on(of.again, of_slurm=of.is_again):
        _require_own_folders(trials)
        write_atomically(of.folder / WORDS, json.dumps({"schema": 1, "words": of.words}, indent=1, ensure_ascii=False))
        return _run_all(trials, parallel, limit)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """A folder of many trials, made where it is not there, for this process alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            "hydra.sweep.dir", f"cannot make {folder}: {error.strerror}", hint="Set output=FOLDER to a writable folder."
        ) from None
    lock = file_lock(folder / LOCK)
    try:
        acquire(lock, 0)
    except Timeout:
        raise UserError("sweep", f"another process is at work in {folder}", hint="Wait for it, or end it.") from None
    try:
        yield
    finally:
        lock.release()


def _run_all(trials: list[Trial], parallel: int, limit: str | None) -> list[Ending]:
    job = trials[0].job  # the first one's metric, where they differ
    metric, mode = job.metric, job.mode
    _require_own_folders(trials)
    shares, limit_s = slots(parallel), as_seconds(limit, "launcher.limit")
    found = _finished(trials, metric)
    waiting = iter([trial for trial in trials if trial.number not in found])
    board = Board(trials[0].job.config.name, f"val/{metric}", mode, len(trials), print)
    for trial in trials:
        if trial.number in found:
            board.started(trial)
            board.ended(trial, found[trial.number])
    if len(found) == len(trials):
        board.close()
        print(f"resume: every trial in {trials[0].folder.parent} has finished; there is nothing left to train")
        return [found[trial.number] for trial in trials]
    running = endings(lambda: next(waiting, None), shares, board, metric=metric, limit_s=limit_s)
    with closing(board), closing(running):
        found |= {trial.number: ending for trial, ending in running}
    Console(highlight=False).print(board.table())
    _require_none_failed(found, trials[0].folder.parent)
    return [found[trial.number] for trial in trials]


def begun_with(folder: Path) -> list[str] | None:
    """The words that began the trials in a folder; None where it is no such folder."""
    try:
        known = json.loads((folder / WORDS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    words = known.get("words") if isinstance(known, dict) else None
    return [str(word) for word in words] if isinstance(words, list) else None


def newest_of(words: Sequence[str], place: Path) -> Path | None:
    """The newest folder in a place that these words have begun."""
    folders = sorted((path.parent for path in place.glob(f"*/{WORDS}")), key=lambda path: path.name, reverse=True)
    return next((folder for folder in folders if begun_with(folder) == list(words)), None)


def _finished(trials: list[Trial], metric: str) -> dict[int, Ending]:
    """Resumed trials that have finished before, with their results."""
    found = {}
    for trial in trials:
        if trial.is_again and trial.job.is_finished(trial.folder, trial.overrides):
            metrics = {
                name: value for name, value in read_summary(trial.folder)["metrics"].items() if value is not None
            }
            value = metrics.get(f"val/{metric}")
            found[trial.number] = Ending(Status.complete, 0.0, value, metrics, note="had finished before")
    return found


def _require_none_failed(found: dict[int, Ending], folder: Path) -> None:
    failed = [number for number, ending in found.items() if ending.status is Status.failed]
    if failed:
        words = "\n".join(f"trial {number}: {found[number].note}" for number in sorted(failed))
        printed = f"The output of each is in {folder}/*/output.txt; resume=auto repeats the failed ones."
        raise RunBroke(f"{words}\n{len(failed)} of {len(found)} trials failed. {printed}")


def _require_own_folders(trials: list[Trial]) -> None:
    """Nothing that lies there is overwritten, and no two trials write to one place."""
    seen: set[Path] = set()
    for trial in trials:
        is_free = trial.is_again or not trial.folder.exists() or not any(trial.folder.iterdir())
        hint = "Choose another hydra.sweep.dir, or add resume=auto to resume the trials of the same command."
        require(is_free, "hydra.sweep.dir", f"{trial.folder} holds something already", hint=hint)
        hint = "Put the trial's number into it: 'hydra.sweep.subdir=${hydra.job.num}'."
        require(trial.folder not in seen, "hydra.sweep.subdir", f"{trial.folder} twice", hint=hint)
        seen.add(trial.folder)


@contextmanager
def to_go_on(command: str, *, of_slurm: bool = False) -> Iterator[None]:
    """Let a signal end what is done here as Ctrl-C does: trials are stopped, then the command to resume is printed.

    The exit code is 128 + its number; a second signal waits for nothing. `of_slurm`: the same command resumes, so that
    SLURM may give it again.
    """
    with Signals(has_echo=True):
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as left:
            number = int(left.code or 0) - 128 if isinstance(left, SystemExit) else signal.SIGINT
            queued = requeue_with_slurm(number) if of_slurm else None
            with suppress(OSError):  # the terminal may be what has gone
                print("\n".join(filter(None, [f"to resume: {command}", queued])), flush=True)
            raise
