"""Trials: many runs, each in a process of its own, watched from outside by what it writes into its
folder.

A trial is forked from the warm server, so it starts at once and as clean as a new interpreter; what
it prints goes to `output.txt`; memory, crashes and hanging stay with it. Nothing is asked of it:
its validations are read from its `metrics.csv`, so a run on several devices is watched like any
other. Each has a slot: its share of the machine's GPUs, or of its cores. On a Ray cluster, whose
machines write to one disk, a slot is a place among its tasks.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from flatout.distributed.engine import Place, RayTask, connect
from flatout.distributed.processes import (
    OUTPUT,
    redirect_output,
    stand_apart,
    wait_until_warm,
    warm_start,
)
from flatout.distributed.ranks import cores_here
from flatout.errors import EXIT_CODE, RunBroke, UserError, require
from flatout.report.page import read_curves
from flatout.report.summary import mark_broken
from flatout.sweep.trial import Ask, Board, Ending, Judge, Status, Trial

TOO_LONG = "ran longer than"  # how the note begins of a trial that was stopped at its limit
_TIMES = 3  # how often a trial is begun whose machine was lost
# a task of Ray may wait in a queue first
OUTPUT_FILE = "output.txt"
_BEGUN = ".begun"
_GRACE_S = 6.0  # how long a trial may take to write down that it was stopped


def endings(
    ask: Ask,
    slots: Slots,
    board: Board,
    *,
    metric: str,
    judge: Judge | None = None,
    limit_s: float | None = None,
    until: float | None = None,
) -> Generator[tuple[Trial, Ending], None, None]:
    """Run what `ask` names, as many at once as slots, each for `limit_s`, all to `until`; trials as
    they end.
    """
    if any(slots):
        warm_start()
        wait_until_warm()
    free = list(slots)
    running = list[_Running]()
    are_more = True
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
            time.sleep(0.05)
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
    def __init__(self, trial: Trial, slot: Slot | None, metric: str) -> None:
        self.trial, self.slot = trial, slot
        self._started = time.time()
        self._clock = time.monotonic()
        self._readings = Readings(trial.folder, f"val/{metric}")
        self._seen = 0
        self._times = 0
        self._was_told = False
        self._is_closed = False
        self._value: float | None = None
        self._begin(is_again=trial.is_again)

    def _begin(self, *, is_again: bool) -> None:
        trial = self.trial
        self._times = self._times + 1
        resumes = is_again and trial.job.can_resume(trial.folder, trial.overrides)
        if not resumes:
            new_trial_folder(trial.folder, is_again=is_again)
        slot = self.slot
        self._has_begun = self.slot is not None
        (trial.folder / _BEGUN).unlink(missing_ok=True)
        self._worker = (
            _Task(trial, resumes=resumes)
            if slot is None
            else _Process(trial, slot, resumes=resumes)
        )

    def look(
        self, judge: Judge | None, limit_s: float | None, until: float | None, board: Board
    ) -> Ending | None:
        """How it ended; None while it runs."""
        if not self._has_begun and (self.trial.folder / _BEGUN).exists():
            self._has_begun = True
            self._clock = time.monotonic()
        has_ended = not self._worker.is_alive()
        for value in self._readings.new():
            self._seen = self._seen + 1
            self._value = value
            board.read(self.trial, self._seen, value)
            if judge is not None and not has_ended and judge(self.trial, self._seen, value):
                self.stop()
                return self._ending(Status.pruned, note=f"after {self._seen} validations")
        if has_ended and self._worker.is_lost() and self._times < _TIMES:
            self._begin(is_again=True)
        elif has_ended:
            return self._own_ending()
        now = time.monotonic()
        if limit_s is not None and self._has_begun and now - self._clock > limit_s:
            self.stop()
            return self._ending(Status.failed, note=f"{TOO_LONG} {limit_s:g} s and was stopped")
        if until is not None and now > until:
            self.stop()
            return self._ending(Status.stopped, note="the time for the sweep was over")
        return None

    def signal(self, number: signal.Signals) -> None:
        if self._is_closed:  # Ctrl-C came while its ending was written down
            return
        self._was_told = True
        self._worker.signal(number)

    def stop(self) -> None:
        """End it, gently at first; a trial gets the signal once."""
        if self._is_closed:
            return
        if not self._was_told:
            self.signal(signal.SIGINT)
        self._worker.join(_GRACE_S)
        self._worker.signal(signal.SIGKILL)
        self._worker.join()
        self._close("interrupted")

    def _own_ending(self) -> Ending:
        code, answer = self._worker.ended()
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
        self._worker.close()
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
        self._size = 0
        self._told = 0

    def new(self) -> list[float]:
        """New values of the column, each once though a resumed trial writes rows again; an
        unfinished row waits.
        """
        path = self.folder / "metrics.csv"
        size = path.stat().st_size if path.is_file() else 0
        if size == self._size:
            return []
        values = read_values(self.folder, self.column)
        new = values[self._told :]
        self._size = size
        self._told = max(self._told, len(values))
        return new


def read_values(folder: Path, column: str) -> list[float]:
    """What a column of a run's `metrics.csv` holds so far."""
    return [float(row[column]) for row in read_curves(folder) if row.get(column)]


