"""Tables of any size, read in blocks and strictly as written.

A csv's values stay texts: `NA` is no missing value, `007` and `00101` keep their zeros, one missing label does not
turn the others into floats. JSON, parquet and Arrow keep their own types; a text that looks like a date stays a text.
What cannot be read is reported with file and row, never by a reader's own error. Memory is flat: a few blocks of some
megabytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from flatout.errors import UserError, did_you_mean

_COLUMNS_NAMED = 20


class Table(ABC):
    """Named columns of rows, read in blocks."""

    name: str
    columns: Sequence[str]

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes with the content and with nothing else."""

    @abstractmethod
    def blocks(self, columns: Sequence[str], rows_per_block: int = 65_536) -> Iterator[pa.RecordBatch]:
        """The rows of some columns, in order."""

    def how(self) -> str:
        """How it is written, in words; empty where there is nothing to say."""
        return ""

    def locate(self, row: int) -> str:
        """A row, counted from 1, in words."""
        return f"{row}"

    def lacking(self, column: str) -> str:
        """Who of several files has not got a column, in words."""
        return self.name


def require_unchanged(tables: Mapping[str, Table], fingerprints: Mapping[str, str]) -> None:
    """Tables that were read several times must have been the same each time."""
    for split, table in tables.items():
        if table.fingerprint() != fingerprints[split]:
            raise changed(table.name)


def changed(name: str) -> UserError:
    hint = "Wait until it is written, then run the same command again."
    return UserError("data", f"{name} changed while it was read", hint=hint)


def require_columns(table: Table, wanted: Mapping[str, str]) -> None:
    """Check that the columns named by some settings exist, once each; all that are missing in one message."""
    keys: dict[str, str] = {}
    for key, name in wanted.items():
        if list(table.columns).count(name) > 1:
            raise UserError(key, f"{table.name} has column {name} more than once", hint="Rename one of them.")
        if name in keys and name in table.columns:
            raise UserError(key, f"{name!r} is the column of {keys[name]} already", allowed=_listed(table.columns))
        keys[name] = key
    missing = {key: name for key, name in wanted.items() if name not in table.columns}
    if not missing:
        return
    names = ", ".join(f"{name!r}" for name in missing.values())
    hints = " ".join(filter(None, (did_you_mean(name, table.columns) for name in missing.values())))
    what = f"no column {names} in {table.lacking(next(iter(missing.values())))}"
    raise UserError(" and ".join(missing), what, allowed=_listed(table.columns), hint=hints)


def _listed(columns: Sequence[str]) -> str:
    more = ", …" if len(columns) > _COLUMNS_NAMED else ""
    return f"columns: {', '.join(columns[:_COLUMNS_NAMED])}{more}"
