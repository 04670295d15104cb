"""Making sure that what was written is on the disk: a file's bytes, and a folder's names."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)


def sync_file(path: Path) -> None:
    """Wait until a file's bytes are on the disk; the disk's late errors are told here and nowhere else."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until a folder's names are on the disk, where its file system can do that."""
    try:
        folder = os.open(path, os.O_RDONLY)
    except OSError as error:
        if error.errno in _NO_FOLDER_SYNC:
            return
        raise
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(folder)


def sync_tree(folder: Path) -> None:
    """Wait until everything below a folder is on the disk, and its names."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        elif path.is_file():
            sync_file(path)
    sync_folder(folder)
