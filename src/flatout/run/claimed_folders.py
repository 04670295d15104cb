"""Which folder a run has: its name, who may begin in it, and the lock of the one that trains.

A new run claims a folder by making the log in it, and of several at once one succeeds. A run that
trains holds the lock `.lock`, so that no other process trains there, on any machine that sees the
folder. What is written into a folder is in `run_folder.py`. Open this file to change how folders
are named, or which are refused.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from flatout.checkpoints.kept import CHECKPOINTS, newest_first
from flatout.data.store.lock import acquire, file_lock
from flatout.errors import UserError, require
from flatout.files import numbered, refused_folder
from flatout.report.summary import FILE as SUMMARY
from flatout.report.summary import read_summary

OVERRIDES = "overrides.txt"  # what was typed, a word a line
SETTINGS = "config.yaml"  # all settings
LOG = "log.txt"  # what was printed; the run that made this file owns the folder
LOCK = ".lock"  # an empty file that stays; the process that trains in the folder holds a lock on it
# what a run would replace
_OWN = (SETTINGS, OVERRIDES, LOG, "report.html", "metrics.csv", "checkpoints", "model")
_PATIENCE_S = 30.0  # how long a run that is just ending may still hold its folder


def claim_folder(path: Path) -> Path:
    """Make the folder of a new run, for this run alone.

    Where another run has its name, a number is added. A link beside it is passed over, as it may
    lead anywhere; one of the name itself is what somebody has named.
    """
    folders = (folder for folder in numbered(path) if folder == path or not folder.is_symlink())
    return next(folder for folder in folders if _is_claimed(folder))


def list_numbered(path: Path) -> list[Path]:
    """A folder that is named for a run, and those that `claim_folder` has numbered beside it."""
    beside = itertools.islice(numbered(path), 1, None)
    return [path, *itertools.takewhile(Path.exists, beside)]


def claim_named_folder(path: Path) -> Path:
    """Make the folder that a user names for a new run.

    A folder whose run has finished, still trains, or has left checkpoints to resume from is
    refused.
    """
    taken = [name for name in _OWN if (path / name).exists()]
    if taken and not (path / SUMMARY).is_file():
        require(
            _is_in_use(path),
            "hydra.run.dir",
            f"{path} has a {taken[0]}, and no {SUMMARY} of a run",
            hint="Name a folder of the run's own.",
        )
    elif _is_claimed(path):
        return path
    status = read_summary(path)["status"] if (path / SUMMARY).is_file() else ""
    require(
        status != "finished",
        "hydra.run.dir",
        f"{path} holds a finished run",
        hint=f"Name another folder, or add resume={path} to continue that run.",
    )
    is_begun = status in ("failed", "interrupted") or (status == "running" and not _is_in_use(path))
    require(
        is_begun, "hydra.run.dir", f"another process trains in {path}", hint="Name another folder."
    )
    has_checkpoints = bool(newest_first(path / CHECKPOINTS))
    require(
        not has_checkpoints,
        "hydra.run.dir",
        f"{path} holds the checkpoints of a run that has not finished",
        hint=f"Add resume={path} to continue that run, or name another folder.",
    )
    return path


def _is_claimed(folder: Path) -> bool:
    """Whether this process is the one that begins the log there: of several at once one is."""
    try:
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            # another run with a mistake in its settings took away the empty folder
            with suppress(FileNotFoundError):
                (folder / LOG).open("x").close()
                return True
    except FileExistsError:
        return False
    except OSError as error:
        raise refused_folder(error, folder) from None


def newest_runs(runs: Path, file: str) -> list[Path]:
    """The folders of runs that hold a file, the newest first."""
    return sort_runs(path.parent for path in runs.glob(f"*/{file}"))


def sort_runs(folders: Iterable[Path]) -> list[Path]:
    """Folders of runs, the newest first."""
    # Names are in local time, which runs back once a year and differs between zones.
    return sorted(folders, key=lambda run: (_when_begun(run), run.name), reverse=True)


def _when_begun(run: Path) -> str:
    """The moment a run began, by UTC; empty where its summary does not say, as in
    earlier versions.
    """
    try:
        return str(read_summary(run).get("begun") or "")
    except UserError:
        return ""


def name_folder(parent: Path) -> Path:
    """A folder named after this moment."""
    return parent / time.strftime("%Y-%m-%d_%H-%M-%S")


@contextmanager
def folder_of_one(folder: Path) -> Iterator[None]:
    """Let no other process train in a run's folder meanwhile, on any machine that sees it."""
    lock = file_lock(folder / LOCK)
    _wait_for_lock(lock, folder)
    try:
        yield
    finally:
        # A mistake that was found before the run began leaves nothing else: then the folder goes.
        is_empty = [path.name for path in folder.glob("*")] == [LOCK]
        if is_empty:
            (folder / LOCK).unlink(missing_ok=True)
        lock.release()
        if is_empty:
            with suppress(OSError):
                folder.rmdir()


def _wait_for_lock(lock: FileLock, folder: Path) -> None:
    """Wait a while for another process to leave a run's folder: it may just be ending."""
    until = None
    while not _is_ours(lock):
        if until is None:
            print(
                f"resume: {folder} is in use by another process; waiting up to {_PATIENCE_S:.0f} s",
                flush=True,
            )
            until = time.monotonic() + _PATIENCE_S
        if time.monotonic() > until:
            raise UserError(
                "resume",
                f"{folder} is still being trained in by another process",
                hint="Wait for it or end it, or leave resume out: a new run begins.",
            )
        time.sleep(0.1)


def _is_ours(lock: FileLock) -> bool:
    """Try to lock a folder; true, too, where the disk has no locks or takes no file."""
    # On NFS the kernel keeps a lock on a folder to one machine, and shares one on a regular file.
    try:
        acquire(lock, 0)
    except Timeout:
        return False
    except OSError:
        # the next write to this disk fails with a message that names the cause
        return True
    return True


def _is_in_use(folder: Path) -> bool:
    """Whether a process trains in a folder; leaves no file where none ever has."""
    if not (folder / LOCK).is_file():
        return False
    lock = file_lock(folder / LOCK)
    is_ours = _is_ours(lock)
    lock.release()
    return not is_ours
