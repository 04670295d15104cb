"""The imports at the start of a command: Ctrl-C ends them at once, and the garbage collector leaves
them alone.

While a program imports, nothing has begun, so there is nothing to print and nothing to save.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import FrameType


def leaving_at_once() -> AbstractContextManager[None]:
    """End the process at once, without a word, when Ctrl-C comes inside: packages hide or print a
    KeyboardInterrupt.
    """
    return _handled(_leave)


def ignored_by_children() -> AbstractContextManager[None]:
    """What is started inside does not hear Ctrl-C, until it asks to; to ignore a signal is all that
    exec hands on.
    """
    return _handled(signal.SIG_IGN)


@contextmanager
def _handled(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers,
) -> Iterator[None]:
    """Replace the usual handler of Ctrl-C; one set by other code stays, and a thread changes
    nothing.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before not in (
        signal.default_int_handler,
        _leave,
    ):
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


@contextmanager
def importing() -> Iterator[None]:
    """Import inside: it takes four fifths of the time, and what was imported is never searched for
    garbage.
    """
    # What packages make while they are imported stays for good. Searching these 400,000 objects
    # takes 0.2 s each time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with leaving_at_once():
            yield
    finally:
        keep_imported()
        if was_enabled:
            gc.enable()


@cache
def keep_imported() -> None:
    """Let the garbage collector leave out all that there is now; once in a process."""
    gc.freeze()
