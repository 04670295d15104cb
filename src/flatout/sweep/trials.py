"""Run many trials, each in its own process, and watch them by what they write into their folders.

A trial is forked from the warm server, so it starts at once and as clean as a new interpreter. What
it prints goes to `output.txt`; memory, crashes and hanging stay with it. It answers no questions:
its validations are read from its `metrics.csv`, so a run on several devices is watched like any
other. Each trial has a slot: its share of the machine's GPUs, or of its cores. On a Ray cluster,
whose machines write to one disk, a slot is a place among the cluster's tasks.
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
from typing import Any, TypeVar

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
OUTPUT_FILE = "output.txt"
_MOST_STARTS = 3  # of a trial whose machine was lost
# A task of Ray may wait in a queue. It writes this file when it starts; its time runs from then.
_BEGUN = ".begun"
_GRACE_S = 6.0  # how long a trial may take to write down that it was stopped
_POLL_S = 0.05
Thing = TypeVar("Thing")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """When trials are stopped; None: never."""

    trial_s: float | None = None  # the longest that one may run
    until: float | None = None  # when the time for all is over, by `time.monotonic`

    def are_over(self) -> bool:
        """Whether the time for all trials is over."""
        return self.until is not None and time.monotonic() >= self.until


def run_trials(
    ask: Ask, slots: Slots, board: Board, *, limits: TimeLimits, judge: Judge | None = None
) -> Generator[tuple[Trial, Ending], None, None]:
    """Run the trials that `ask` names, as many at once as there are slots; yields each as it ends.

    If the caller leaves early, running trials are stopped.
    """
    # The server serves processes of this machine; a slot of a cluster is None.
    if any(slots):
        warm_start()
        wait_until_warm()
    free = list(slots)
    running = list[_Running]()
    are_more = True
    try:
        while True:
            while are_more and free and not limits.are_over():
                trial = ask()
                if trial is None:
                    are_more = False
                    break
                running.append(_Running(trial, free.pop(0), board))
                board.started(trial)
            if not running:
                return
            time.sleep(_POLL_S)
            for process in list(running):
                ending = process.poll(judge, limits)
                if ending is not None:
                    running.remove(process)
                    free.append(process.slot)
                    board.ended(process.trial, ending)
                    yield process.trial, ending
            board.draw()
    finally:
        # all get the signal at once, and end side by side
        for process in running:
            process.signal(signal.SIGINT)
        for process in running:
            process.stop()


class _Running:
    """A trial from its start to its ending; it is started again if its machine is lost."""

    def __init__(self, trial: Trial, slot: Slot | None, board: Board) -> None:
        self.trial = trial
        self.slot = slot
        self._board = board
        self._started = time.time()  # as the summary has it
        self._clock = time.monotonic()
        self._readings = Readings(trial.folder, board.metric)
        self._num_validations = 0
        self._num_starts = 0
        self._has_signal = False
        self._is_closed = False
        self._value: float | None = None
        self._begin(is_again=trial.is_again)

    def _begin(self, *, is_again: bool) -> None:
        trial = self.trial
        self._num_starts = self._num_starts + 1
        resumes = is_again and trial.job.can_resume(trial.folder, trial.overrides)
        if not resumes:
            new_trial_folder(trial.folder, is_again=is_again)
        (trial.folder / _BEGUN).unlink(missing_ok=True)
        # a process runs at once; a task writes the file when it does
        self._has_begun = self.slot is not None
        self._worker: _Task | _Process
        if self.slot is None:
            self._worker = _Task(trial, resumes=resumes)
        else:
            self._worker = _Process(trial, self.slot, resumes=resumes)

    def poll(self, judge: Judge | None, limits: TimeLimits) -> Ending | None:
        """Read its new validations, and stop it where that is due; None while it runs on."""
        if not self._has_begun and (self.trial.folder / _BEGUN).exists():
            self._has_begun = True
            self._clock = time.monotonic()
        # Asked before the file is read: a trial that had ended then has written all of it.
        has_ended = not self._worker.is_alive()
        for value in self._readings.new():
            self._num_validations = self._num_validations + 1
            self._value = value
            count = self._num_validations
            self._board.read(self.trial, count, value)
            if judge is not None and not has_ended and judge(self.trial, count, value):
                self.stop()
                return self._ending(Status.pruned, note=f"after {count} validations")
        if has_ended and self._worker.is_lost() and self._num_starts < _MOST_STARTS:
            self._begin(is_again=True)
        elif has_ended:
            return self._own_ending()
        return self._stop_if_late(limits)

    def _stop_if_late(self, limits: TimeLimits) -> Ending | None:
        limit_s = limits.trial_s
        seconds = time.monotonic() - self._clock
        if limit_s is not None and self._has_begun and seconds > limit_s:
            self.stop()
            return self._ending(Status.failed, note=f"{TOO_LONG} {limit_s:g} s and was stopped")
        if limits.are_over():
            self.stop()
            return self._ending(Status.stopped, note="the time for the sweep was over")
        return None

    def signal(self, number: signal.Signals) -> None:
        # Ctrl-C may come while its ending is written down
        if self._is_closed:
            return
        self._has_signal = True
        self._worker.signal(number)

    def stop(self) -> None:
        """End it: ask it to stop, wait, then kill it.

        It is asked once, as a second signal would end it before it has saved a checkpoint.
        """
        if self._is_closed:
            return
        if not self._has_signal:
            self.signal(signal.SIGINT)
        self._worker.join(_GRACE_S)
        self._worker.signal(signal.SIGKILL)
        self._worker.join()
        self._close("interrupted")

    def _own_ending(self) -> Ending:
        """How it ended by itself: complete, by an error that it names, or by a signal."""
        code, answer = self._worker.ended()
        self._close("failed")
        if code == 0 and "value" in answer:
            return self._ending(Status.complete, **answer)
        if code < 0:
            name = signal.Signals(-code).name
            cause = " (out of memory is the usual cause)" if name == "SIGKILL" else ""
            return self._ending(Status.failed, note=f"was ended by {name}{cause}")
        return self._ending(Status.failed, **{"note": f"ended with exit code {code}", **answer})

    def _close(self, status: str) -> None:
        self._is_closed = True
        self._worker.close()
        mark_broken(self.trial.folder, self._started, status)

    def _ending(self, status: Status, **known: Any) -> Ending:
        seen = {"seconds": time.monotonic() - self._clock, "value": self._value}
        return Ending(status, **{**seen, **known})


def new_trial_folder(folder: Path, *, is_again: bool) -> None:
    """Make a trial's folder empty. A link there is removed, but not what it leads to."""
    if folder.is_symlink():
        folder.unlink()
    if is_again:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)


