"""What a table's rows show before they are compared: by the block, and kept for each file of many.

What each file of a large source shows is a small store in the cache, known by the file's bytes and
by the rules it was read with. So a survey that was killed continues, processes that survey one
source share the work, and one more file is read alone. What is found is the same, whether it was
kept or not.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flatout.data.checks.characters import ODDITIES, read_characters
from flatout.data.checks.cleaning import CleanBlock, CleaningConfig, clean_block
from flatout.data.checks.findings import Findings
from flatout.data.checks.labels import LabelCensus, normalise_labels
from flatout.data.problem import Problem
from flatout.data.store.cache import Cache, Recipe, recipe_key
from flatout.data.store.store import Column, Store, StoreWriter
from flatout.data.tables.roles import Roles
from flatout.data.tables.splits import hash_texts
from flatout.data.tables.table import (
    ManyFiles,
    Table,
    are_numbers,
    as_texts,
    changed,
    decoded,
    mask_of,
)
from flatout.errors import require

_THREADS = 2
_WAITING = 4
_ROWS_PER_BLOCK = 32_768
_MADE_AS = 2
_DAYS_KEPT = 30
_ROW = [
    ("alike", "u8"),
    ("exact", "u8"),
    ("group", "u8"),
    ("row", "i8"),
    ("code", "i4"),
    ("words", "i4"),
]
ROW = np.dtype([*_ROW, ("odd", "u1"), ("is_alone", "?"), ("is_changed", "?")], align=True)
"""A row: hashes of its letters, its text and its group. Its number; its label's, or the bits of a
number to predict. How many words it has; a bit for each of `ODDITIES`; whether it has no group, and
whether it was repaired."""
Advance = Callable[[int], None]
Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Seen:
    """A block of rows: what those tell that are used."""

    begin: int  # the number of its first row
    num_rows: int
    rows: NDArray[np.void]
    has_words: bool  # whether a text of the table, as far as it was read, is more than a number


@dataclass(frozen=True, slots=True)
class Rules:
    """What is looked at, and what is done with rows that cannot be trained on as written."""

    roles: Roles
    problem: Problem
    delimiter: str | None
    cleaning: CleaningConfig
    group: str | None
    is_train: bool

    def look(
        self, table: Table, census: LabelCensus, findings: Findings, advance: Advance
    ) -> Iterator[Seen]:
        """Every row of a table, by the block; labels are numbered by `census`."""
        how: dict[str, Any] = {"problem": self.problem, "delimiter": self.delimiter}
        how |= {"source": table.name, "locate": table.locate}
        # words may be numbers
        has_words = self.problem is Problem.tags
        cleaned = self._cleaned(table, findings)
        for (begin, block, clean), characters in ahead(
            cleaned, lambda each: read_characters(each[2].texts)
        ):
            labels = normalise_labels(clean.labels, clean.rows, **how)
            rows = np.zeros(len(clean.rows), ROW)
            rows["alike"] = characters.alike
            rows["exact"] = characters.exact
            rows["words"] = characters.words
            rows["row"] = clean.rows
            rows["is_changed"] = clean.is_changed
            rows["code"] = census.code(labels)
            for number, oddity in enumerate(ODDITIES):
                rows["odd"][characters.odd.get(oddity, [])] |= 1 << number
            if self.problem is Problem.regression:  # rows with other numbers differ
                rows["code"] = (
                    labels.to_numpy(zero_copy_only=False).astype(np.float32).view(np.int32)
                )
            if self.problem is Problem.multi:
                findings.add("no_labels", clean.rows[np.diff(labels.offsets.to_numpy()) == 0])
            if self.group:
                self._add_groups(
                    rows, decoded(block.column(self.group)).take(pa.array(clean.rows - begin))
                )
            has_words = has_words or not are_numbers(clean.texts)
            advance(block.num_rows)
            yield Seen(begin, block.num_rows, rows, has_words)

    def _cleaned(
        self, table: Table, findings: Findings
    ) -> Iterator[tuple[int, pa.RecordBatch, CleanBlock]]:
        wanted = list(dict.fromkeys([*self.roles.columns, *filter(None, [self.group])]))
        rules: dict[str, Any] = {
            "roles": self.roles,
            "problem": self.problem,
            "cleaning": self.cleaning,
        }
        rules |= {"is_train": self.is_train, "findings": findings}
        for rows, block in table.numbered(wanted, _ROWS_PER_BLOCK):
            yield int(rows[0]) if len(rows) else 0, block, clean_block(block, rows=rows, **rules)

    def _add_groups(self, rows: NDArray[np.void], group: pa.Array) -> None:
        require(
            not pa.types.is_nested(group.type),
            "data.group",
            f"column {self.group!r} holds {group.type}",
            allowed="texts or numbers",
        )
        rows["group"] = hash_texts(as_texts(group))
        rows["is_alone"] = mask_of(group.is_null())


class BuildPart(NamedTuple):
    """Which of several processes that build one store this is: `number` of `count`, from 1 on."""

    number: int = 1
    num_parts: int = 1


WHOLE = BuildPart()
"""A build that one process does alone."""


class KeptFiles:
    """What the files of a source show, read from the cache if it was worked out before."""

    def __init__(
        self, kept: Cache, rules: Rules, read: Recipe, prints: list[str], part: BuildPart
    ) -> None:
        """`prints` are the fingerprints of the files. Each `part` begins with other files."""
        self.kept = kept
        self.rules = rules
        self.read = read
        self.prints = prints
        self.part = part

    def look(
        self, table: ManyFiles, census: LabelCensus, findings: Findings, advance: Advance
    ) -> Iterator[Seen]:
        """As `Rules.look`, of the rows of several files."""
        keys = self._keys(table)
        files = table.tables
        begin = 0

        def store_of(place: int) -> Store:
            return self.kept.kept(
                keys[place], files[place].name, partial(self._keep, files[place], advance)
            )

        def keep(place: int) -> None:
            store_of(place)  # which is not held: it is a file that stays open

        self.kept.remove_unused(_DAYS_KEPT)
        if known := sum((self.kept.folder / key).is_dir() for key in keys):
            print(f"cache: {known} of {len(files)} files were looked at before", file=sys.stderr)
        first = len(files) * (self.part.number - 1) // self.part.num_parts
        order = [*range(first, len(files)), *range(first)]
        # the next file is read while one waits for the disk
        with ThreadPoolExecutor(_THREADS) as threads:
            deque(threads.map(keep, order), 0)
        for place, store in enumerate(map(store_of, range(len(files)))):
            table.begins(place, begin)
            facts = store.facts
            findings.take_in(facts["rows_read"], facts["found"], begin)
            yield from self._blocks(store, begin, census.take_in(facts["names"], facts["sets"]))
            begin += facts["rows_read"]

    def _keys(self, table: ManyFiles) -> list[str]:
        made = {"made": _MADE_AS, "rules": asdict(self.rules), "read": self.read}
        prints = zip(table.tables, self.prints, strict=True)
        return [
            recipe_key(made | {"file": found, "how": [type(file).__name__, file.how()]})
            for file, found in prints
        ]

    def _keep(self, file: Table, advance: Advance, writer: StoreWriter) -> None:
        census = LabelCensus(self.rules.problem)
        findings = Findings(file.name, locate=file.locate)
        into = writer.split("rows", {"bytes": Column("uint8", width=ROW.itemsize)})
        blocks = list[Any]()
        for seen in self.rules.look(file, census, findings, advance):
            into.append(bytes=seen.rows.view(np.uint8).reshape(-1, ROW.itemsize))
            blocks.append((seen.num_rows, len(seen.rows), seen.has_words))
        if file.entries() is None:
            raise changed(file.name)
        found = {name: (each.count, each.rows, each.other) for name, each in findings.found.items()}
        names, sets = census.numbers()
        writer.facts |= {"names": names, "sets": sets, "blocks": blocks}
        writer.facts |= {"rows_read": findings.rows_read, "found": found}

    def _blocks(self, store: Store, begin: int, codes: NDArray[np.int32]) -> Iterator[Seen]:
        of_file = store.splits["rows"].fixed("bytes").reshape(-1).view(ROW)
        done = 0
        first = begin
        for num_rows, used, has_words in store.facts["blocks"]:
            rows = of_file[done : done + used].copy()
            rows["row"] += first
            if self.rules.problem.has_classes:
                rows["code"] = codes[rows["code"]]
            yield Seen(begin, num_rows, rows, has_words)
            done, begin = done + used, begin + num_rows


def ahead(items: Iterable[Given], work: Callable[[Given], Made]) -> Iterator[tuple[Given, Made]]:
    """Items in their order, each with what a thread has made of it while the next ones are read."""
    waiting: deque[tuple[Given, Future[Made]]] = deque()
    with ThreadPoolExecutor(_THREADS) as threads:
        for item in items:
            waiting.append((item, threads.submit(work, item)))
            if len(waiting) >= _WAITING:
                first, made = waiting.popleft()
                yield first, made.result()
        for first, made in waiting:
            yield first, made.result()
