"""Read the columns of a table that make a recording: numbers, seconds, and names of groups.

`RecordingRules` say which columns, and how they become recordings. `read_blocks` reads them block
by block; an error about a value names its file, row and text. Open this file to read another way of
writing numbers or times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.checks.findings import name_few
from flatout.data.sequences.missing import Missing
from flatout.data.tables.table import (
    Table,
    as_texts,
    decoded,
    is_plain,
    is_text,
    mask_of,
    require_columns,
)
from flatout.errors import UserError

if TYPE_CHECKING:
    from flatout.data.sequences.settings import SequenceDataConfig

Floats = NDArray[np.float64]
_ROWS_NAMED = 5  # rows that an error names
_MICROSECONDS = 1e6  # of a second


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRules:
    """How tables become recordings: the same for training and for new files."""

    columns: list[str]
    time: str | None
    group: list[str]
    label: str | None = None
    step: float | None = None
    max_gap: float | None
    missing: Missing
    # columns whose integral is put before all others
    cumulate: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)  # columns that are answered, for messages
    # Whether filled and resampled values are the last ones before, as a device has them that
    # answers live; False: linear between the values before and after.
    past_only: bool = False

    @classmethod
    def of(cls, config: SequenceDataConfig) -> RecordingRules:
        """Features are read, then targets; labels are no column of a recording."""
        targets = config.targets
        columns = [name for name in config.features or [] if name not in targets]
        return cls(
            columns=columns if config.label else [*columns, *targets],
            time=config.time,
            group=list(config.group or []),
            label=config.label,
            step=config.step,
            max_gap=config.max_gap,
            missing=config.missing,
            cumulate=list(config.cumulate),
            targets=targets,
            past_only=config.label is None,  # a label is answered after the whole recording
        )

    @property
    def carries_forward(self) -> bool:
        """Whether a sample may repeat a value that was measured before it."""
        is_changed = self.step is not None or self.missing == "fill"
        return self.past_only and is_changed

    @property
    def names(self) -> list[str]:
        """Columns of a recording's values: integrals, then those of the tables."""
        return [*(f"{name} cumulated" for name in self.cumulate), *self.columns]


def read_blocks(
    table: Table, rules: RecordingRules
) -> Iterator[tuple[pa.RecordBatch, Floats, Floats, pa.DataType | None]]:
    """Each block, its values, its times, and the type of these if they are dates.

    Rows are counted where there is no column of times.
    """
    _require_columns(table, rules)
    names = dict.fromkeys([*rules.columns, *rules.group, *filter(None, (rules.time, rules.label))])
    for rows, block in table.numbered(list(names)):
        first = int(rows[0]) if len(rows) else 0
        values = np.stack(
            [_read_numbers(block.column(name), name, table, first) for name in rules.columns],
            axis=1,
        )
        if rules.time is None:
            yield block, values, rows.astype(np.float64), None
        else:
            yield block, values, *_read_seconds(block.column(rules.time), rules.time, table, first)


def _require_columns(table: Table, rules: RecordingRules) -> None:
    """Refuse a table that lacks a column; the error names the setting, such as data.features[2]."""
    wanted: dict[str, str] = {}
    for key, is_target in (("data.features", False), ("data.target", True)):
        names = [name for name in rules.columns if (name in rules.targets) is is_target]
        for number, name in enumerate(names):
            wanted[f"{key}[{number}]" if len(names) > 1 else key] = name
    if rules.time is not None:
        wanted["data.time"] = rules.time
    if rules.label is not None:
        wanted["data.target"] = rules.label
    require_columns(table, wanted)
    for name in rules.group:  # a group may be a feature too
        require_columns(table, {"data.group": name})


def _read_numbers(column: pa.Array, name: str, table: Table, first: int) -> Floats:
    """A column of a block as float64, NaN where a value is missing.

    `first` is the number of the block's first row in its table.
    """
    column = decoded(column)
    if is_text(column.type):
        column = _parse_texts(column, name, table, first)
    elif not is_plain(column.type) or pa.types.is_temporal(column.type):
        raise UserError(f"{table.name}: {name}", f"holds {column.type}", allowed="numbers")
    numbers = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    if (places := np.flatnonzero(np.isinf(numbers))).size:
        raise UserError(
            table.name,
            f"{name} is infinite in row {name_rows(places + first, table)}",
            hint="Write a number, or leave the value empty.",
        )
    return numbers


