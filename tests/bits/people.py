"""Built-in people, as a table in memory."""

from __future__ import annotations

import pyarrow as pa
from tests.data.whole_tables import whole_table

from flatout.bits.people import PeopleConfig, PeopleTable


def people(rows: int = 60) -> pa.Table:
    """So many people, with all that is known of them."""
    return whole_table(PeopleTable(PeopleConfig(rows=rows))).combine_chunks()
