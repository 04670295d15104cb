"""Several files as one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pyarrow as pa
import xxhash

from flatout.data.tables.table import Table


class ManyFiles(Table):
    """The rows of several files, one after the other; only the columns that all of them have."""

    def __init__(self, tables: Sequence[Table], name: str) -> None:
        self.tables, self.name = list(tables), name
        shared = set.intersection(*(set(table.columns) for table in tables))
        self.columns: Sequence[str] = [column for column in tables[0].columns if column in shared]
        self._starts = [0] * len(self.tables)
        """Rows before each file, as far as it has been read."""

    def how(self) -> str:
        counts = Counter(filter(None, (table.how() for table in self.tables)))
        more = "; ".join(f"{how} ({count})" if len(counts) > 1 else how for how, count in counts.items())
        return f"{len(self.tables)} files" + (f": {more}" if more else "")

    def fingerprint(self) -> str:
        return xxhash.xxh3_128_hexdigest("\n".join(table.fingerprint() for table in self.tables).encode())

    def locate(self, row: int) -> str:
        begun = [number for number, start in enumerate(self._starts) if number == 0 or 0 < start < row]
        table, start = self.tables[begun[-1]], self._starts[begun[-1]]
        return f"{table.name}:{table.locate(row - start)}"

    def lacking(self, column: str) -> str:
        others = [table.name for table in self.tables if column not in table.columns]
        has_some = len(others) < len(self.tables)
        return f"{', '.join(others[:3])}{', …' if len(others) > 3 else ''}" if has_some else self.name

    def blocks(self, columns: Sequence[str], rows_per_block: int = 65_536) -> Iterator[pa.RecordBatch]:
        read = 0
        for number, table in enumerate(self.tables):
            self._starts[number] = read
            for block in table.blocks(columns, rows_per_block):
                read += block.num_rows
                yield block
