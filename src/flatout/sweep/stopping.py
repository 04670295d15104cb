"""Many trials that are asked to end: by Ctrl-C, or by another of the signals that ask a run to."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from flatout.distributed.signals import asking, requeue_with_slurm

_ECHO_S = 1.0
"""`timeout` and some launchers send a signal to a process and to its group: within this time they are one."""


@contextmanager
def to_go_on(command: str, *, of_slurm: bool = False) -> Iterator[None]:
    """Let a signal end what is done here as Ctrl-C does: trials are stopped, then the command to resume is printed.

    The exit code is 128 + its number; a second signal waits for nothing. `of_slurm`: the same command resumes, so that
    SLURM may give it again.
    """
    with _heard():
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as left:
            number = int(left.code or 0) - 128 if isinstance(left, SystemExit) else signal.SIGINT
            queued = requeue_with_slurm(number) if of_slurm else None
            with suppress(OSError):  # the terminal may be what has gone
                print("\n".join(filter(None, [f"to resume: {command}", queued])), flush=True)
            raise


@contextmanager
def _heard() -> Iterator[None]:
    latest = 0.0

    def take(number: int, frame: FrameType | None) -> None:
        nonlocal latest
        before, latest = latest, time.monotonic()
        if before and latest - before < _ECHO_S:
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    wanted = [number for number in asking() if is_main and signal.getsignal(number) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, take) for number in wanted}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
