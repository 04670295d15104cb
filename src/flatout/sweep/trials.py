"""Trials: many runs, each in a process of its own, watched from outside by what it writes into its folder.

A trial is forked from the warm server, so it starts at once and as clean as a new interpreter; what it prints goes to
`output.txt`; memory, crashes and hanging stay with it. Nothing is asked of it: its validations are read from its
`metrics.csv`, so a run on several devices is watched like any other. Each has a slot: its share of the machine's GPUs,
or of its cores.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from flatout.distributed.processes import OUTPUT, stand_apart, wait_until_warm, warm_start
from flatout.distributed.ranks import cores_here
from flatout.errors import EXIT_CODE, RunBroke, UserError, require
from flatout.report.page import read_curves
from flatout.report.summary import mark_broken
from flatout.sweep.trial import Ask, Board, Ending, Judge, Status, Trial

_LOOK_S = 0.05
TOO_LONG = "ran longer than"
"""How the note begins of a trial that was stopped at its limit."""
_GRACE_S = 6.0
"""How long a trial may take to write down that it was stopped."""


def endings(
    ask: Ask,
    slots: list[Slot],
    board: Board,
    *,
    metric: str,
    judge: Judge | None = None,
    limit_s: float | None = None,
    until: float | None = None,
) -> Generator[tuple[Trial, Ending], None, None]:
    """Run what `ask` names until it names no more, as many at once as there are slots; trials as they end.

    `limit_s` is the most a trial may take; at `until` (of the monotonic clock) all are stopped. An early end,
    by an error or Ctrl-C, leaves no process behind.
    """
    warm_start()
    wait_until_warm()
    free, running, are_more = list(slots), list[_Running](), True
    try:
        while True:
            while are_more and free and (until is None or time.monotonic() < until):
                if (trial := ask()) is None:
                    are_more = False
                    break
                running.append(_Running(trial, free.pop(0), metric))
                board.started(trial)
            if not running:
                return
            time.sleep(_LOOK_S)
            for each in list(running):
                if (ending := each.look(judge, limit_s, until, board)) is not None:
                    running.remove(each)
                    free.append(each.slot)
                    board.ended(each.trial, ending)
                    yield each.trial, ending
            board.draw()
    finally:
        for each in running:  # all are signalled at once, then awaited one by one
            each.signal(signal.SIGINT)
        for each in running:
            each.stop()


class _Running:
    """A trial's process, and what is known of it so far."""

    def __init__(self, trial: Trial, slot: Slot, metric: str) -> None:
        self.trial, self.slot = trial, slot
        resumes = trial.is_again and trial.job.can_resume(trial.folder, trial.overrides)
        if not resumes:
            new_trial_folder(trial.folder, is_again=trial.is_again)
        self._started, self._clock = time.time(), time.monotonic()
        self._readings = Readings(trial.folder, f"val/{metric}")
        self._seen, self._was_told, self._is_closed = 0, False, False
        self._value: float | None = None
        context = multiprocessing.get_context("forkserver")
        self._answer, answer = context.Pipe(duplex=False)
        environment = {**os.environ, **slot.environment(), OUTPUT: str(trial.folder / "output.txt")}
        self._process = context.Process(target=_trial, args=(trial, slot, environment, answer, resumes))
        self._process.start()
        answer.close()

    def look(self, judge: Judge | None, limit_s: float | None, until: float | None, board: Board) -> Ending | None:
        """How it ended; None while it runs."""
        has_ended = not self._process.is_alive()
        for value in self._readings.new():
            self._seen, self._value = self._seen + 1, value
            board.read(self.trial, self._seen, value)
            if judge is not None and judge(self.trial, self._seen, value):
                self.stop()
                return self._ending(Status.pruned, note=f"after {self._seen} validations")
        if has_ended:
            return self._own_ending()
        now = time.monotonic()
        if limit_s is not None and now - self._clock > limit_s:
            self.stop()
            return self._ending(Status.failed, note=f"{TOO_LONG} {limit_s:g} s and was stopped")
        if until is not None and now > until:
            self.stop()
            return self._ending(Status.stopped, note="the time for the sweep was over")
        return None

    def signal(self, number: signal.Signals) -> None:
        if self._is_closed:  # Ctrl-C came while its ending was written down
            return
        pid = self._process.pid
        self._was_told = True
        if pid is None or not self._process.is_alive():
            return
        try:
            os.killpg(pid, number)
        except ProcessLookupError:  # not yet the head of a group of its own
            self._process.kill()

    def stop(self) -> None:
        """End it, gently at first; a trial gets the signal once."""
        if self._is_closed:
            return
        if not self._was_told:
            self.signal(signal.SIGINT)
        self._process.join(_GRACE_S)
        self.signal(signal.SIGKILL)
        self._process.join()
        self._close("interrupted")

    def _own_ending(self) -> Ending:
        answer: dict[str, Any] = {}
        with suppress(EOFError):  # it died without last words
            answer = self._answer.recv() if self._answer.poll() else {}
        code = self._process.exitcode or 0
        self._process.join()
        self._close("failed")
        if code == 0 and "value" in answer:
            return self._ending(Status.complete, **answer)
        if code < 0:
            name = signal.Signals(-code).name
            words = " (out of memory is the usual cause)" if name == "SIGKILL" else ""
            return self._ending(Status.failed, note=f"was ended by {name}{words}")
        return self._ending(Status.failed, **{"note": f"ended with exit code {code}", **answer})

    def _close(self, status: str) -> None:
        self._is_closed = True
        self._answer.close()
        self._process.close()
        mark_broken(self.trial.folder, self._started, status)

    def _ending(self, status: Status, **known: Any) -> Ending:
        return Ending(status, time.monotonic() - self._clock, **{"value": self._value, **known})