def _read_seconds(
    column: pa.Array, name: str, table: Table, first: int
) -> tuple[Floats, pa.DataType | None]:
    """A column of times as seconds, and the type that dates are written in: UTC if they have a
    zone. Their seconds count from 1970.
    """
    column = decoded(column)
    if is_text(column.type):
        column = _parse_dates(column, name, table, first)
    dates = None
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        has_zone = pa.types.is_timestamp(column.type) and column.type.tz is not None
        dates = pa.timestamp("us", "UTC" if has_zone else None)
        microseconds = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        column = pc.divide(microseconds.cast(pa.float64()), _MICROSECONDS)
    if is_text(column.type):
        column = _parse_texts(column, name, table, first, _TIMES)
    seconds = _read_numbers(column, name, table, first)
    if (places := np.flatnonzero(np.isnan(seconds))).size:
        what = f"{name} is missing in row {name_rows(places + first, table)}"
        raise UserError("data.time", f"{table.name}: {what}", hint="Write a time in each row.")
    return seconds, dates


def dates_of(seconds: Floats, kind: pa.DataType) -> pa.Array:
    """Seconds since 1970 as dates of a type."""
    return pa.array(np.rint(seconds * _MICROSECONDS).astype(np.int64)).cast(kind)


def _parse_dates(column: pa.Array, name: str, table: Table, first: int) -> pa.Array:
    """Texts that are dates as dates, with or without a zone; other texts unchanged."""
    form = table.dates
    if form is not None:
        texts = pc.utf8_trim_whitespace(column)
        dates = pc.strptime(texts, format=form, unit="us", error_is_null=True)
        is_wrong = pc.and_(pc.is_null(dates), pc.greater(pc.binary_length(texts), 0))
        if (places := np.flatnonzero(mask_of(is_wrong))).size:
            written = texts[int(places[0])].as_py()
            raise UserError(
                table.name,
                f"{name} is {written!r} in row {name_rows(places[:1] + first, table)}",
                allowed=f"data.read.dates={form}",
            )
        return dates
    first_text = next(filter(None, column.slice(0, 100).to_pylist()), "")
    if _is_number(first_text):
        return column
    # Nanoseconds only where microseconds lose digits; a zone only where the texts have one.
    for unit, zone in product(("us", "ns"), (None, "UTC")):
        try:
            return column.cast(pa.timestamp(unit, zone))
        except pa.ArrowException:
            continue
    return column


