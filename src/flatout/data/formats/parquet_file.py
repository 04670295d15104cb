"""Parquet files, read a row group at a time; columns keep their types."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from flatout.data.formats.file import HEAD_BYTES, FileTable
from flatout.errors import UserError


class ParquetTable(FileTable):
    """A parquet file; columns keep their types."""

    def _blocks(self, columns: list[str], rows_per_block: int) -> Iterator[pa.RecordBatch]:
        row = 0
        try:
            with self._parquet() as file:
                for block in file.iter_batches(rows_per_block, columns=columns):
                    self._require_whole(block, row)
                    row += block.num_rows
                    yield block.select(columns)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from None

    def _require_whole(self, block: pa.RecordBatch, first_row: int) -> None:
        """Texts in a parquet file may be anything; what is not UTF-8 would stop a later step."""
        for name, column in zip(block.schema.names, block.columns, strict=True):
            try:
                column.validate(full=True)
            except pa.ArrowInvalid as error:
                rows = f"rows {first_row + 1:,} to {first_row + block.num_rows:,}"
                raise self._fail(f"{rows}: column {name!r} is damaged or not UTF-8 ({_first_line(error)})") from None

    def _read_columns(self) -> list[str]:
        try:
            with self._parquet() as file:
                num_rows, names = file.metadata.num_rows, list(file.schema_arrow.names)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from None
        if num_rows == 0:
            raise self._fail("no rows")
        return names

    def _parquet(self) -> pq.ParquetFile:
        return pq.ParquetFile(self.path, buffer_size=HEAD_BYTES, pre_buffer=False)

    def _damaged(self, error: Exception) -> UserError:
        return self._fail(f"not a whole parquet file ({_first_line(error)})", "Was it cut short?")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
