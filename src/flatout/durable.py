"""Files that are there whole or not at all, also after a crash of the machine: written beside, synced, renamed.

A rename alone is atomic for other processes, not for the disk: without the three syncs (the file's bytes, the names in
its folder, the name in the parent's) a power cut may leave a name with nothing behind it.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from flatout.errors import UserError


def sync_file(path: Path) -> None:
    """Wait until a file's bytes are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk; some file systems cannot be asked, and need not be."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EISDIR):
            raise


def write_synced(path: Path, data: bytes) -> None:
    """A new file with these bytes, on the disk when this returns."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def put_in_place(beside: Path, target: Path) -> None:
    """Give a finished folder its name; one that has the name already steps aside first and is taken away last."""
    sync_folder(beside)
    aside = target.with_name(f".{target.name}{_ASIDE}")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    try:
        beside.rename(target)
    except OSError:
        put_back(target.parent)
        raise
    sync_folder(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def put_back(parent: Path) -> None:
    """Give folders their names again that had stepped aside for one that never came."""
    for aside in parent.glob(f".*{_ASIDE}"):
        target = parent / aside.name.removeprefix(".").removesuffix(_ASIDE)
        if not target.exists():
            aside.rename(target)


_ASIDE = "-replaced"


def no_room(error: OSError, where: str, place: Path, needed: int, mend: str) -> UserError:
    """What a person can do about a disk that takes no more."""
    reason = _REASONS.get(error.errno or 0, (error.strerror or str(error)).lower())
    what = f"{place}: {reason}; {needed / 1e6:,.1f} MB needed"
    try:
        what += f", {shutil.disk_usage(_nearest(place)).free / 1e6:,.1f} MB free"
    except OSError:
        what += ", free space unknown"
    return UserError(where, what, mend=mend)


_REASONS = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the quota is used up",
    errno.EROFS: "the disk is read-only",
    errno.EACCES: "not allowed to write",
    errno.EPERM: "not allowed to write",
    errno.EIO: "the disk failed",
}


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Errors of a disk rather than of a name."""


def _nearest(place: Path) -> Path:
    """The place itself, or the nearest folder above it that exists."""
    return next(path for path in (place, *place.absolute().parents) if path.exists())
