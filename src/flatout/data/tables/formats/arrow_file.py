"""Arrow files, of either kind (.arrow and .feather; what `datasets` saves is one), read a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from flatout.data.tables.formats.file import CUT_SHORT, FileTable
from flatout.data.tables.formats.typed import first_line, named_classes, require_whole

_MAGIC = b"ARROW1"


class ArrowTable(FileTable):
    """An Arrow file; columns keep their types."""

    def _blocks(self, columns: list[str], rows_per_block: int) -> Iterator[pa.RecordBatch]:
        row = 0
        for batch in self._batches():
            block = named_classes(batch.select(columns), batch.schema)
            require_whole(block, row, self._fail)
            row += block.num_rows
            yield block

    def _read_columns(self) -> list[str]:
        names: list[str] = []
        for batch in self._batches():
            names = list(batch.schema.names)
            if batch.num_rows:
                return names
        raise self._fail("no rows")

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """Every batch of the file. Bytes are read, not mapped: a damaged file is then an error and no crash."""
        try:
            with self.whole.open("rb") as file:
                is_file = file.read(len(_MAGIC)) == _MAGIC
            with pa.OSFile(str(self.whole), "rb") as source:
                reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
                str(reader.schema.names)  # fails where a name is not UTF-8
                yield from map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise self._fail(f"not a whole Arrow file ({first_line(error)})", CUT_SHORT) from None
