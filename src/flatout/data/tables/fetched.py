"""Sources that lie elsewhere: `s3://`, `gs://`, `hdfs://` and whatever else pyarrow reads, fetched
into the cache.

A source is read several times, so each file is fetched once, to where its address leads below
`.fetched` in the cache, and again when its size or its time there is another. What is read is that
copy, by the checks that any file gets. Credentials are found as pyarrow finds them (the
environment, the profile, the machine's role).
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


def is_address(given: object) -> bool:
    """Whether a source is named by a scheme and a place rather than by a path."""
    return isinstance(given, str) and re.match(r"[a-z][a-z0-9+.-]+://", given) is not None


def fetch(address: str, where: str) -> str:
    """The path of a file or a folder that lies elsewhere, after what is new or has changed of it
    was fetched.
    """
    with _refusals_told(address, where):
        system, path = fs.FileSystem.from_uri(address)
        found = system.get_file_info(path)
    require(found.type is not fs.FileType.NotFound, where, f"nothing is at {address}")
    if isinstance(system, fs.LocalFileSystem):
        return path
    require(
        ".." not in Path(path).parts,
        where,
        f"{address} leads upwards",
        hint="Name the place without '..'.",
    )
    named = urlsplit(address)  # whose user and password are no part of the place
    host = hashlib.sha256(f"{named.netloc.rpartition('@')[2]}?{named.query}".encode()).hexdigest()[
        :8
    ]
    local = default_cache_folder() / FETCHED / f"{named.scheme}-{host}" / path.strip("/")
    with _refusals_told(address, where):
        local.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(local.with_name(f".lock-{local.name}")) as lock:
            acquire(lock, -1)
            if found.type is fs.FileType.File:
                _fetch_file(system, found, local)
            else:
                _fetch_folder(system, path, local)
    return str(local)


def _fetch_folder(system: fs.FileSystem, path: str, local: Path) -> None:
    there = system.get_file_info(fs.FileSelector(path, recursive=True))
    files = {
        local / info.path[len(path) :].lstrip("/"): info
        for info in there
        if info.type is fs.FileType.File
    }
    here = (file for file in local.rglob("*") if file.is_file() and not file.name.startswith("."))
    for gone in set(here) - set(files):
        gone.unlink()
    for file, info in files.items():
        if ".." not in file.relative_to(local).parts:
            _fetch_file(system, info, file)


def _fetch_file(system: fs.FileSystem, info: fs.FileInfo, local: Path) -> None:
    """Copy a file unless the copy that is there was made of it as it is."""
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
        if info.mtime_ns is not None:
            # copies of all machines are of one time
            os.utime(partial, ns=(info.mtime_ns, info.mtime_ns))
        partial.replace(local)
    finally:
        partial.unlink(missing_ok=True)
    write_atomically(note, state)


@contextmanager
def _refusals_told(address: str, where: str) -> Iterator[None]:
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
