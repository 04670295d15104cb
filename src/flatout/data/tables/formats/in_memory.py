"""Tables in memory: a mapping of columns, pandas, pyarrow and others, and data sets of `datasets`.

Each becomes blocks of Arrow. A fingerprint is of the content alone, however the table is chunked.
Open this file to accept another kind of table from Python.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard

import pyarrow as pa
import xxhash

from flatout.data.tables.formats.file import ONE_WAY
from flatout.data.tables.table import Table, named_classes
from flatout.errors import UserError, first_line, require

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from datasets import Dataset

_ROWS_PER_BLOCK = 65_536


def table_of(rows: object, *, where: str = "data.train") -> MemoryTable | DatasetTable:
    """A mapping of columns, or a pandas, pyarrow or datasets table, as a table of ours."""
    table = DatasetTable(rows) if is_dataset(rows) else MemoryTable(_arrow_table(rows, where))
    require(
        table.num_rows > 0, where, "the table in memory has no rows", hint="Pass a table with rows."
    )
    return table


def is_dataset(rows: object) -> TypeGuard[Dataset]:
    """Whether this is a table of the `datasets` library."""
    return hasattr(rows, "with_format") and hasattr(rows, "features") and hasattr(rows, "num_rows")


def _arrow_table(rows: object, where: str) -> pa.Table:
    is_pandas = hasattr(rows, "iloc") and hasattr(rows, "columns")
    # pyarrow, polars, others
    is_table = is_pandas or isinstance(rows, Mapping) or hasattr(rows, "__arrow_c_stream__")
    allowed = "a mapping of columns, a pandas, polars, pyarrow or datasets table"
    if where.startswith("data."):
        allowed = f"a path, {allowed}"
    require(is_table, where, f"cannot read rows from a {type(rows).__name__}", allowed=allowed)
    try:
        if is_pandas:
            table = pa.Table.from_pandas(rows, preserve_index=False)
        elif isinstance(rows, Mapping):
            table = pa.table({name: pa.array(list(values)) for name, values in rows.items()})
        else:
            table = rows if isinstance(rows, pa.Table) else pa.table(rows)
        table.validate(full=True)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        # Half characters, which have no UTF-8, are a ValueError.
        raise UserError(
            where, f"cannot make a table of these columns: {first_line(error)}", hint=ONE_WAY
        ) from None
    return table


class MemoryTable(Table):
    def __init__(self, rows: pa.Table) -> None:
        self.name = "table in memory"
        self._schema = rows.schema
        self.num_rows = rows.num_rows
        self.rows = rows.replace_schema_metadata(None)
        self.columns: Sequence[str] = list(rows.column_names)

    def fingerprint(self) -> str:
        return _fingerprint(blocks_of(self.rows, _ROWS_PER_BLOCK), self.rows.schema)

    def blocks(
        self, columns: Sequence[str], rows_per_block: int = _ROWS_PER_BLOCK
    ) -> Iterator[pa.RecordBatch]:
        for block in blocks_of(self.rows.select(list(columns)), rows_per_block):
            yield named_classes(block, self._schema)


class DatasetTable(Table):
    """A table that `datasets` has opened, read a block at a time; class numbers become the names it
    lists.
    """

    def __init__(self, rows: Dataset) -> None:
        self.name = rows.info.dataset_name or "datasets table"
        self.num_rows = rows.num_rows
        self._rows = rows.with_format("arrow")
        self._schema = rows.features.arrow_schema
        self.columns: Sequence[str] = list(rows.column_names)

    def how(self) -> str:
        return "opened by datasets"

    def fingerprint(self) -> str:
        """Of the content: the fingerprint that `datasets` keeps does not know everything."""
        return _fingerprint(self.blocks(self.columns), self._schema.remove_metadata())

    def blocks(
        self, columns: Sequence[str], rows_per_block: int = _ROWS_PER_BLOCK
    ) -> Iterator[pa.RecordBatch]:
        for part in self._rows.select_columns(list(columns)).iter(rows_per_block):
            for block in part.combine_chunks().to_batches():
                yield named_classes(block, self._schema)


def blocks_of(rows: pa.Table, rows_per_block: int) -> Iterator[pa.RecordBatch]:
    """Copies a block at a time, never the table."""
    for start in range(0, rows.num_rows, rows_per_block):
        yield from rows.slice(start, rows_per_block).combine_chunks().to_batches()


def _fingerprint(blocks: Iterator[pa.RecordBatch], schema: pa.Schema) -> str:
    """Of the Arrow stream in blocks of one size, so that it does not matter how the table is
    chunked.
    """
    digest = xxhash.xxh3_128()
    digest.update(str(schema).encode("utf-8", "surrogatepass"))
    for block in blocks:
        with pa.ipc.new_stream(_Digesting(digest), block.schema) as stream:
            stream.write_batch(block)
    return digest.hexdigest()


class _Digesting(io.RawIOBase):
    """A file that keeps nothing but a checksum of what is written: blocks of long texts
    are large.
    """

    def __init__(self, digest: xxhash.xxh3_128) -> None:
        self._digest = digest

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        self._digest.update(data)
        return len(memoryview(data))
