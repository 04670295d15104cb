"""Parquet files, read a row group at a time; columns keep their types."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from flatout.data.tables.formats.file import CUT_SHORT, HEAD_BYTES, FileTable
from flatout.data.tables.formats.typed import first_line, named_classes, require_whole
from flatout.errors import UserError


class ParquetTable(FileTable):
    """A parquet file; columns keep their types."""

    def _blocks(self, columns: list[str], rows_per_block: int) -> Iterator[pa.RecordBatch]:
        row = 0
        try:
            with self._parquet() as file:
                schema, promised = file.schema_arrow, file.metadata.num_rows
                for batch in file.iter_batches(rows_per_block, columns=columns):
                    block = named_classes(batch.select(columns), schema)
                    require_whole(block, row, self._fail)
                    row += block.num_rows
                    yield block
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise self._damaged(error) from None
        if row != promised:
            raise self._fail(f"holds {row:,} rows where its end promises {promised:,}", CUT_SHORT)

    def _read_columns(self) -> list[str]:
        try:
            with self._parquet() as file:
                num_rows, names = file.metadata.num_rows, list(file.schema_arrow.names)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise self._damaged(error) from None
        if num_rows == 0:
            raise self._fail("no rows")
        return names

    def _parquet(self) -> pq.ParquetFile:
        return pq.ParquetFile(self.whole, buffer_size=HEAD_BYTES, pre_buffer=False)

    def _damaged(self, error: Exception) -> UserError:
        return self._fail(f"not a whole parquet file ({first_line(error)})", CUT_SHORT)
