"""A signal ends a run between two optimizer steps, with a checkpoint, on all ranks.

During training the first signal only sets a flag, which training reads between steps. A second
signal ends the process at once; so does the first one outside of training.
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

# Signals that ask a run to end. SLURM sends SIGUSR1 before a job's time is up.
ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# A rank gets one Ctrl-C twice, from the terminal and from the launcher. Two signals within this
# time count as one.
_ECHO_S = 1.0  # seconds


class Signals:
    """Context manager that handles signals which ask this process to end.

    >>> with Signals() as signals, signals.waiting():  # doctest: +SKIP
    ...     train_until(lambda: signals.number)
    """

    def __init__(self, *, has_echo: bool = False) -> None:
        """`has_echo`: whether one signal may arrive twice, as in a process that another started."""
        self._has_echo = has_echo or multiprocessing.parent_process() is not None
        self.number = 0  # the signal that asked to end; 0: none
        self._waits = False
        self._asked_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in ASKING:
                # `nohup` ignores SIGHUP on purpose: leave that.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager in which a first signal only sets `number`; read it often."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: set `number` while training waits for it, else end the process."""
        now = time.monotonic()
        if self.number and now - self._asked_at < _ECHO_S and self._has_echo:
            return
        if self._waits and not self.number:
            self.number = number
            self._asked_at = now
            if multiprocessing.parent_process() is None:
                # Python runs a handler only between two bytecodes, so never in a process that
                # hangs in a library. The system's default ends it anyway.
                for again in self._before:
                    signal.signal(again, signal.SIG_DFL)
            return
        self.number = number
        self._asked_at = now
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)


def requeue_with_slurm(number: int) -> str | None:
    """Put this job into SLURM's queue again if SLURM's signal `number` has ended the run.

    Returns a line that says what was done; None outside of SLURM or after another signal.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    if number != signal.SIGUSR1 or not job.isdecimal():
        return None
    array = os.environ.get("SLURM_ARRAY_JOB_ID", "")
    task = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    name = f"{array}_{task}" if array.isdecimal() and task.isdecimal() else job
    program = shutil.which("scontrol")
    if program is None:
        return f"SLURM job {name} is not queued again: there is no scontrol here"
    done = subprocess.run([program, "requeue", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"SLURM job {name} is not queued again: {done.stderr.strip() or done.returncode}"
    return f"SLURM job {name} is queued again"
