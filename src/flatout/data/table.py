"""Tables of any size, read in blocks and strictly as written.

A csv's values stay texts: `NA` is no missing value, `007` and `00101` keep their zeros, one missing label does not
turn the others into floats. JSON and parquet keep their own types; a text that looks like a date stays a text. What
cannot be read is told with file and row, never by a reader's own error. Memory is flat: a few blocks of some megabytes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import xxhash

from flatout.data.formats.array_file import Hdf5Table, NpyTable
from flatout.data.formats.csv_file import CsvTable
from flatout.data.formats.file import ONE_WAY, FileTable, require_file
from flatout.data.formats.json_file import JsonTable
from flatout.data.formats.parquet_file import ParquetTable
from flatout.errors import UserError, did_you_mean

_COLUMNS_NAMED = 20
DELIMITERS = {".csv": ",", ".tsv": "\t"}
TEXT_FORMATS = (".csv", ".tsv", ".json", ".jsonl")
WHOLE_FILES: dict[str, type[FileTable]] = {
    ".parquet": ParquetTable,
    ".npy": NpyTable,
    ".h5": Hdf5Table,
    ".hdf5": Hdf5Table,
}
"""Formats that must be whole to be read, and have a compression of their own."""


class Table(Protocol):
    """Named columns of rows, read in blocks."""

    name: str
    columns: Sequence[str]

    def fingerprint(self) -> str:
        """Changes with the content and with nothing else."""
        ...

    def blocks(self, columns: Sequence[str], rows_per_block: int = 65_536) -> Iterator[pa.RecordBatch]:
        """The rows of some columns, in order."""
        ...


def open_table(path: str | Path, *, where: str) -> Table:
    """The table in a file; `where` is the setting that named it."""
    file = Path(path).expanduser()
    require_file(file, where)
    suffixes = [suffix.lower() for suffix in file.suffixes]
    is_gzipped = bool(suffixes) and suffixes[-1] == ".gz"
    kind = suffixes[-2 if is_gzipped and len(suffixes) > 1 else -1] if suffixes else ""
    if kind in DELIMITERS:
        return CsvTable(file, where, DELIMITERS[kind])
    if kind in (".json", ".jsonl"):
        return JsonTable(file, where)
    if kind in WHOLE_FILES and not is_gzipped:
        return WHOLE_FILES[kind](file, where)
    allowed = f"{', '.join(TEXT_FORMATS)}, these also as .gz, and {', '.join(WHOLE_FILES)}"
    raise UserError(where, f"{file} is no format we read", allowed=allowed)


def table_of(rows: Any, *, where: str = "data.train") -> Table:
    """A table that is in memory already: a mapping of columns, or a pandas, pyarrow or datasets table."""
    try:
        found = _arrow_table(rows)
        if found is not None:
            found.validate(full=True)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:  # lone surrogates are a ValueError
        reason = str(error).splitlines()[0]
        raise UserError(where, f"cannot make a table of these columns: {reason}", mend=ONE_WAY) from None
    if found is None:
        allowed = "a path, a mapping of columns, a pandas, pyarrow or datasets table"
        raise UserError(where, f"cannot read rows from a {type(rows).__name__}", allowed=allowed)
    if found.num_rows == 0:
        raise UserError(where, "the table in memory has no rows")
    return MemoryTable(found)


def _arrow_table(rows: Any) -> pa.Table | None:
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, Mapping):
        return pa.table({name: pa.array(list(values)) for name, values in rows.items()})
    if hasattr(rows, "with_format") and hasattr(rows, "data"):  # datasets
        return rows.with_format("arrow")[:]
    if hasattr(rows, "iloc") and hasattr(rows, "columns"):  # pandas
        return pa.Table.from_pandas(rows, preserve_index=False)
    if hasattr(rows, "__arrow_c_stream__"):  # polars and others
        return pa.table(rows)
    return None


def require_columns(table: Table, wanted: Mapping[str, str]) -> None:
    """Check that the columns named by some settings exist, once each; all that are missing in one message."""
    keys: dict[str, str] = {}
    for key, name in wanted.items():
        if list(table.columns).count(name) > 1:
            raise UserError(key, f"{table.name} has column {name} more than once", mend="Rename one of them.")
        if name in keys and name in table.columns:
            raise UserError(key, f"{name!r} is the column of {keys[name]} already", allowed=_listed(table.columns))
        keys[name] = key
    missing = {key: name for key, name in wanted.items() if name not in table.columns}
    if not missing:
        return
    names = ", ".join(f"{name!r}" for name in missing.values())
    mends = " ".join(filter(None, (did_you_mean(name, table.columns) for name in missing.values())))
    what = f"no column {names} in {table.name}"
    raise UserError(" and ".join(missing), what, allowed=_listed(table.columns), mend=mends)


def _listed(columns: Sequence[str]) -> str:
    more = ", …" if len(columns) > _COLUMNS_NAMED else ""
    return f"columns: {', '.join(columns[:_COLUMNS_NAMED])}{more}"


class MemoryTable:
    """A table in memory."""

    def __init__(self, rows: pa.Table) -> None:
        self.rows = rows.replace_schema_metadata(None)
        self.name = "table in memory"
        self.columns: Sequence[str] = list(rows.column_names)

    def fingerprint(self) -> str:
        """Of the Arrow stream in blocks of one size, so that it does not matter how the table is chunked."""
        digest = xxhash.xxh3_128()
        with pa.ipc.new_stream(_Digesting(digest), self.rows.schema) as stream:
            for block in blocks_of(self.rows, 65_536):
                stream.write_batch(block)
        return digest.hexdigest()

    def blocks(self, columns: Sequence[str], rows_per_block: int = 65_536) -> Iterator[pa.RecordBatch]:
        return blocks_of(self.rows.select(list(columns)), rows_per_block)


def blocks_of(rows: pa.Table, rows_per_block: int) -> Iterator[pa.RecordBatch]:
    """Copies a block at a time, never the table."""
    for start in range(0, rows.num_rows, rows_per_block):
        yield from rows.slice(start, rows_per_block).combine_chunks().to_batches()


class _Digesting(io.RawIOBase):
    """A file that keeps nothing but a checksum of what is written."""

    def __init__(self, digest: Any) -> None:
        self._digest = digest

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._digest.update(data)
        return len(memoryview(data))
