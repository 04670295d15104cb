"""A time limit for work that runs in one call, such as a compiler's.

An alarm signal ends the call. Open this file to change where the alarm has to wait.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LEAST_S = 0.05  # the shortest limit; and an alarm that was lost comes again after this long


class NoAlarmError(RuntimeError):
    """No alarm can be had here, so the work could not be ended in time."""


class TooLong(BaseException):
    """The time limit is over. No `Exception`, because compilers catch and answer those."""


@contextmanager
def limit_seconds(seconds: float) -> Iterator[None]:
    """Raise `TooLong` in the block when it has run for `seconds`.

    An alarm signal (SIGALRM) raises it, in the main thread only. `NoAlarmError` is raised where the
    alarm cannot be had: in another thread, or where another alarm would come first. That other
    alarm is set again at the end, less the time spent here.

    Some places swallow what a signal handler raises, or break by it. There the alarm waits:

        import in progress     nothing is raised; the alarm comes again after `LEAST_S`
        `__del__` in progress  the same
        raised and swallowed   Python calls `sys.unraisablehook`, which sets the alarm again
    """
    others_s, others_again = signal.getitimer(signal.ITIMER_REAL)
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or 0 < others_s <= seconds:
        raise NoAlarmError("it could not be ended in time")

    def raise_too_long(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if _must_not_be_interrupted(frame) or frame.f_code is set_alarm_again.__code__:
                return  # until the next alarm
            frame = frame.f_back
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise TooLong

    def set_alarm_again(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is TooLong:
            # at once: what follows may be lost as well
            signal.setitimer(signal.ITIMER_REAL, 0.001, LEAST_S)
        else:
            others_hook(unraisable)

    others_handler = signal.signal(signal.SIGALRM, raise_too_long)
    began = time.perf_counter()
    others_hook = sys.unraisablehook
    sys.unraisablehook = set_alarm_again
    signal.setitimer(signal.ITIMER_REAL, seconds, LEAST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, others_handler)
        sys.unraisablehook = others_hook
        if others_s:
            spent_s = time.perf_counter() - began
            signal.setitimer(signal.ITIMER_REAL, max(0.001, others_s - spent_s), others_again)


def _must_not_be_interrupted(frame: FrameType) -> bool:
    """An import would stay half done; what is raised in a finalizer is swallowed."""
    code = frame.f_code
    return code.co_filename.startswith("<frozen importlib") or code.co_name == "__del__"