class GroupNumbers:
    """Numbers the groups of a table's rows, block after block, in the order of their first rows."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)  # columns whose values make a group; the first one is its part
        self.part_of: dict[str, str] = {}  # the part of each group so far
        self.values_of: dict[str, tuple[object, ...]] = {}  # and its values, a column each
        self._number: dict[str, int] = {}

    def number(self, columns: Sequence[pa.Array]) -> NDArray[np.int64]:
        """The group of each row of a block."""
        codes, groups = _join(columns, self.names)
        part_codes, parts = _join(columns[:1], self.names[:1])
        _, first = np.unique(codes, return_index=True)
        for group, row, part in zip(groups, first, part_codes[first].tolist(), strict=True):
            if group not in self.part_of:
                self.part_of[group] = parts[part]
                self.values_of[group] = tuple(column[int(row)].as_py() for column in columns)
        numbers = [self._number.setdefault(group, len(self._number)) for group in groups]
        return np.array(numbers, np.int64)[codes]


def _join(columns: Sequence[pa.Array], names: Sequence[str]) -> tuple[NDArray[np.int64], list[str]]:
    """The group of each row as a number, and the groups' names.

    Columns car = [a, a, b] and trip = [1, 1, 2]: [0, 0, 1] and ["car=a trip=1", "car=b trip=2"].
    """
    kind = pa.large_string()
    parts = []
    for name, column in zip(names, columns, strict=True):
        text = pc.fill_null(as_texts(decoded(column)).cast(kind), "")
        parts.append(pc.binary_join_element_wise(pa.scalar(name, kind), text, pa.scalar("=", kind)))
    joined = pc.binary_join_element_wise(*parts, pa.scalar(" ", kind)).dictionary_encode()
    codes = joined.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return codes, joined.dictionary.to_pylist()


def name_rows(places: NDArray[np.integer], table: Table) -> str:
    """The first of some rows, counted from 1, in words."""
    # One more than is named: so many are located, however many rows there are.
    located = [table.locate(int(place) + 1) for place in places[: _ROWS_NAMED + 1]]
    return name_few(located, _ROWS_NAMED)


_WITH_COMMA = re.compile(r"-?\d+,\d+")
# For the error about a value: what a column may hold, and how to write it.
_NUMBERS = (
    "numbers",
    "Write numbers with a point, leave a missing value empty, or leave out the column.",
)
_TIMES = ("seconds or dates", "")  # the hint has the form of the date
# How dates are often written; of two that fit, the first is shown.
_FORMS_OF_DATES = (
    "%d.%m.%Y %H:%M:%S",
    "%d.%m.%Y %H:%M",
    "%d.%m.%Y",
    "%m/%d/%Y %I:%M:%S %p",
    "%m/%d/%Y %I:%M %p",
    "%d/%m/%Y %H:%M:%S",
    "%m/%d/%Y %H:%M:%S",
    "%d/%m/%Y %H:%M",
    "%m/%d/%Y %H:%M",
    "%d/%m/%Y",
    "%m/%d/%Y",
    "%d-%m-%Y %H:%M:%S",
    "%d-%m-%Y %H:%M",
    "%Y/%m/%d %H:%M:%S",
    "%Y/%m/%d %H:%M",
    "%Y%m%d %H:%M:%S",
)


def _advise_on_date(written: str) -> str:
    """How to write dates, or to say how they are written: by a form that fits, if one does."""
    fitting = (form for form in _FORMS_OF_DATES if _is_date(written, form))
    named = next(fitting, "%d.%m.%Y %H:%M:%S")
    advice = "Write dates as 2026-03-28T07:00:00, or say how they are written:"
    return f"{advice} 'data.read.dates={named}'."


def _is_date(written: str, form: str) -> bool:
    try:
        datetime.strptime(written, form)
    except ValueError:
        return False
    return True


def _parse_texts(
    column: pa.Array, name: str, table: Table, first: int, expected: tuple[str, str] = _NUMBERS
) -> pa.Array:
    """Texts of a csv as numbers; an empty one is a missing value."""
    texts = pc.utf8_trim_whitespace(column)
    is_empty = pc.equal(pc.binary_length(texts), 0)
    texts = pc.if_else(is_empty, pa.scalar(None, texts.type), texts)
    numbers = texts
    if table.decimal == ",":
        # A point would part thousands here, so a number with one is refused, as `1-514` is.
        numbers = pc.replace_substring(pc.replace_substring(texts, ".", "-"), ",", ".")
    try:
        return numbers.cast(pa.float64())
    except pa.ArrowException:
        row = next(
            row
            for row, text in enumerate(numbers.to_pylist())
            if text is not None and not _is_number(text)
        )
    written = texts[row].as_py()
    problem = f"{name} is {written!r} in row {table.locate(first + row + 1)}"
    allowed, hint = expected
    hint = hint or _advise_on_date(written)
    if table.decimal == "," and expected is _NUMBERS:
        hint = "Write numbers with a comma, and with no points between thousands."
    elif _WITH_COMMA.fullmatch(written):
        hint = "Set data.read.decimal=',' or, for predict and evaluate, --read decimal=','."
    raise UserError(table.name, problem, allowed=allowed, hint=hint)


def _is_number(text: str) -> bool:
    try:
        return pa.array([text]).cast(pa.float64())[0].is_valid
    except pa.ArrowException:
        return False
