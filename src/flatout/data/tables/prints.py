"""The fingerprints of sources: of every byte, read once until a file changes.

A source is known by its bytes. Which bytes those are is noted in the cache, beside what changes in
a file's entry when the file does: its size, its times and its number. The time of the last change
of the entry (ctime) cannot be set by any program. So a second run, a second rank or a trial needs a
`stat` for each file, and reads none. Files whose entry is younger than a tick of the disk's clock
are waited for: a change right after would leave no trace. What heads of files tell, such as the
names of columns, is noted in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from flatout.data.tables.formats.file import HEADS, Notes
from flatout.data.tables.table import Table, changed
from flatout.errors import UserError
from flatout.files import load_json, wait_for_new_mtime, write_atomically

NOTES = ".sources"  # the folder of the notes in a cache
_PAIR = 2  # a note is a list of a file's entries and its fingerprint


@contextmanager
def heads_noted(cache: Path, sources: Iterable[Any]) -> Iterator[None]:
    """Within it, heads of files are read from notes in the cache, and new ones are noted there."""
    paths = [str(source) for source in sources if isinstance(source, str | Path)]
    note = cache / NOTES / f"heads-{_digest(paths)}"
    noted = _read(note)
    new_notes = Notes()
    outside = HEADS.set((noted, new_notes))
    try:
        yield
        _write(note, noted, new_notes)
    finally:
        HEADS.reset(outside)


def fingerprints_of(tables: Mapping[str, Table], cache: Path) -> dict[str, str]:
    """The fingerprint of each split's table. Two splits with the same content are refused."""
    split_of: dict[str, str] = {}
    for split, table in tables.items():
        other = split_of.setdefault(fingerprint_of(table, cache), split)
        if other != split:
            whose = "training" if other == "train" else other
            raise UserError(
                f"data.{split}",
                f"{table.name} holds exactly the {whose} rows, {tables[other].name}",
                hint="Leave it out to take rows from the training rows.",
            )
    return {split: fingerprint for fingerprint, split in split_of.items()}


class SourceTables:
    """The tables of a source by split, whose content must stay while a store is built of it."""

    tables: Mapping[str, Table]
    cache: Path  # the folder of stores, which has the notes as well

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """By split; to be taken before the tables are read."""
        return fingerprints_of(self.tables, self.cache)

    def require_unchanged(self) -> None:
        """Refuse tables that have changed since their fingerprints were taken."""
        for split, table in self.tables.items():
            if fingerprint_of(table, self.cache) != self.fingerprints[split]:
                raise changed(table.name)


def fingerprint_of(table: Table, cache: Path) -> str:
    """A table's fingerprint, from the cache where its files are as they were when it was noted."""
    return table.joined(prints_of(table, cache))


def prints_of(table: Table, cache: Path) -> list[str]:
    """The fingerprint of each file of a table; only files that have changed are read again.

    A table without files answers its own.
    """
    parts = table.tables or [table]
    entries = [part.entries() for part in parts]
    if None in entries:
        return [part.fingerprint() for part in parts]
    names = []
    changes_ns = [0]
    for entries_of_part in entries:
        paths = []
        for path, *_, change_ns, _ in entries_of_part or ():
            paths.append(path)
            changes_ns.append(int(change_ns))
        names.append(_digest(paths))
    # The note is named after the first file: a source that gets one more finds the others noted.
    note = cache / NOTES / names[0]
    noted = _read(note)
    prints = dict[str, str]()
    for name, entries_of_part in zip(names, entries, strict=True):
        if noted.get(name, [None])[0] == entries_of_part:
            prints[name] = str(noted[name][1])
    if len(prints) < len(names):
        wait_for_new_mtime(max(changes_ns))
        new_notes = dict(noted)
        for name, before, part in zip(names, entries, parts, strict=True):
            if name not in prints:
                prints[name] = part.fingerprint()
                # A file that changed while it was read has a note that fits no entry.
                new_notes[name] = [before if part.entries() == before else None, prints[name]]
        _write(note, noted, new_notes)
    return [prints[name] for name in names]


def _digest(names: Sequence[str | int]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(names).encode("utf-8", "surrogateescape"))


def _read(note: Path) -> Notes:
    try:
        return {name: list(noted) for name, noted in load_json(note).items() if len(noted) == _PAIR}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(note: Path, before: Notes, after: Notes) -> None:
    with suppress(OSError):  # a cache that cannot be written to: every process reads the source
        if after != before:
            note.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(note, json.dumps(after))
