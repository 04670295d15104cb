"""Tagged words as a table of texts: the words joined, and their tags joined as the label.

So the checks of texts hold for sentences too: repeats, leaks, and equal sentences with other tags. Words and tags that
do not fit together are reported with their row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.checks.findings import Findings
from flatout.data.checks.tags import Scheme, TagBlock, TagCensus, misplaced
from flatout.data.tables.roles import Roles
from flatout.data.tables.table import Table
from flatout.data.tables.values import decoded, is_list, is_text
from flatout.errors import UserError

COLUMNS = ("text", "label")
LISTS = ("tokens", "tags")
"""The same as lists, for a later pass."""


class TaggedTable(Table):
    """Sentences of another table; what is found in their tags goes to a census that all splits share."""

    columns: Sequence[str] = COLUMNS

    def __init__(self, table: Table, roles: Roles, split: str, census: TagCensus) -> None:
        self.table, self.roles, self.split, self.census = table, roles, split, census
        self.name = table.name
        self._misplaced: dict[Scheme, list[NDArray[np.int64]]] = {scheme: [] for scheme in Scheme}
        self._blank: list[NDArray[np.int64]] = []

    def how(self) -> str:
        return self.table.how()

    def locate(self, row: int) -> str:
        return self.table.locate(row)

    def fingerprint(self) -> str:
        return self.table.fingerprint()

    def blocks(self, columns: Sequence[str], rows_per_block: int = 65_536) -> Iterator[pa.RecordBatch]:
        first_row = 0
        for block in self.table.blocks(self.roles.columns, rows_per_block):
            rows = np.arange(first_row, first_row + block.num_rows)
            first_row += block.num_rows
            words, marks = self.roles.texts[0], self.roles.label
            tokens = word_lists(block.column(words), name=words, table=self.name, key="data.text")
            tags = word_lists(block.column(marks), name=marks, table=self.name, key="data.label")
            self._require_pairs(tokens, tags, rows)
            held = {"tokens": tokens, "tags": tags}
            if "label" in columns:  # the first pass; what it counts is counted once
                self._note(self.census.read(tags, rows), tokens, rows)
                held |= {"text": pc.binary_join(tokens, _blank()), "label": pc.binary_join(tags, _blank())}
            yield pa.RecordBatch.from_arrays([held[name] for name in columns], names=list(columns))

    def tell(self, findings: Findings, scheme: Scheme) -> None:
        """What was found in the tags, now that their scheme is known."""
        for name, found in (("repaired_tag", self._misplaced[scheme]), ("blank_token", self._blank)):
            findings.add(name, np.concatenate(found) if found else np.empty(0, np.int64))

    def _note(self, tags: TagBlock, tokens: pa.Array, rows: NDArray[np.int64]) -> None:
        self.census.count_entities(self.split, tags)
        row_of = tags.row_of()
        for scheme, found in self._misplaced.items():
            found.append(rows[np.unique(row_of[misplaced(tags, scheme)])])
        is_blank = pc.equal(pc.binary_length(pc.utf8_trim_whitespace(pc.list_flatten(tokens))), 0)
        self._blank.append(rows[np.unique(row_of[is_blank.to_numpy(zero_copy_only=False)])])

    def _require_pairs(self, tokens: pa.Array, tags: pa.Array, rows: NDArray[np.int64]) -> None:
        words, marks = (pc.list_value_length(each).to_numpy() for each in (tokens, tags))
        if (wrong := np.flatnonzero(words != marks)).size:
            row = int(wrong[0])
            what = f"{self.name} row {self.locate(int(rows[row]) + 1)}: {words[row]} words and {marks[row]} tags"
            raise UserError("data.label", what, hint="Give every word one tag.")


def word_lists(column: pa.Array, *, name: str, table: str, key: str) -> pa.Array:
    """Words or tags of each row of the column `name`; one text a row is parted at its blanks."""
    column = decoded(column)
    if is_text(column.type):
        column = pc.ascii_split_whitespace(pc.utf8_trim_whitespace(column))
    kind = column.type.value_type if is_list(column.type) else column.type
    if pa.types.is_null(kind):
        column = column.cast(pa.list_(pa.large_string()))
        kind = column.type.value_type
    if not is_list(column.type) or not is_text(kind):
        hint = "Write tags by their names, not by numbers." if pa.types.is_integer(kind) else ""
        what = f"column {name!r} of {table} holds {column.type}"
        raise UserError(key, what, allowed="a list of texts in each row", hint=hint)
    return pc.fill_null(column.cast(pa.list_(pa.large_string())), pa.scalar([], pa.list_(pa.large_string())))


def _blank() -> pa.Scalar:
    return pa.scalar(" ", pa.large_string())