def last_line(error: Exception) -> str:
    """What an error says in the end, without the lines before."""
    return next(reversed(str(error).strip().splitlines()), "")


class _Process(ForkServerProcess):
    def __init__(self, trial: Trial, slot: Slot, *, resumes: bool) -> None:
        received, answer = multiprocessing.Pipe(duplex=False)
        environment = {**os.environ, **slot.environment(), OUTPUT: str(trial.folder / OUTPUT_FILE)}
        super().__init__(target=_trial, args=(trial, slot, environment, answer, resumes))
        self.start()
        answer.close()
        self._received = received  # only now: what a process has when it starts goes to it

    def is_lost(self) -> bool:
        """Whether its ending is unknown, so that it is begun again."""
        return False

    def signal(self, number: signal.Signals) -> None:
        if self.pid is None or not self.is_alive():
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # not yet the head of a group of its own
            self.kill()

    def ended(self) -> tuple[int, dict[str, Any]]:
        """Its exit code, and its last words."""
        answer: dict[str, Any] = {}
        with suppress(EOFError):  # it died without last words
            answer = self._received.recv() if self._received.poll() else {}
        code = self.exitcode or 0
        self.join()
        return code, answer

    def close(self) -> None:
        self._received.close()
        super().close()


class _Task(RayTask):
    def __init__(self, trial: Trial, *, resumes: bool) -> None:
        super().__init__(
            partial(_trained_apart, trial, resumes=resumes), uses_gpu=True, folder=trial.folder
        )

    def signal(self, number: signal.Signals) -> None:
        self.cancel(is_forced=number is signal.SIGKILL)

    def ended(self) -> tuple[int, dict[str, Any]]:
        return self.result() or (1, {"note": self.why})

    def close(self) -> None:
        """Its worker ends by itself."""


def _trained(trial: Trial, *, resumes: bool) -> tuple[int, dict[str, Any]]:
    """Train a trial; the exit code of its process, and its last words."""
    try:
        result = trial.job.train(trial.folder, trial.overrides, resumes=resumes)
    except UserError as mistake:
        print(mistake, file=sys.stderr, flush=True)
        return EXIT_CODE, {"note": str(mistake), "is_mistake": True}
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, {}
    except RunBroke as broken:
        print(broken, file=sys.stderr, flush=True)
        return 1, {"note": last_line(broken)}
    except Exception as error:
        # a defect of any class: the sweep gets its name, and the output its traceback
        traceback.print_exc()
        return 1, {"note": f"{type(error).__name__}: {last_line(error)}"}
    return 0, {"value": result.objective, "metrics": result.metrics}


def _trained_apart(trial: Trial, *, resumes: bool) -> tuple[int, dict[str, Any]]:
    """The same in a worker of Ray's, which ends with it."""
    (trial.folder / _BEGUN).touch()
    os.environ[OUTPUT] = str(trial.folder / OUTPUT_FILE)
    redirect_output()
    return _trained(trial, resumes=resumes)


def _trial(
    trial: Trial, slot: Slot, environment: dict[str, str], answer: Connection, resumes: bool
) -> None:
    stand_apart(environment)
    slot.take()
    code, words = _trained(trial, resumes=resumes)
    answer.send(words)
    sys.exit(code)


@dataclass(frozen=True, slots=True)
class Slot:
    """One share of the machine."""

    cores: list[int]
    gpus: list[str]  # as CUDA_VISIBLE_DEVICES names them

    def take(self) -> None:
        """Keep this process to its share, before it computes anything."""
        os.sched_setaffinity(0, self.cores)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(len(self.cores))

    def environment(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}


Slots = Sequence[Slot | None]
"""Where trials run; None: as a task of a Ray cluster, which gives it a core, and a GPU where there
is any."""


def slots(parallel: int, on: Place = Place.here) -> Slots:
    """Equal shares; what does not divide evenly is left to the system.

    A cluster shares itself out.
    """
    if on is Place.ray:
        require(parallel > 0, "launcher.parallel", f"{parallel}", allowed="1 or more")
        connect()
        return [None] * parallel
    cores = cores_here()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(torch.cuda.device_count())) if visible is None else visible.split(",")
    gpus = [name for name in names if name]
    most = max(len(cores), len(gpus))
    require(
        1 <= parallel <= most,
        "launcher.parallel",
        f"{parallel}",
        allowed=f"1 to {most} here: one for each GPU or core",
    )
    return [
        Slot(_share(cores, number, parallel), _share(gpus, number, parallel))
        for number in range(parallel)
    ]


def _share(things: list, number: int, parallel: int) -> list:
    """The share of that number; where there are fewer things than shares, several get
    the same one.
    """
    size = len(things) // parallel
    return (
        things[number * size : (number + 1) * size]
        if size or not things
        else [things[number % len(things)]]
    )
