"""Measure each row of a table by itself: words, odd characters, hashes, group and label.

`Rules.look` reads a table block by block and yields a record of fixed size for each row that can be
used. `KeptFiles.look` does the same for a source of many files. It keeps the records of each file
in the cache, as a small store; its key is made of the file's bytes and the rules. So a survey that
was killed continues, processes that survey one source share the work, and a new file is read alone.
Both yield the same blocks. Open this file to measure something more of each row.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flatout.data.checks.characters import ODDITIES, read_characters
from flatout.data.checks.cleaning import BlockRules, CleanBlock, CleaningConfig, clean_block
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

_THREADS = 2  # each reads a file, or measures a block
_MOST_WAITING = 4  # blocks that are measured ahead of the one that is used
_ROWS_PER_BLOCK = 32_768
_FORMAT = 2  # part of each key; a higher number makes all that is kept be measured again
_DAYS_KEPT = 30  # what no survey has used for so long is removed
# The record of a row. Its bytes are kept in the cache: a change needs a new `_FORMAT`.
ROW = np.dtype(
    [
        ("alike", "u8"),  # hash of its letters and digits
        ("exact", "u8"),  # hash of its text
        ("group", "u8"),  # hash of its value of `data.group`
        ("row", "i8"),  # its number in the table
        ("code", "i4"),  # the number of its label, or the bits of a number to predict
        ("words", "i4"),  # how many words it has
        ("odd", "u1"),  # a bit for each of `ODDITIES`
        ("is_alone", "?"),  # whether it has no group
        ("is_changed", "?"),  # whether it was repaired
    ],
    align=True,
)
Advance = Callable[[int], None]
"""Is called with the number of rows read since the last call."""
Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Seen:
    """The records of a block: those of its rows that are used."""

    begin: int  # the number of the block's first row
    num_rows: int  # rows of the block, used or not
    rows: NDArray[np.void]
    has_words: bool  # whether a text of the table, as far as it was read, is more than a number


@dataclass(frozen=True, slots=True)
class Rules:
    """Which columns of a table are measured, and the rules for rows that cannot be trained on.

    All fields are part of the key under which a file's records are kept.
    """

    roles: Roles
    problem: Problem
    delimiter: str | None
    cleaning: CleaningConfig
    group: str | None
    is_train: bool

    def look(
        self, table: Table, census: LabelCensus, findings: Findings, advance: Advance
    ) -> Iterator[Seen]:
        """Measure every row of a table, by the block; labels are numbered by `census`."""
        # words may be numbers
        has_words = self.problem is Problem.tags
        cleaned = self._clean_blocks(table, findings)
        for (begin, block, clean), characters in ahead(
            cleaned, lambda item: read_characters(item[2].texts)
        ):
            labels = normalise_labels(
                clean.labels, clean.rows, findings, problem=self.problem, delimiter=self.delimiter
            )
            rows = np.zeros(len(clean.rows), ROW)
            rows["alike"] = characters.alike
            rows["exact"] = characters.exact
            rows["words"] = characters.words
            rows["row"] = clean.rows
            rows["is_changed"] = clean.is_changed
            rows["code"] = census.code(labels)
            for bit, oddity in enumerate(ODDITIES):
                rows["odd"][characters.odd.get(oddity, [])] |= 1 << bit
            # Equal texts with other numbers are no repeats: the bits of a float tell them apart.
            if self.problem is Problem.regression:
                numbers = labels.to_numpy(zero_copy_only=False)
                rows["code"] = numbers.astype(np.float32).view(np.int32)
            if self.problem is Problem.multi:
                findings.add("no_labels", clean.rows[np.diff(labels.offsets.to_numpy()) == 0])
            if self.group:
                groups = decoded(block.column(self.group))
                self._add_groups(rows, groups.take(pa.array(clean.rows - begin)))
            has_words = has_words or not are_numbers(clean.texts)
            advance(block.num_rows)
            yield Seen(begin, block.num_rows, rows, has_words)

    def _clean_blocks(
        self, table: Table, findings: Findings
    ) -> Iterator[tuple[int, pa.RecordBatch, CleanBlock]]:
        """The number of each block's first row, the block, and its rows that are used."""
        columns = [*self.roles.columns]
        if self.group and self.group not in columns:
            columns.append(self.group)
        rules = BlockRules(self.roles, self.problem, self.is_train, self.cleaning)
        for rows, block in table.numbered(columns, _ROWS_PER_BLOCK):
            first = int(rows[0]) if len(rows) else 0
            yield first, block, clean_block(block, rows, rules, findings)

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
    """Which of several processes that build one store this is, counted from 1."""

    number: int = 1
    num_parts: int = 1


