"""Imports at the start of a command: Ctrl-C ends them at once, and garbage collection is off.

While a command imports, it has not begun anything, so there is nothing to print or to save.
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
    """Context manager in which Ctrl-C ends the process at once and prints nothing.

    A KeyboardInterrupt would not do: some packages swallow or print it while they are imported.
    """
    return _handled(_leave)


def ignored_by_children() -> AbstractContextManager[None]:
    """Context manager: processes started in it ignore Ctrl-C until they set a handler.

    A new program inherits ignored signals, but no handlers.
    """
    return _handled(signal.SIG_IGN)


@contextmanager
def _handled(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers,
) -> Iterator[None]:
    """Replace Python's handler of Ctrl-C, or this module's.

    Does nothing if other code has set a handler, or outside of the main thread.
    """
    before = signal.getsignal(signal.SIGINT)
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or before not in (signal.default_int_handler, _leave):
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
    """Context manager for imports, which take four fifths of the usual time in it.

    Garbage collection is off in it, and later collections skip the objects made until its end.
    """
    # Objects of imported packages live until the process ends. A collection that searches these
    # 400,000 objects takes 0.2 s.
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
    """Exclude all present objects from later garbage collections; only the first call does it."""
    gc.freeze()
