"""All rows of a table that is read in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from flatout.data.tables.table import Table


def whole_table(
    table: Table, columns: Sequence[str] | None = None, rows_per_block: int = 65_536
) -> pa.Table:
    """The rows of a table in memory: of some columns, or of all."""
    names = table.columns if columns is None else columns
    return pa.Table.from_batches(table.blocks(list(names), rows_per_block))


def rows_of(table: Table, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The rows of a table, each by the names of its columns."""
    names = table.columns if columns is None else columns
    return [row for block in table.blocks(list(names)) for row in block.to_pylist()]
