"""The fingerprints of sources: of every byte, read once until a file changes.

A source is known by its bytes. Which bytes those are is noted in the cache, beside what changes in
a file's entry when the file does: its size, its times and its number. The time of the last change
of the entry (ctime) cannot be set by anybody, so a second run, a second rank or a trial needs a
`stat` for each file, and reads none. Files whose entry is younger than a tick of the disk's clock
are waited for: a change right after would leave no trace. What heads of files tell, such as the
names of columns, is noted in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from flatout.data.tables.formats.file import HEADS, Notes
from flatout.data.tables.table import Table, changed
from flatout.errors import UserError
from flatout.files import wait_for_new_mtime, write_atomically

NOTES = ".sources"  # the folder of the notes in a cache
_PAIR = 2


@contextmanager
def heads_noted(cache: Path, sources: Iterable[Any]) -> Iterator[None]:
    """Within it, what the heads of the files of some sources tell is noted in the cache, and taken
    from there then.
    """
    note = (
        cache
        / NOTES
        / f"heads-{_digest([str(source) for source in sources if isinstance(source, str | Path)])}"
    )
    noted = _read(note)
    found = Notes()
    outside = HEADS.set((noted, found))
    try:
        yield
        _write(note, noted, found)
    finally:
        HEADS.reset(outside)


def fingerprints_of(tables: Mapping[str, Table], cache: Path) -> dict[str, str]:
    """The fingerprint of each split's table; no two splits may have the same content, under
    whatever names.
    """
    found: dict[str, str] = {}
    for split, table in tables.items():
        fingerprint = fingerprint_of(table, cache)
        if (
            other := next((name for name, before in found.items() if before == fingerprint), None)
        ) is not None:
            whose = "training" if other == "train" else other
            raise UserError(
                f"data.{split}",
                f"{table.name} holds exactly the {whose} rows, {tables[other].name}",
                hint="Leave it out to take rows from the training rows.",
            )
        found[split] = fingerprint
    return found


def require_unchanged(
    tables: Mapping[str, Table], fingerprints: Mapping[str, str], cache: Path
) -> None:
    """Tables that were read several times must have been the same each time."""
    for split, table in tables.items():
        if fingerprint_of(table, cache) != fingerprints[split]:
            raise changed(table.name)


def fingerprint_of(table: Table, cache: Path) -> str:
    """A table's fingerprint, from the cache where its files are as they were when it was noted."""
    return table.joined(prints_of(table, cache))


def prints_of(table: Table, cache: Path) -> list[str]:
    """The fingerprint of each table whose rows it has, or its own; of files, those that changed are
    read again.
    """
    parts = table.tables or [table]
    entries = [part.entries() for part in parts]
    if None in entries:
        return [part.fingerprint() for part in parts]
    names = [_digest([name for name, *_ in each or ()]) for each in entries]
    note = cache / NOTES / names[0]  # of the first file: one more behind it finds the others noted
    noted = _read(note)
    found = dict[str, str]()
    for name, own in zip(names, entries, strict=True):
        if noted.get(name, [None])[0] == own:
            found[name] = str(noted[name][1])
    if len(found) < len(names):
        changes_ns = (int(entry[3]) for each in entries for entry in each or ())
        wait_for_new_mtime(max(changes_ns, default=0))
        new = dict(noted)
        for name, own, part in zip(names, entries, parts, strict=True):
            if name not in found:
                found[name] = part.fingerprint()
                new[name] = [own if part.entries() == own else None, found[name]]
        _write(note, noted, new)
    return [found[name] for name in names]


def _digest(names: Sequence[str | int]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(names).encode("utf-8", "surrogateescape"))


def _read(note: Path) -> Notes:
    try:
        return {
            name: list(noted)
            for name, noted in json.loads(note.read_bytes()).items()
            if len(noted) == _PAIR
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(note: Path, before: Notes, after: Notes) -> None:
    with suppress(OSError):  # a cache that cannot be written to: every process reads the source
        if after != before:
            note.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(note, json.dumps(after))
