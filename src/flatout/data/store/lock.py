"""Who builds a store: the process that holds its lock, a file `.lock-KEY` beside the stores.

The kernel frees a lock when its process dies, on a shared disk too (NFS has such locks). A builder
that is stopped keeps it: others wait and print so. Files of locks stay until the cache is cleared.
Where a file system has no locks (no `flock`), each process builds for itself, and the first to
finish is kept.
"""

from __future__ import annotations

import errno
import os
import platform
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

BUILDING = ".building-"
_PREFIX = ".lock-"
_LOOK_S = 0.1
_PRINT_AFTER_S = 1.0


def file_lock(path: Path, **settings: Any) -> FileLock:
    """A lock that ends with its process, on any machine; filelock's stand-in for disks without
    flock may outlive it.
    """
    return FileLock(path, fallback_to_soft=False, **settings)


def acquire(held: FileLock, timeout_s: float, look_s: float = 0.05) -> bool:
    """Hold it, or raise a Timeout; a negative time waits for ever.

    False on a disk without flock: nothing is locked.
    """
    try:
        held.acquire(timeout=timeout_s, poll_interval=look_s)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
    return held.is_locked


@contextmanager
def lock(folder: Path, key: str, *, waits: bool = True) -> Iterator[bool]:
    """Hold the lock on building `key`; false where there are no locks, or it is held and not waited
    for.
    """
    held = file_lock(folder / f"{_PREFIX}{key}", mode=0o666)  # a shared cache has several users
    try:
        is_held = acquire(held, _PRINT_AFTER_S if waits else 0, _LOOK_S)
    except Timeout:
        if waits:
            who = _builder(folder, key)
            print(
                f"cache: waiting for {who}, which is building this store",
                file=sys.stderr,
                flush=True,
            )
        is_held = waits and acquire(held, -1, _LOOK_S)
    try:
        yield is_held
    finally:
        held.release()


def remove_locks(folder: Path) -> None:
    """Remove the files of locks that no process holds."""
    for path in folder.glob(f"{_PREFIX}*"):
        with lock(folder, path.name.removeprefix(_PREFIX), waits=False) as is_free:
            if is_free:
                path.unlink(missing_ok=True)


def name_building(key: str) -> str:
    """A new name for the folder in which this process builds."""
    return f"{BUILDING}{key}-{os.getpid()}@{platform.node()}-{secrets.token_hex(4)}"


def _builder(folder: Path, key: str) -> str:
    for path in folder.glob(f"{BUILDING}{key}-*@*"):
        process, _, machine = (
            path.name.removeprefix(f"{BUILDING}{key}-").rpartition("-")[0].partition("@")
        )
        return f"process {process} on {machine}"
    return "another process"
