"""Processes that start in a tenth of a second, and end with the process that started them.

A server process (Python's forkserver) imports everything heavy once. Each child is forked from it,
and the server has computed nothing, so the child is as clean as a new process. Open this file when
a process stays behind, does not hear a signal, or starts slowly.
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
from typing import Any

from flatout.distributed.imports import ignored_by_children, keep_imported

# Environment variable: the file that a process and its children print to instead of the terminal.
OUTPUT = "FLATOUT_OUTPUT"
# Signals that a terminal, `timeout` or a batch system sends to a whole group of processes. The
# server must outlive them: it reports how its children ended. Each child hears them again.
_OF_A_GROUP = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def warm_start() -> None:
    """Start the server, which imports what a run needs while this process continues.

    A second call does nothing.
    """
    multiprocessing.set_forkserver_preload(
        ["flatout.cli.boundary", "flatout.run.launch", "torch.utils.tensorboard"]
    )
    # Before signals are blocked, as this changes which ones are.
    multiprocessing.resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_A_GROUP)
    try:
        # The server ignores Ctrl-C by itself only after its imports.
        with ignored_by_children():
            multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_until_warm() -> None:
    """Wait until the server has imported everything."""
    process = multiprocessing.get_context("forkserver").Process()  # it does nothing
    process.start()
    process.join()
    process.close()


def end_with_parent() -> None:
    """In a child of the server: end when the process that started it has ended, and hear signals.

    Killing the parent ends this process, too.
    """
    # Memory of imported modules stays shared with the server as long as nothing writes to it.
    keep_imported()
    # Back to the platform's default. In a child of the server Python would start workers of a
    # loader by the server's method, and each would import everything again.
    multiprocessing.set_start_method(None, force=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_A_GROUP)
    if parent := multiprocessing.parent_process():
        threading.Thread(target=_watch, args=(parent.sentinel,), name="parent", daemon=True).start()


def use_own_resource_tracker() -> None:
    """Remove semaphores of this process when it ends, even when it is killed.

    The parent's tracker would warn of a leak.
    """
    tracker: Any = multiprocessing.resource_tracker
    tracker._resource_tracker._fd = None  # so the next semaphore starts a new tracker


def interrupt_once(number: int, frame: FrameType | None) -> None:
    """Handler of Ctrl-C that raises KeyboardInterrupt once and ignores the next ones.

    A terminal and a launcher both send the signal; the second must not disturb the cleaning up.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def redirect_output() -> None:
    """Send stdout and stderr to the file that `$FLATOUT_OUTPUT` names, those of native code too."""
    if path := os.environ.get(OUTPUT):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(file, stream)
        os.close(file)


def stand_apart(environment: Mapping[str, str]) -> None:
    """Make this process the head of a new process group, with `environment` as its own.

    It ends with the process that started it, as after `end_with_parent`.
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
