"""Columns of a table as numbers, seconds and group names; a value that does not fit is named by file, row and text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.tables.table import Table
from flatout.data.tables.values import decoded, is_text, written
from flatout.errors import UserError

Floats = NDArray[np.float64]
_ROWS_NAMED = 5
_MICROSECONDS = 1e6


def read_numbers(column: pa.Array, name: str, table: Table, first: int = 0) -> Floats:
    """A column of a block as float64; a missing value is NaN, infinity and texts are refused.

    `first` is the number of the block's first row in its table, from 0.
    """
    column = decoded(column)
    if is_text(column.type):
        column = _parse_texts(column, name, table, first)
    elif not (pa.types.is_primitive(column.type) or pa.types.is_decimal(column.type)):
        raise UserError(f"{table.name}: {name}", f"holds {column.type}", allowed="numbers")
    numbers: Floats = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    if (places := np.flatnonzero(np.isinf(numbers))).size:
        what = f"{name} is infinite in row {name_rows(places + first, table)}"
        raise UserError(table.name, what, hint="Write a number, or leave the value empty.")
    return numbers


def read_seconds(column: pa.Array, name: str, table: Table, first: int = 0) -> Floats:
    """A column of times as seconds: numbers as they are written, dates since 1970."""
    column = _with_dates(decoded(column))
    if _is_date(column.type):
        column = pc.divide(column.cast(pa.timestamp("us")).cast(pa.int64()).cast(pa.float64()), _MICROSECONDS)
    seconds = read_numbers(column, name, table, first)
    if (places := np.flatnonzero(np.isnan(seconds))).size:
        what = f"{name} is missing in row {name_rows(places + first, table)}"
        raise UserError("data.time", f"{table.name}: {what}", hint="Write a time in each row.")
    return seconds


def are_dates(column: pa.Array) -> bool:
    """Whether a column of times holds dates, which `read_seconds` counts from 1970."""
    return _is_date(_with_dates(decoded(column)).type)


def dates_of(seconds: Floats) -> pa.Array:
    """Seconds since 1970 as dates, in UTC where dates were read with a zone."""
    return pa.array(np.rint(seconds * _MICROSECONDS).astype(np.int64)).cast(pa.timestamp("us"))


def _is_date(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) or pa.types.is_date(kind)


def _with_dates(column: pa.Array) -> pa.Array:
    """Texts that are dates as dates, with or without a zone; other columns as they stand."""
    if not is_text(column.type) or _are_numbers(column):
        return column
    for zone in (None, "UTC"):
        try:
            return column.cast(pa.timestamp("us", zone))
        except pa.ArrowException:
            continue
    return column


class GroupNumbers:
    """Numbers the groups of a table's rows, block after block, in the order in which they appear."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        """Columns whose values make a group; the first one is its part."""
        self.part_of: dict[str, str] = {}
        """The part of each group so far."""
        self._number: dict[str, int] = {}

    def number(self, columns: Sequence[pa.Array]) -> NDArray[np.int64]:
        """The group of each row of a block."""
        codes, found = _join(columns, self.names)
        parts = _join(columns[:1], self.names[:1])
        for name, row in zip(found, _first_rows(codes, len(found)).tolist(), strict=True):
            self.part_of.setdefault(name, parts[1][parts[0][row]])
        numbers = [self._number.setdefault(name, len(self._number)) for name in found]
        return np.array(numbers, np.int64)[codes]


def _join(columns: Sequence[pa.Array], names: Sequence[str]) -> tuple[NDArray[np.int64], list[str]]:
    """The group of each row as a number, and the groups' names."""
    kind = pa.large_string()
    texts = [pc.fill_null(written(decoded(column)).cast(kind), "") for column in columns]
    named = zip(names, texts, strict=True)
    parts = [pc.binary_join_element_wise(pa.scalar(name, kind), text, pa.scalar("=", kind)) for name, text in named]
    joined = pc.binary_join_element_wise(*parts, pa.scalar(" ", kind)).dictionary_encode()
    return joined.indices.to_numpy(zero_copy_only=False).astype(np.int64), joined.dictionary.to_pylist()


def _first_rows(codes: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The first row of each code."""
    rows = np.empty(count, np.int64)
    rows[codes[::-1]] = np.arange(len(codes))[::-1]
    return rows


def name_rows(places: NDArray[np.integer], table: Table) -> str:
    """The first of some rows, counted from 1, in words."""
    shown = ", ".join(table.locate(int(place) + 1) for place in places[:_ROWS_NAMED])
    return f"{shown}{', …' if len(places) > _ROWS_NAMED else ''}"


def _parse_texts(column: pa.Array, name: str, table: Table, first: int) -> pa.Array:
    """Texts of a csv as numbers; an empty one is a missing value."""
    trimmed = pc.utf8_trim_whitespace(column)
    kept = pc.if_else(pc.equal(pc.binary_length(trimmed), 0), pa.scalar(None, trimmed.type), trimmed)
    try:
        return kept.cast(pa.float64())
    except pa.ArrowException:
        row = next(row for row, text in enumerate(kept.to_pylist()) if text is not None and not _is_number(text))
    hint = "Write numbers with a point, leave a missing value empty, or leave out the column."
    what = f"{name} is {kept[row].as_py()!r} in row {table.locate(first + row + 1)}"
    raise UserError(table.name, what, allowed="numbers", hint=hint)


def _are_numbers(column: pa.Array) -> bool:
    """Whether a column of texts starts with a number."""
    head = next((text for text in column.slice(0, 100).to_pylist() if text), "")
    return _is_number(head)


def _is_number(text: str) -> bool:
    try:
        return pa.array([text]).cast(pa.float64())[0].is_valid
    except pa.ArrowException:
        return False
