"""Decisions about single rows: `data.exclude` leaves rows out, `data.relabel` gives new labels.

Both are csv files. They name a row by its number, from 1, and by its file where there are several.
If a line also quotes the text of its row, another text there ends the run. Open this file to change
what such a file may say.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from flatout.data.checks.cleaning import Escapes, read_texts
from flatout.data.checks.findings import Findings
from flatout.data.tables.roles import Roles
from flatout.data.tables.table import Table, as_texts, decoded
from flatout.data.tokens.subwords import PAIR
from flatout.errors import UserError, printable, require
from flatout.files import unguard_cell

Line = dict[str, str]  # the cells of a line of such a file, by column
_MOST_BYTES = 1 << 30
_MOST_DIGITS = 18  # of a row's number


class DecisionFile(NamedTuple):
    """A file of decisions and the setting that names it."""

    key: str
    path: str


class DecidedTable(Table):
    """A table some of whose rows are left out (by the survey, later) or have a new label."""

    def __init__(
        self, table: Table, roles: Roles, excluded: Sequence[int], labels: Mapping[int, str]
    ) -> None:
        self.inner: Table = table
        self.name = table.name
        self.columns = table.columns
        self._roles = roles
        self.excluded = np.array(sorted(excluded), np.int64)  # numbers of rows from 0
        self.labels = dict(labels)
        self.relabelled = np.array(sorted(labels), np.int64)

    def fingerprint(self) -> str:
        decided = (
            f"{self.inner.fingerprint()} {self.excluded.tolist()} {sorted(self.labels.items())}"
        )
        return xxhash.xxh3_128_hexdigest(decided.encode())

    def entries(self) -> None:
        """None: the fingerprint depends on decisions, too, so it cannot be noted for a file."""

    def blocks(
        self, columns: Sequence[str], rows_per_block: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        name = self._roles.label
        for rows, block in self.inner.numbered(columns, rows_per_block):
            relabelled = np.flatnonzero(np.isin(rows, self.relabelled)).tolist()
            if relabelled and name in block.schema.names:
                labels = as_texts(decoded(block.column(name))).to_pylist()
                for number in relabelled:
                    labels[number] = self.labels[int(rows[number])]
                column = block.schema.names.index(name)
                block = block.set_column(column, name, pa.array(labels, pa.large_string()))
            yield block


def given_labels(tables: Mapping[str, Table]) -> Counter[str]:
    """For each label that `data.relabel` gives, the number of rows that get it."""
    counts = Counter[str]()
    for table in tables.values():
        if isinstance(table, DecidedTable):
            counts.update(table.labels.values())
    return counts


def decide(
    tables: dict[str, Table], roles: Roles, files: Sequence[str | None], escapes: Escapes
) -> dict[str, Table]:
    """The tables of each split, with the decisions of two files about their rows.

    `files`: `data.exclude` and `data.relabel`, None where a setting names none.
    """
    decided = []
    for key, file in zip(("data.exclude", "data.relabel"), files, strict=True):
        labels_of_splits = {split: dict[int, str]() for split in tables}
        lines_of_splits = {} if file is None else _read_decisions(key, file, tables)
        for split, lines in lines_of_splits.items():
            _require_rows(DecisionFile(key, str(file)), tables[split], roles, lines, escapes)
            labels_of_splits[split] = {row: _label_of(line) for row, line in lines.items()}
        decided.append(labels_of_splits)
    excluded, labels = decided
    both = {row + 1 for split in tables for row in excluded[split].keys() & labels[split].keys()}
    require(
        not both,
        "data.relabel",
        f"row {min(both, default=0)} is in data.exclude, too",
        hint="Leave it in one of the two files.",
    )
    return {
        split: DecidedTable(table, roles, [*excluded[split]], labels[split])
        for split, table in tables.items()
    }


def _read_decisions(key: str, file: str, tables: Mapping[str, Table]) -> dict[str, dict[int, Line]]:
    """The lines of a file, by split and number of the row from 0."""
    lines = {split: dict[int, Line]() for split in tables}
    # The first line names the columns.
    for number, line in enumerate(_read_lines(key, file), 2):
        location = f"{file}:{number}"
        # Spreadsheets and pandas write 12.0 where a cell of the column is empty.
        row = (line.get("row") or "").strip().removesuffix(".0")
        require(
            row.isdecimal() and len(row) <= _MOST_DIGITS and int(row) > 0,
            key,
            f"{location} names row {row!r:.40}",
            allowed="a number",
            hint="Rows count from 1.",
        )
        require(
            key != "data.relabel" or bool(_label_of(line)),
            key,
            f"{location} has no label",
            hint="Fill in its label.",
        )
        lines_of_split = lines[_find_split(key, location, line, tables)]
        before = lines_of_split.get(int(row) - 1, line)
        require(
            key != "data.relabel" or _label_of(before) == _label_of(line),
            key,
            f"{location} gives row {row} another label than a line above",
            hint="Leave one of them.",
        )
        lines_of_split[int(row) - 1] = line
    return lines


def _label_of(line: Line) -> str:
    """The new label; `likely` is the column that an audit fills in."""
    return (line.get("label") or line.get("likely") or "").strip()


def _read_lines(key: str, file: str) -> list[Line]:
    path = Path(file)
    is_there = False
    with suppress(OSError, ValueError):  # no disk takes such a name
        is_there = path.is_file()
    require(is_there, key, f"no such file: {file:.200}", hint="Name a csv with the column row.")
    # a file of the kernel has no size, and its first line may have no end
    size = path.stat().st_size
    require(0 < size < _MOST_BYTES, key, f"{file} has {size:,} bytes", allowed="a csv of some rows")
    try:
        with path.open(encoding="utf-8-sig", newline="") as opened:
            head = opened.readline()
            opened.seek(0)
            reader = csv.DictReader(opened, delimiter=max(",;\t", key=head.count))
            reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
            names = set(reader.fieldnames)
            missing = "label" if key == "data.relabel" and not names & {"label", "likely"} else ""
            if "row" not in names:
                missing = "row"
            require(
                not missing,
                key,
                f"{file} has no column {missing}",
                hint="Write it as audit writes suspects.csv.",
            )
            lines = map(_remove_guards, reader)
            return [line for line in lines if any(map(str.strip, filter(None, line.values())))]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            key, f"{file} cannot be read: {error}", hint="Save it as csv in UTF-8."
        ) from None


def _remove_guards(line: Line) -> Line:
    """The cells without the mark by which `write_table` keeps spreadsheets from running them."""
    # Cells behind the end of a short line are None; those beyond the head have no name.
    named = {name: cell for name, cell in line.items() if name is not None}
    return {name: cell and unguard_cell(cell) for name, cell in named.items()}


def _find_split(key: str, location: str, line: Line, tables: Mapping[str, Table]) -> str:
    """The split whose table has the file that a line names; without a name there must be one."""
    file = line.get("file")
    names = {split: table.name for split, table in tables.items()}
    splits = [split for split, name in names.items() if not file or file == name]
    if not splits:
        # The data may lie in another folder than it did for the audit.
        same_name = Path(file or "").name
        splits = [split for split, name in names.items() if Path(name).name == same_name]
    what = f"{location} names the file {file!r}" if file else f"{location} names no file"
    require(len(splits) == 1, key, what, allowed=", ".join(names.values()))
    return splits[0]


def _require_rows(
    file: DecisionFile, table: Table, roles: Roles, lines: dict[int, Line], escapes: Escapes
) -> None:
    """Refuse lines whose row is not there, or has another text than the line quotes."""
    waiting = dict(lines)
    num_rows = 0
    for rows, block in table.numbered(roles.texts) if waiting else ():
        texts, _ = read_texts(block, roles, rows, Findings(table.name), escapes=escapes)
        num_rows += block.num_rows
        for row in [row for row in waiting if rows[0] <= row <= rows[-1]]:
            text = texts[row - int(rows[0])].as_py() or ""
            quoted = waiting.pop(row).get("text")
            is_same = quoted is None or printable(text.replace(PAIR, " | ")).startswith(quoted)
            require(
                is_same,
                file.key,
                f"row {row + 1} of {table.name} is not {quoted!r:.60}, as {file.path} has it",
                hint="Was the data changed, or sorted? Audit it again.",
            )
    few = ", ".join(str(row + 1) for row in list(waiting)[:5])
    require(
        not waiting,
        file.key,
        f"{file.path} names rows that are not there: {few} of {table.name}",
        allowed=f"1 to {num_rows:,}",
        hint="Was the data changed? Audit it again.",
    )
