"""Signals ask a run to end: it does so between two optimizer steps, with a checkpoint, on all
ranks.

While training waits for such a place a signal only sets a flag; elsewhere, and the second time, it
ends the process.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# a terminal and a launcher both pass a signal on to a rank; within this time they are one
_ECHO_S = 1.0


class Signals:
    """What this process was asked, from `__enter__` to `__exit__`."""

    def __init__(self, *, has_echo: bool = False) -> None:
        """`has_echo`: whether each signal may come twice, to the process and to its group, as it
        does to a child.
        """
        self._has_echo = has_echo or multiprocessing.parent_process() is not None
        self.number = 0  # the signal that asked to end; 0: none
        self._waits = False
        self._asked_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in ASKING:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup means it
                    self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The caller reads `number` often in here: a first signal only sets it."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number and now - self._asked_at < _ECHO_S and self._has_echo:
            return
        if self._waits and not self.number:
            self.number, self._asked_at = number, now
            if multiprocessing.parent_process() is None:
                # A process that hangs in a library never comes back to a handler of ours; the
                # system needs none.
                for again in self._before:
                    signal.signal(again, signal.SIG_DFL)
            return
        self.number, self._asked_at = number, now
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)


def requeue_with_slurm(number: int) -> str | None:
    """Ask SLURM to run this job again, where its warning was what ended the run; what was done
    about it, in words.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    if number != signal.SIGUSR1 or not job.isdecimal():
        return None
    array, task = (
        os.environ.get("SLURM_ARRAY_JOB_ID", ""),
        os.environ.get("SLURM_ARRAY_TASK_ID", ""),
    )
    name = f"{array}_{task}" if array.isdecimal() and task.isdecimal() else job
    if (program := shutil.which("scontrol")) is None:
        return f"SLURM job {name} is not queued again: there is no scontrol here"
    done = subprocess.run([program, "requeue", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"SLURM job {name} is not queued again: {done.stderr.strip() or done.returncode}"
    return f"SLURM job {name} is queued again"