class Readings:
    """The validations in a `metrics.csv` that is still being written."""

    def __init__(self, folder: Path, column: str) -> None:
        self.folder = folder
        self.column = column
        self._size = 0
        self._num_read = 0

    def new(self) -> list[float]:
        """Values of the column since the last call.

        A resumed trial writes rows again; each counts once. An unfinished row waits.
        """
        path = self.folder / "metrics.csv"
        size = path.stat().st_size if path.is_file() else 0
        if size == self._size:
            return []
        values = read_values(self.folder, self.column)
        new = values[self._num_read :]
        self._size = size
        self._num_read = max(self._num_read, len(values))
        return new


def read_values(folder: Path, column: str) -> list[float]:
    """The values in a column of a run's `metrics.csv` so far; empty cells are left out."""
    return [float(row[column]) for row in read_curves(folder) if row.get(column)]


def last_line(error: Exception) -> str:
    """The last line of an error's message, which names the cause; the lines before lead to it."""
    return next(reversed(str(error).strip().splitlines()), "")


class _Process(ForkServerProcess):
    """A trial on this machine, forked from the warm server."""

    def __init__(self, trial: Trial, slot: Slot, *, resumes: bool) -> None:
        received, answer = multiprocessing.Pipe(duplex=False)
        environment = {**os.environ, **slot.environment(), OUTPUT: str(trial.folder / OUTPUT_FILE)}
        super().__init__(target=_train_in_process, args=(trial, slot, environment, answer, resumes))
        self.start()
        answer.close()
        # only now: attributes that the object has when it starts are sent to the process
        self._received = received

    def is_lost(self) -> bool:
        """Whether its ending is unknown, so that it starts again: a process never loses its own."""
        return False

    def signal(self, number: signal.Signals) -> None:
        if self.pid is None or not self.is_alive():
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            # it has just started, and heads no process group yet
            self.kill()

    def ended(self) -> tuple[int, dict[str, Any]]:
        """Its exit code, and the fields of `Ending` that it sent; none if it died before."""
        answer: dict[str, Any] = {}
        with suppress(EOFError):
            answer = self._received.recv() if self._received.poll() else {}
        code = self.exitcode or 0
        self.join()
        return code, answer

    def close(self) -> None:
        self._received.close()
        super().close()


