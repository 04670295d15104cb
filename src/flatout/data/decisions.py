"""Decisions about single rows: which are left out (`data.exclude`), which get another label
(`data.relabel`).

Both files name rows by number, from 1, and by file where there are several. A row that is another
ends the run.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

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

Line = dict[str, str]  # a line of a file, by its columns


class DecidedTable(Table):
    """A table with some of its rows to be left out, and others with a new label."""

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
        """None: its fingerprint is of the decisions too, and no file's note."""

    def blocks(
        self, columns: Sequence[str], rows_per_block: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        name = self._roles.label
        for rows, block in self.inner.numbered(columns, rows_per_block):
            places = np.flatnonzero(np.isin(rows, self.relabelled)).tolist()
            if places and name in block.schema.names:
                values = as_texts(decoded(block.column(name))).to_pylist()
                for place in places:
                    values[place] = self.labels[int(rows[place])]
                block = block.set_column(
                    block.schema.names.index(name), name, pa.array(values, pa.large_string())
                )
            yield block


def given_labels(tables: Mapping[str, Table]) -> Counter[str]:
    """The labels that `data.relabel` gives, and to how many rows."""
    decided = (table.labels for table in tables.values() if isinstance(table, DecidedTable))
    return Counter(label for labels in decided for label in labels.values())


def decide(
    tables: dict[str, Table], roles: Roles, files: Sequence[str | None], escapes: Escapes
) -> dict[str, Table]:
    """The tables of each split with what two files, `data.exclude` and `data.relabel`, decide of
    their rows.
    """
    decided: list[dict[str, dict[int, str]]] = [{split: {} for split in tables} for _ in files]
    for key, file, into in zip(("data.exclude", "data.relabel"), files, decided, strict=True):
        for split, lines in _read(key, file, tables).items() if file is not None else ():
            _require_rows(key, str(file), tables[split], roles, lines, escapes)
            into[split] = {row: _label(line) for row, line in lines.items()}
    excluded, labels = decided
    both = {row + 1 for split in tables for row in excluded[split].keys() & labels[split].keys()}
    require(
        not both,
        "data.relabel",
        f"row {min(both, default=0)} is in data.exclude, too",
        hint="Leave it in one of them.",
    )
    return {
        split: DecidedTable(table, roles, [*excluded[split]], labels[split])
        for split, table in tables.items()
    }


def _read(key: str, file: str, tables: Mapping[str, Table]) -> dict[str, dict[int, Line]]:
    """The lines of a file, by split and number of the row from 0."""
    found: dict[str, dict[int, Line]] = {split: {} for split in tables}
    for number, line in enumerate(_lines(key, file), 2):
        place = f"{file}:{number}"
        row = (line.get("row") or "").strip().removesuffix(".0")
        require(
            row.isdecimal() and int(row) > 0,
            key,
            f"{place} names row {row!r}",
            allowed="a number",
            hint="Rows count from 1.",
        )
        require(
            key != "data.relabel" or bool(_label(line)),
            key,
            f"{place} has no label",
            hint="Fill in its label.",
        )
        of_split = found[_split_of(key, place, line, tables)]
        is_same = _label(of_split.get(int(row) - 1, line)) == _label(line) or key != "data.relabel"
        require(
            is_same,
            key,
            f"{place} gives row {row} another label than a line above",
            hint="Leave one of them.",
        )
        of_split[int(row) - 1] = line
    return found


def _label(line: Line) -> str:
    return (line.get("label") or line.get("likely") or "").strip()


def _lines(key: str, file: str) -> list[Line]:
    path = Path(file)
    require(path.is_file(), key, f"no such file: {file}", hint="Name a csv with the column row.")
    try:
        with path.open(encoding="utf-8-sig", newline="") as opened:
            head = opened.readline()
            opened.seek(0)
            reader = csv.DictReader(opened, delimiter=max(",;\t", key=head.count))
            reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
            names = set(reader.fieldnames)
            has_label = key != "data.relabel" or bool(names & {"label", "likely"})
            missing = "row" if "row" not in names else "" if has_label else "label"
            require(
                not missing,
                key,
                f"{file} has no column {missing}",
                hint="Write it as audit writes suspects.csv.",
            )
            lines = [_without_guards(line) for line in reader]
            return [line for line in lines if any(map(str.strip, filter(None, line.values())))]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            key, f"{file} cannot be read: {error}", hint="Save it as csv in UTF-8."
        ) from None


def _without_guards(line: Line) -> Line:
    """The cells as they were before `write_table` kept a spreadsheet from running them."""
    return {name: cell if cell is None else unguard_cell(cell) for name, cell in line.items()}


def _split_of(key: str, place: str, line: Line, tables: Mapping[str, Table]) -> str:
    given = line.get("file")
    names = {split: table.name for split, table in tables.items()}
    found = [split for split, name in names.items() if not given or given == name]
    found = found or [
        split for split, name in names.items() if Path(name).name == Path(given or "").name
    ]
    what = f"{place} names the file {given!r}" if given else f"{place} names no file"
    require(len(found) == 1, key, what, allowed=", ".join(names.values()))
    return found[0]


def _require_rows(
    key: str, file: str, table: Table, roles: Roles, lines: dict[int, Line], escapes: Escapes
) -> None:
    waiting = dict(lines)
    num_rows = 0
    for rows, block in table.numbered(roles.texts) if waiting else ():
        found, _ = read_texts(block, roles, rows, Findings(table.name), escapes=escapes)
        num_rows += block.num_rows
        for row in [row for row in waiting if rows[0] <= row <= rows[-1]]:
            text = found[row - int(rows[0])].as_py() or ""
            begins = waiting.pop(row).get("text")
            is_same = begins is None or printable(text.replace(PAIR, " | ")).startswith(begins)
            require(
                is_same,
                key,
                f"row {row + 1} of {table.name} is not {begins!r:.60}, as {file} has it",
                hint="Was the data changed, or sorted? Audit it again.",
            )
    few = ", ".join(str(row + 1) for row in list(waiting)[:5])
    require(
        not waiting,
        key,
        f"{file} names rows that are not there: {few} of {table.name}",
        allowed=f"1 to {num_rows:,}",
        hint="Was the data changed? Audit it again.",
    )
