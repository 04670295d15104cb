"""Processes that start at once and never outlive who started them.

A warm server imports everything heavy once. Each child is forked from it before anything has
computed. So it is clean, and starts in a tenth of a second.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import threading
from collections.abc import Mapping
from types import FrameType

from flatout.distributed.imports import ignored_by_children, keep_imported

# names the file that a process and those it starts print to, where not to the terminal
OUTPUT = "FLATOUT_OUTPUT"
_OF_A_GROUP = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that a terminal, `timeout` or a batch system sends to a whole group: the server must
outlive them, as how its children ended is known through it. Each child hears them again."""


def warm_start() -> None:
    """Let a server import what a run needs, beside what this process does meanwhile; harmless to
    ask twice.
    """
    multiprocessing.set_forkserver_preload(
        ["flatout.cli.boundary", "flatout.run.launch", "torch.utils.tensorboard"]
    )
    multiprocessing.resource_tracker.ensure_running()  # it changes what is blocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_A_GROUP)
    try:
        # the server learns to ignore Ctrl-C by itself only after its imports
        with ignored_by_children():
            multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_until_warm() -> None:
    """Return when the server has imported everything, so that no run pays for its imports."""
    process = multiprocessing.get_context("forkserver").Process()  # it does nothing
    process.start()
    process.join()
    process.close()


def end_with_parent() -> None:
    """End this process when the one that started it is gone, however that happened, and let it hear
    signals.
    """
    # What the server has imported for it stays, and shared. Workers of a loader start here as they
    # do elsewhere: Python would let each of them import everything again, because this process came
    # from a server.
    keep_imported()
    multiprocessing.set_start_method(None, force=True)  # back to the platform's own
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_A_GROUP)
    if parent := multiprocessing.parent_process():
        threading.Thread(target=_watch, args=(parent.sentinel,), name="parent", daemon=True).start()


def use_own_resource_tracker() -> None:
    """Let semaphores of this process go with it, even when it is killed: its parent's tracker would
    warn of a leak.
    """
    # the next semaphore starts one
    vars(vars(multiprocessing.resource_tracker)["_resource_tracker"])["_fd"] = None


def interrupt_once(number: int, frame: FrameType | None) -> None:
    """A handler of Ctrl-C: a terminal and a launcher both pass it on, and the second must not
    disturb the ending.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def redirect_output() -> None:
    """Print to the file that `$FLATOUT_OUTPUT` names, native code too."""
    if path := os.environ.get(OUTPUT):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(file, stream)
        os.close(file)


def stand_apart(environment: Mapping[str, str]) -> None:
    """Lead a process group of its own, under another environment, and end with the process that
    started this one.
    """
    os.setsid()
    end_with_parent()
    signal.signal(signal.SIGINT, interrupt_once)
    os.environ.clear()
    os.environ |= environment
    redirect_output()


def _watch(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
