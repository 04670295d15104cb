"""Processes that start at once and never outlive who started them.

A warm server imports everything heavy once; each child is forked from it before anything has computed, so it is as
clean as a new interpreter and there in a tenth of a second.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import threading

_HEAVY = ["flatout.run", "flatout.scale.processes", "torch.utils.tensorboard"]


def warm_start() -> None:
    """Let a server import what a run needs, beside what this process does meanwhile; harmless to ask twice."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        multiprocessing.set_forkserver_preload(_HEAVY)
        multiprocessing.forkserver.ensure_running()


def end_with_parent() -> None:
    """End this process when the one that started it is gone, however that happened."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    threading.Thread(target=_watch, args=(parent.sentinel,), name="parent", daemon=True).start()


def _watch(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