def new_trial_folder(folder: Path, *, is_again: bool) -> None:
    """Make a trial's folder; what was left there goes, and a link goes without what it leads to."""
    if folder.is_symlink():
        folder.unlink()
    if is_again:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)


class Readings:
    """The validations in a `metrics.csv` that is still being written."""

    def __init__(self, folder: Path, column: str) -> None:
        self.folder, self.column = folder, column
        self._size = self._told = 0

    def new(self) -> list[float]:
        """Values of the column since the last call; a row that is not finished is left for the next.

        A resumed trial removes rows after its checkpoint and writes them again: each counts once.
        """
        path = self.folder / "metrics.csv"
        size = path.stat().st_size if path.is_file() else 0
        if size == self._size:
            return []
        self._size = size
        values = read_values(self.folder, self.column)
        new = values[self._told :]
        self._told = max(self._told, len(values))
        return new


def read_values(folder: Path, column: str) -> list[float]:
    """What a column of a run's `metrics.csv` holds so far."""
    return [float(row[column]) for row in read_curves(folder) if row.get(column)]


def last_line(error: Exception) -> str:
    """What an error says in the end, without the lines before."""
    return next(reversed(str(error).strip().splitlines()), "")


def _trial(trial: Trial, slot: Slot, environment: dict[str, str], answer: Connection, resumes: bool) -> None:
    """One trial, in its own process."""
    stand_apart(environment)
    slot.take()
    try:
        result = trial.job.train(trial.folder, trial.overrides, resumes=resumes)
    except UserError as mistake:
        print(mistake, file=sys.stderr, flush=True)
        answer.send({"note": str(mistake), "is_mistake": True})
        sys.exit(EXIT_CODE)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except RunBroke as broken:
        print(broken, file=sys.stderr, flush=True)
        answer.send({"note": last_line(broken)})
        sys.exit(1)
    except Exception as error:  # a defect of any class: the sweep gets its name, then it is raised again
        answer.send({"note": f"{type(error).__name__}: {last_line(error)}"})
        raise
    answer.send({"value": result.objective, "metrics": result.metrics})


@dataclass(frozen=True, slots=True)
class Slot:
    """One share of the machine."""

    cores: list[int]
    gpus: list[str]
    """As CUDA_VISIBLE_DEVICES names them."""

    def take(self) -> None:
        """Keep this process to its share, before it computes anything."""
        os.sched_setaffinity(0, self.cores)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(len(self.cores))

    def environment(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}


def slots(parallel: int) -> list[Slot]:
    """Equal shares; what does not divide evenly is left to the system."""
    cores, visible = cores_here(), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(torch.cuda.device_count())) if visible is None else visible.split(",")
    gpus = [name for name in names if name]
    most = max(len(cores), len(gpus))
    allowed = f"1 to {most} here: one for each GPU or core"
    require(1 <= parallel <= most, "launcher.parallel", f"{parallel}", allowed=allowed)
    return [Slot(_share(cores, number, parallel), _share(gpus, number, parallel)) for number in range(parallel)]


def _share(things: list, number: int, parallel: int) -> list:
    """The share of that number; where there are fewer things than shares, several get the same one."""
    if not things:
        return []
    size = len(things) // parallel
    return things[number * size : (number + 1) * size] if size else [things[number % len(things)]]