WHOLE = BuildPart()  # a build that one process does alone


class KeptFiles:
    """The records of a source of many files; those of each file are kept in the cache."""

    def __init__(
        self, cache: Cache, rules: Rules, read: Recipe, prints: list[str], part: BuildPart
    ) -> None:
        """`prints` are the fingerprints of the files, `read` are the settings of `data.read`.

        Each process, by its `part`, begins with other files, so that they share the work.
        """
        self.kept = cache
        self.rules = rules
        self.read = read
        self.prints = prints
        self.part = part

    def look(
        self, table: ManyFiles, census: LabelCensus, findings: Findings, advance: Advance
    ) -> Iterator[Seen]:
        """Measure every row of several files, by the block; labels are numbered by `census`.

        First every file is measured that is not in the cache yet; then all are read from there.
        """
        keys = self._keys(table)
        files = table.tables
        begin = 0

        def store_of(number: int) -> Store:
            file = files[number]
            return self.kept.open_or_build_key(
                keys[number], file.name, partial(self._keep, file, advance)
            )

        def keep(number: int) -> None:
            store_of(number)  # is not returned: each store that is held is an open file

        self.kept.remove_unused(_DAYS_KEPT)
        if known := sum((self.kept.folder / key).is_dir() for key in keys):
            print(f"cache: {known} of {len(files)} files were looked at before", file=sys.stderr)
        first = len(files) * (self.part.number - 1) // self.part.num_parts
        order = [*range(first, len(files)), *range(first)]
        # the next file is read while one waits for the disk
        with ThreadPoolExecutor(_THREADS) as threads:
            deque(threads.map(keep, order), 0)
        for number, store in enumerate(map(store_of, range(len(files)))):
            table.begins(number, begin)
            facts = store.facts
            findings.take_in(facts["rows_read"], facts["found"], begin)
            yield from self._blocks(store, begin, census.take_in(facts["names"], facts["sets"]))
            begin += facts["rows_read"]

    def _keys(self, table: ManyFiles) -> list[str]:
        """The key of each file's records: the file's bytes, and all that decides how it is read."""
        same = {"made": _FORMAT, "rules": asdict(self.rules), "read": self.read}
        return [
            recipe_key(same | {"file": print_of_file, "how": [type(file).__name__, file.how()]})
            for file, print_of_file in zip(table.tables, self.prints, strict=True)
        ]

    def _keep(self, file: Table, advance: Advance, writer: StoreWriter) -> None:
        """Measure a file and write its records; `census` and `findings` are of this file alone."""
        census = LabelCensus(self.rules.problem)
        findings = Findings(file.name, locate=file.locate)
        split = writer.split("rows", {"bytes": Column("uint8", width=ROW.itemsize)})
        blocks = []
        for seen in self.rules.look(file, census, findings, advance):
            split.append(bytes=seen.rows.view(np.uint8).reshape(-1, ROW.itemsize))
            blocks.append((seen.num_rows, len(seen.rows), seen.has_words))
        if file.entries() is None:
            raise changed(file.name)
        names, sets = census.numbers()
        writer.facts |= {
            "names": names,
            "sets": sets,
            "blocks": blocks,
            "rows_read": findings.rows_read,
            "found": {
                key: (finding.count, finding.rows, finding.other)
                for key, finding in findings.by_kind.items()
            },
        }

    def _blocks(self, store: Store, begin: int, codes: NDArray[np.int32]) -> Iterator[Seen]:
        """The blocks of one file, with row numbers of the source and label numbers of its census.

        `begin` is the number of the file's first row, `codes` has the new number of each old one.
        """
        of_file = store.splits["rows"].fixed("bytes").reshape(-1).view(ROW)
        first = begin
        done = 0
        for num_rows, used, has_words in store.facts["blocks"]:
            rows = of_file[done : done + used].copy()
            done += used
            rows["row"] += first
            if self.rules.problem.has_classes:
                rows["code"] = codes[rows["code"]]
            yield Seen(begin, num_rows, rows, has_words)
            begin += num_rows


def ahead(items: Iterable[Given], work: Callable[[Given], Made]) -> Iterator[tuple[Given, Made]]:
    """Items in their order, each with the result of `work`.

    Threads work on the next items while the caller uses this one.
    """
    waiting: deque[tuple[Given, Future[Made]]] = deque()
    with ThreadPoolExecutor(_THREADS) as threads:
        for item in items:
            waiting.append((item, threads.submit(work, item)))
            if len(waiting) >= _MOST_WAITING:
                first, made = waiting.popleft()
                yield first, made.result()
        for first, made in waiting:
            yield first, made.result()
