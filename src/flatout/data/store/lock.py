"""Who builds a store: the process that holds its lock, a file `.lock-KEY` beside the stores.

The kernel frees a lock when its process dies, on a shared disk too (NFS has such locks). A builder that is stopped
keeps it: others wait and print so. Files of locks stay until the cache is cleared.

Where a file system has no locks (`flock` is not supported), each process builds for itself, in a folder of its own, and
the first to finish is kept.
"""

from __future__ import annotations

import os
import platform
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

BUILDING = ".building-"
_PREFIX = ".lock-"
_LOOK_S, _PRINT_AFTER_S = 0.1, 1.0


@contextmanager
def lock(folder: Path, key: str) -> Iterator[bool]:
    """Hold the lock on building `key`; waits for another process that builds it. False where there are no locks."""
    held = _lock_of(folder, key)
    try:
        held.acquire(timeout=_PRINT_AFTER_S, poll_interval=_LOOK_S)
    except Timeout:
        print(f"cache: waiting for {_builder(folder, key)}, which is building this store", file=sys.stderr, flush=True)
        held.acquire(timeout=-1, poll_interval=_LOOK_S)
    except NotImplementedError:  # filelock raises it on a disk without flock: each process builds for itself
        yield False
        return
    try:
        yield True
    finally:
        held.release()


@contextmanager
def lock_at_once(folder: Path, key: str) -> Iterator[bool]:
    """Whether the lock on building `key` is free; holds it if so."""
    held = _lock_of(folder, key)
    try:
        held.acquire(timeout=0)
    except (Timeout, NotImplementedError):  # held by another, or a disk without flock, where none can be held
        yield False
        return
    try:
        yield True
    finally:
        held.release()


def remove_locks(folder: Path) -> None:
    """Remove the files of locks that no process holds."""
    for path in folder.glob(f"{_PREFIX}*"):
        with lock_at_once(folder, path.name.removeprefix(_PREFIX)) as is_free:
            if is_free:
                path.unlink(missing_ok=True)


def name_building(key: str) -> str:
    """A new name for the folder in which this process builds."""
    return f"{BUILDING}{key}-{os.getpid()}@{platform.node()}-{secrets.token_hex(4)}"


def key_of_building(folder: Path) -> str:
    """The key of the store that is built in a folder."""
    return folder.name.removeprefix(BUILDING).partition("-")[0]


def _lock_of(folder: Path, key: str) -> FileLock:
    return FileLock(folder / f"{_PREFIX}{key}", mode=0o666)  # a shared cache has several users


def _builder(folder: Path, key: str) -> str:
    """The process that builds `key`, as its folder names it."""
    for path in folder.glob(f"{BUILDING}{key}-*@*"):
        process, _, machine = path.name.removeprefix(f"{BUILDING}{key}-").rpartition("-")[0].partition("@")
        return f"process {process} on {machine}"
    return "another process"
