"""Locks: one process builds a store, the one that holds `.lock-KEY` beside the stores.

The kernel frees a lock when its process dies, on a shared disk too (NFS has such locks). A builder
that is stopped keeps its lock: others wait and print so. Files of locks stay until the cache is
cleared. On a file system without locks (no `flock`) each process builds for itself, and the first
store that is finished is kept.
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

from flatout.errors import UserError

BUILDING = ".building-"
_PREFIX = ".lock-"
_LOOK_S = 0.1
_PRINT_AFTER_S = 1.0


def file_lock(path: Path, **settings: Any) -> FileLock:
    """A lock on a file that ends with its process, on any machine."""
    # On a disk without flock, filelock would take the mere existence of a file for a lock, and the
    # file of a process that was killed stays for ever.
    return FileLock(path, fallback_to_soft=False, **settings)


def acquire(lock: FileLock, timeout_s: float, look_s: float = 0.05) -> bool:
    """Take a lock, or raise a Timeout after `timeout_s`; a negative time waits for ever.

    Return False on a disk without flock: nothing is locked.
    """
    try:
        lock.acquire(timeout=timeout_s, poll_interval=look_s)
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ELOOP):
            raise UserError(
                lock.lock_file, "is a folder or a link, and should be a lock", hint="Remove it."
            ) from None
        if error.errno != errno.ENOSYS:
            raise
    return lock.is_locked


@contextmanager
def lock(folder: Path, key: str, *, waits: bool = True) -> Iterator[bool]:
    """Hold the lock on building `key` inside; yields whether it is held.

    It is not held on a disk without locks. With `waits=False`, neither if another process has it.
    """
    build_lock = file_lock(folder / f"{_PREFIX}{key}", mode=0o666)  # a cache may have several users
    try:
        is_held = acquire(build_lock, _PRINT_AFTER_S if waits else 0, _LOOK_S)
    except Timeout:
        if waits:
            who = _name_builder(folder, key)
            print(
                f"cache: waiting for {who}, which is building this store",
                file=sys.stderr,
                flush=True,
            )
        is_held = waits and acquire(build_lock, -1, _LOOK_S)
    try:
        yield is_held
    finally:
        build_lock.release()


def remove_locks(folder: Path) -> None:
    """Remove the files of locks that no process holds."""
    for path in folder.glob(f"{_PREFIX}*"):
        with lock(folder, path.name.removeprefix(_PREFIX), waits=False) as is_free:
            if is_free:
                path.unlink(missing_ok=True)


def name_building(key: str) -> str:
    """A new name for the folder in which this process builds."""
    return f"{BUILDING}{key}-{os.getpid()}@{platform.node()}-{secrets.token_hex(4)}"


def _name_builder(folder: Path, key: str) -> str:
    """Who builds a store: `.building-KEY-41@box-9f3c` → `process 41 on box`."""
    for path in folder.glob(f"{BUILDING}{key}-*@*"):
        own_part = path.name.removeprefix(f"{BUILDING}{key}-").rpartition("-")[0]
        process, _, machine = own_part.partition("@")
        return f"process {process} on {machine}"
    return "another process"
