"""The fingerprints of sources: of every byte, read once until a file changes.

A source is known by its bytes. Which bytes those are is noted in the cache, beside what changes in a file's entry when
the file does: its size, its times and its number. The time of the last change of the entry (ctime) cannot be set by
anybody, so a second run, a second rank or a trial needs a `stat` for each file, and reads none. Files whose entry is
younger than a tick of the disk's clock are waited for: a change right after would leave no trace.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import xxhash

from flatout.data.tables.table import Table, changed
from flatout.errors import UserError
from flatout.files import let_time_move, write_atomically

NOTES = ".sources"  # the folder of the notes in a cache


def fingerprints_of(tables: Mapping[str, Table], cache: Path) -> dict[str, str]:
    """The fingerprint of each split's table; no two splits may have the same content, under whatever names."""
    found: dict[str, str] = {}
    for split, table in tables.items():
        fingerprint = fingerprint_of(table, cache)
        if (other := next((name for name, before in found.items() if before == fingerprint), None)) is not None:
            whose = "training" if other == "train" else other
            what = f"{table.name} holds exactly the {whose} rows, {tables[other].name}"
            raise UserError(f"data.{split}", what, hint="Leave it out to take rows from the training rows.")
        found[split] = fingerprint
    return found


def require_unchanged(tables: Mapping[str, Table], fingerprints: Mapping[str, str], cache: Path) -> None:
    """Tables that were read several times must have been the same each time."""
    for split, table in tables.items():
        if fingerprint_of(table, cache) != fingerprints[split]:
            raise changed(table.name)


def fingerprint_of(table: Table, cache: Path) -> str:
    """A table's fingerprint, from the cache where its files are as they were when it was noted."""
    return table.joined(prints_of(table, cache))


def prints_of(table: Table, cache: Path) -> list[str]:
    """The fingerprint of each table whose rows it has, or its own; of files, those that changed are read again."""
    parts = table.tables or [table]
    entries = [part.entries() for part in parts]
    if None in entries:
        return [part.fingerprint() for part in parts]
    names = [_digest([name for name, *_ in each or ()]) for each in entries]
    note = cache / NOTES / names[0]  # of the first file: one more behind it finds the others noted
    try:
        noted = dict(json.loads(note.read_bytes()))
        found = {
            name: str(noted[name][1])
            for name, own in zip(names, entries, strict=True)
            if noted.get(name, [None])[0] == own
        }
    except (OSError, ValueError, TypeError, LookupError):
        noted, found = {}, {}
    if len(found) < len(names):
        let_time_move(max((int(entry[3]) for each in entries for entry in each or ()), default=0))
        for name, own, part in zip(names, entries, parts, strict=True):
            if name not in found:
                found[name] = part.fingerprint()
                noted[name] = [own if part.entries() == own else None, found[name]]
        with suppress(OSError):  # a cache that cannot be written to: every process reads the source
            note.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(note, json.dumps(noted))
    return [found[name] for name in names]


def _digest(names: list[str | int]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(names).encode("utf-8", "surrogateescape"))