class _Task(RayTask):
    """A trial on any machine of a Ray cluster."""

    def __init__(self, trial: Trial, *, resumes: bool) -> None:
        super().__init__(
            partial(_train_in_ray, trial, resumes=resumes), uses_gpu=True, folder=trial.folder
        )

    def signal(self, number: signal.Signals) -> None:
        self.cancel(is_forced=number is signal.SIGKILL)

    def ended(self) -> tuple[int, dict[str, Any]]:
        return self.result() or (1, {"note": self.why})

    def close(self) -> None:
        """Its worker ends by itself."""


def _train(trial: Trial, *, resumes: bool) -> tuple[int, dict[str, Any]]:
    """Train a trial; returns the exit code of its process, and fields of its `Ending`."""
    try:
        result = trial.job.train(trial.folder, trial.overrides, resumes=resumes)
        # its own seconds, without the start of a process: a later command reads the same there
        seconds, _ = trial.job.read_ending(trial.folder)
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
    fields = {"value": result.objective, "metrics": result.metrics | result.spent}
    return 0, {**fields, "seconds": seconds}


def _train_in_ray(trial: Trial, *, resumes: bool) -> tuple[int, dict[str, Any]]:
    """Train a trial in a worker of Ray, which ends with it."""
    (trial.folder / _BEGUN).touch()
    os.environ[OUTPUT] = str(trial.folder / OUTPUT_FILE)
    redirect_output()
    return _train(trial, resumes=resumes)


def _train_in_process(
    trial: Trial, slot: Slot, environment: dict[str, str], answer: Connection, resumes: bool
) -> None:
    stand_apart(environment)
    slot.take()
    code, fields = _train(trial, resumes=resumes)
    answer.send(fields)
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
        """Variables that a trial's process starts with: it sees its own GPUs only."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}


Slots = Sequence[Slot | None]
"""Where trials run. None: as a task of a Ray cluster, which gives it a core, and a GPU if there is
one."""


def make_slots(parallel: int, on: Place = Place.here) -> Slots:
    """Divide the machine into equal shares; a remainder is left unused.

        7 cores, parallel=2    →    cores 0–2, cores 3–5

    A cluster divides itself.
    """
    if on is Place.ray:
        require(parallel > 0, "launcher.parallel", f"{parallel}", allowed="1 or more")
        connect()
        return [None] * parallel
    cores = cores_here()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        gpus = [str(number) for number in range(torch.cuda.device_count())]
    else:
        gpus = [name for name in visible.split(",") if name]
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


def _share(values: list[Thing], number: int, parallel: int) -> list[Thing]:
    """The share of that number; if there are more shares than things, several get one thing.

    Things [a, b] in 3 shares: [a], [b], [a].
    """
    size = len(values) // parallel
    if values and not size:
        return [values[number % len(values)]]
    return values[number * size : (number + 1) * size]
