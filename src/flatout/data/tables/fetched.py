"""Fetch sources from `s3://`, `gs://`, `hdfs://` and whatever else pyarrow reads into the cache.

A source is read several times, so each file is fetched once: `s3://bucket/day/rows.csv` becomes
`.fetched/s3-1f3a9c02/bucket/day/rows.csv` in the cache. It is fetched again when its size or its
time there has changed. The copy is then read like any local file. pyarrow finds the credentials
(environment, profile, role of the machine).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from flatout.data.store.cache import FETCHED, default_cache_folder
from flatout.data.store.lock import acquire, file_lock
from flatout.errors import UserError, first_line, out_of_space, require
from flatout.files import write_atomically


def is_address(source: object) -> bool:
    """Whether a source is an address such as `s3://bucket/rows.csv`, and not a path."""
    return isinstance(source, str) and re.match(r"[a-z][a-z0-9+.-]+://", source) is not None


def fetch(address: str, where: str) -> str:
    """Fetch what is new or has changed below an address, and return the path of the copy."""
    with _errors_explained(address, where):
        system, path = fs.FileSystem.from_uri(address)
        info = system.get_file_info(path)
    require(info.type is not fs.FileType.NotFound, where, f"nothing is at {address}")
    if isinstance(system, fs.LocalFileSystem):
        return path
    require(
        ".." not in Path(path).parts,
        where,
        f"{address} leads upwards",
        hint="Name the place without '..'.",
    )
    parts = urlsplit(address)
    # The same place under another user or password is the same copy; another server is another.
    server = f"{parts.netloc.rpartition('@')[2]}?{parts.query}"
    host = hashlib.sha256(server.encode()).hexdigest()[:8]
    local = default_cache_folder() / FETCHED / f"{parts.scheme}-{host}" / path.strip("/")
    with _errors_explained(address, where):
        local.parent.mkdir(parents=True, exist_ok=True)
        lock = file_lock(local.with_name(f".lock-{local.name}"))
        acquire(lock, -1)
        try:
            if info.type is fs.FileType.File:
                _fetch_file(system, info, local)
            else:
                _fetch_folder(system, path, local)
        finally:
            lock.release()
    return str(local)


def _fetch_folder(system: fs.FileSystem, path: str, local: Path) -> None:
    """Make a local folder hold the files that one elsewhere holds, and no others."""
    files = {
        local / info.path[len(path) :].lstrip("/"): info
        for info in system.get_file_info(fs.FileSelector(path, recursive=True))
        if info.type is fs.FileType.File
    }
    # Names with a dot are ours: notes of what was fetched, and copies that are not complete.
    here = (file for file in local.rglob("*") if file.is_file() and not file.name.startswith("."))
    for gone in set(here) - set(files):
        gone.unlink()
    for file, info in files.items():
        # An object store takes `..` for a name like any other; on a disk it would lead out.
        if ".." not in file.relative_to(local).parts:
            _fetch_file(system, info, file)


def _fetch_file(system: fs.FileSystem, info: fs.FileInfo, local: Path) -> None:
    """Copy a file, unless its last copy was made when it had this size and this time."""
    note = local.with_name(f".{local.name}.fetched")
    state = json.dumps([info.size, info.mtime_ns])
    with suppress(OSError):
        if local.stat().st_size == info.size and note.read_text(encoding="utf-8") == state:
            return
    local.parent.mkdir(parents=True, exist_ok=True)
    partial = local.with_name(f".{local.name}.{secrets.token_hex(4)}.partial")
    try:
        with system.open_input_stream(info.path) as source, partial.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 24)
        # A store's key holds the times of its files, so all machines must give a copy one time.
        if info.mtime_ns is not None:
            os.utime(partial, ns=(info.mtime_ns, info.mtime_ns))
        partial.replace(local)
    finally:
        partial.unlink(missing_ok=True)
    write_atomically(note, state)


@contextmanager
def _errors_explained(address: str, where: str) -> Iterator[None]:
    """Turn errors of pyarrow and of the disk into a UserError about the address."""
    try:
        yield
    except (pa.ArrowCancelled, pa.ArrowMemoryError):
        raise
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            hint = "Make room, or set FLATOUT_CACHE to a folder of another disk."
            raise out_of_space(error, default_cache_folder(), None, where, hint) from None
        hint = "See that the address is right and that pyarrow finds credentials for it."
        if "Unrecognized filesystem" in str(error):
            hint = "Download it first: s3://, gs://, hdfs:// and file:// are read."
        raise UserError(
            where, f"{address} cannot be read ({first_line(error)})", hint=hint
        ) from None
