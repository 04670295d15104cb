"""Read tables as recordings: split them by file, group and gap, check, fill and resample them.

`read_recordings` has one file in memory at a time. It checks that times rise and fills or drops
missing values. It cuts at long gaps, resamples to a fixed step and adds integrals, as the
`RecordingRules` say. `ReadingNotes` collect what was changed or looks odd, for the lines that
are printed. A large file that needs none of this is read through `scratch` instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.checks.findings import counted, name_few
from flatout.data.sequences.columns import (
    Floats,
    GroupNumbers,
    RecordingRules,
    name_rows,
    read_blocks,
)
from flatout.data.sequences.missing import Missing
from flatout.data.sequences.recording import Recording, measured_columns
from flatout.data.tables.table import Table, as_texts, decoded, is_blank, mask_of
from flatout.errors import UserError, require


@dataclass(slots=True)
class ReadingNotes:
    """What was changed or looks odd, noted while recordings are read.

    The first three say in words which rows of a recording it is, by the recording's name.
    """

    filled: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    # Rows that were to be filled and have no value before them.
    headless: dict[str, str] = field(default_factory=dict)
    # Recordings with a gap of many steps: seconds of the longest one, and of a step.
    holes: dict[str, tuple[float, float]] = field(default_factory=dict)
    gaps: dict[str, int] = field(default_factory=dict)  # longer than `data.max_gap`
    short: int = 0  # recordings of a single sample, which are left out
    brief: list[str] = field(default_factory=list)  # recordings too short for a window, left out
    # The median seconds between two samples of each recording, as they were written.
    steps: list[float] = field(default_factory=list)
    in_days: int = 0  # recordings whose times may be days, as a spreadsheet counts them
    is_resampled: bool = False  # whether `data.step` gives all recordings one step

    def look_at_steps(self, name: str, longest_s: float, step_s: float) -> None:
        """Note the step of a recording, and its longest gap if that is many steps long."""
        self.steps.append(step_s)
        if longest_s > _STEPS_OF_A_HOLE * step_s:
            self.holes[name] = longest_s, step_s

    def lines(self) -> list[str]:
        """A line for each note, with the setting that changes what is done."""
        lines = []
        for rows_of, outcome in (
            (self.filled, "filled; data.missing=drop"),
            (self.headless, "dropped: no value before"),
            (self.dropped, "dropped; data.missing=fill"),
        ):
            lines += [f"warning {name}: {rows} {outcome}" for name, rows in rows_of.items()]
        if self.gaps:
            lines.append(self._describe_gaps())
        if self.holes:
            lines.append(f"warning {self.describe_holes()}")
        if self.in_days and self.in_days == len(self.steps):
            what = f"times between {_DAYS[0]:,} and {_DAYS[1]:,}, {np.median(self.steps):.3g} apart"
            lines.append(f"warning recordings: {what}: are they days of Excel? Write dates there")
        lines += self._describe_rates()
        if self.short:
            lines.append(f"warning recordings: {self.short:,} of a single sample left out")
        if self.brief:
            count = len(self.brief)
            named = name_few(self.brief)
            lines.append(f"warning recordings: {count:,} too short, left out: {named}")
        return lines

    def _describe_gaps(self) -> str:
        """How many gaps part recordings, and which recordings have the most."""
        most_first = sorted(self.gaps, key=lambda name: -self.gaps[name])
        named = name_few([f"{name} ({self.gaps[name]:,})" for name in most_first])
        total = counted(sum(self.gaps.values()), "gap")
        return f"gaps: recordings are parted at {total} longer than data.max_gap: {named}"

    def describe_holes(self, setting: str = "data.max_gap") -> str:
        """The longest gap of all, and how many other recordings have gaps.

        `setting` is the name under which the reader of this line knows `max_gap`.
        """
        name = max(self.holes, key=lambda hole: self.holes[hole][0])
        longest_s, step_s = self.holes[name]
        text = f"longest gap {longest_s:,.10g} s, with a sample every {step_s:.10g} s"
        if len(self.holes) > 1:
            text += f"; {counted(len(self.holes) - 1, 'recording')} more with such gaps"
        return f"{name}: {text}; windows reach across it unless {setting} parts recordings there"

    def _describe_rates(self) -> list[str]:
        """A warning where recordings were sampled at different rates."""
        if self.is_resampled or not self.steps:
            return []
        least_s, median_s, most_s = np.quantile(self.steps, (0, 0.5, 1)).tolist()
        if least_s >= median_s * (1 - OTHER_RATE) and most_s <= median_s * (1 + OTHER_RATE):
            return []
        what = f"a sample every {least_s:.10g} to {most_s:.10g} s, as if all were alike"
        return [f"warning recordings: {what}; data.step={median_s:.10g} resamples them"]


_DAYS = (36_000, 60_000)  # 1998 to 2064, in days since 1900
_LONGEST_PART = 0.005  # of a day, some seven minutes: seconds that are so short are hardly meant
OTHER_RATE = 0.05  # fraction by which the median time between samples may differ
_STEPS_OF_A_HOLE = 10.0  # between two samples: a longer gap is warned of


def read_recordings(
    table: Table,
    rules: RecordingRules,
    notes: ReadingNotes,
    advance: Callable[[int], None] = lambda rows: None,
) -> Iterator[Recording]:
    """The recordings of a table, file by file; one file is in memory at a time."""
    for file in table.tables or [table]:
        for recording in _split_by_group(file, rules):
            yield from _apply_rules(file, recording, rules, notes)
            advance(len(recording.rows))


def _split_by_group(file: Table, rules: RecordingRules) -> Iterator[Recording]:
    """The recordings of a file as they are written, in the order in which they begin."""
    groups = GroupNumbers(rules.group)
    values = []
    times = []
    labels = []
    codes = []
    dates: pa.DataType | None = None
    num_rows = 0
    for block, block_values, block_times, block_dates in read_blocks(file, rules):
        values.append(block_values)
        times.append(block_times)
        dates = dates or block_dates
        if rules.label is not None:
            labels.append(as_texts(decoded(block.column(rules.label))))
        if rules.group:
            codes.append(groups.number(_read_groups(file, block, rules.group, num_rows)))
        num_rows += len(block_times)
    require(num_rows > 0, file.name, "no rows", hint="Name a file that holds some.")
    label_column = pa.chunked_array(labels).combine_chunks() if labels else None
    whole = Recording(
        name=file.name,
        part=file.name,
        values=np.concatenate(values),
        times=np.concatenate(times),
        rows=np.arange(num_rows),
        dates=dates,
    )
    rows_of_groups: list[slice | NDArray[np.int64]] = [slice(None)]
    if rules.group:
        # Four rows of the groups 0 1 0 2 have the order 0 2 1 3. In it groups 1 and 2 begin at 2
        # and 3, so the rows are [0, 2], [1] and [3].
        code = np.concatenate(codes)
        order = np.argsort(code, kind="stable")
        begins = np.searchsorted(code[order], np.arange(1, len(groups.part_of)))
        rows_of_groups = list(np.split(order, begins))
    parts = groups.part_of or {"": file.name}
    for (name, part), rows in zip(parts.items(), rows_of_groups, strict=True):
        full_name = f"{file.name}: {name}" if name else file.name
        group = dict(zip(rules.group, groups.values_of.get(name, ()), strict=False))
        recording = replace(
            whole.take(rows), name=full_name, whole=full_name, part=part, group=group
        )
        # Rows were counted over the whole file; without times each recording counts from 0.
        if rules.time is None:
            recording = replace(recording, times=np.arange(len(recording.rows), dtype=np.float64))
        if label_column is not None:
            label = _only_label(label_column.take(pa.array(recording.rows)), full_name)
            recording = replace(recording, label=label)
        yield recording


def _read_groups(
    file: Table, block: pa.RecordBatch, names: list[str], first: int
) -> list[pa.Array]:
    """The columns of groups of a block whose first row has this number; none may be blank."""
    columns = [decoded(block.column(name)) for name in names]
    for name, column in zip(names, columns, strict=True):
        is_missing = pc.fill_null(is_blank(as_texts(column)), True)
        blank = np.flatnonzero(mask_of(is_missing)) + first
        require(
            not blank.size,
            "data.group",
            f"{file.name}: {name} is missing in row {name_rows(blank, file)}",
            hint="Write the group in each row.",
        )
    return columns


def _only_label(column: pa.Array, recording: str) -> str:
    """The one label in the rows of a recording; blank rows do not count."""
    labels = pc.unique(column.filter(pc.invert(is_blank(column)))).to_pylist()
    require(
        len(labels) == 1,
        "data.target",
        f"{recording} has {len(labels)} labels ({', '.join(map(repr, labels[:3]))})",
        allowed="one",
        hint=(
            "Write the same value in all rows of a recording, or part recordings with data.group."
        ),
    )
    return str(labels[0])


def _apply_rules(
    file: Table, recording: Recording, rules: RecordingRules, notes: ReadingNotes
) -> Iterator[Recording]:
    """Check, fill, cut and resample a recording; its pieces between gaps come one by one."""
    if rules.time is not None:
        _require_rising(file, recording, rules.time)
    whole = _replace_missing(file, recording, rules, notes)
    pieces = [whole] if rules.max_gap is None else _cut_at_gaps(whole, rules.max_gap)
    if len(pieces) > 1:
        notes.gaps[whole.name] = len(pieces) - 1
    for piece in pieces:
        even = piece
        if rules.step is not None:
            even = resample(piece, rules.step, past_only=rules.past_only)
        if len(even.times) < 2:
            notes.short += 1
            continue
        steps = np.diff(piece.times)
        step_s = float(np.median(steps))
        longest_s = float(steps.max()) if rules.time is not None else 0.0
        notes.is_resampled = rules.step is not None
        notes.look_at_steps(piece.name, longest_s, step_s)
        is_of_days = _DAYS[0] <= piece.times[0] <= piece.times[-1] <= _DAYS[1]
        notes.in_days += rules.time is not None and is_of_days and step_s < _LONGEST_PART
        yield replace(_add_integrals(even, rules) if rules.cumulate else even, step=step_s)


def _add_integrals(recording: Recording, rules: RecordingRules) -> Recording:
    """Put integrals over time, by trapezoids, before the other columns."""
    # Currents 2, 4, 4 A at 0, 1 and 3 h: areas 3 and 8, integrals 0, 3, 11 Ah.
    columns = recording.values[:, [rules.columns.index(name) for name in rules.cumulate]]
    hours = np.diff(recording.times)[:, None] / (1.0 if rules.time is None else 3600.0)
    areas = (columns[1:] + columns[:-1]) / 2 * hours
    integrals = np.concatenate([np.zeros_like(columns[:1]), areas.cumsum(axis=0)])
    measured = recording.measured
    if measured is not None:
        measured = np.concatenate([np.ones(integrals.shape, np.bool_), measured], axis=1)
    values = np.concatenate([integrals, recording.values], axis=1)
    return replace(recording, values=values, measured=measured)


def _require_rising(file: Table, recording: Recording, name: str) -> None:
    """Refuse a time that is not later than the one before, with its row."""
    falls = np.flatnonzero(np.diff(recording.times) <= 0)
    if not falls.size:
        return
    first = int(falls[0])
    before, after = (_name_time(recording, row) for row in (first, first + 1))
    how = f"repeats {after}" if before == after else f"goes back from {before} to {after}"
    row = file.locate(int(recording.rows[first + 1]) + 1)
    raise UserError(
        "data.time",
        f"{recording.name}: {name} {how} in row {row}",
        hint=(
            "Sort the rows by time, or name the columns that part recordings: data.group=[COLUMN]."
        ),
    )


def _name_time(recording: Recording, row: int) -> str:
    time = float(recording.times[row])
    if recording.dates is not None:
        return str(np.datetime64(round(time * 1e3), "ms"))
    return f"{time:.15g}"


def _replace_missing(
    file: Table, recording: Recording, rules: RecordingRules, notes: ReadingNotes
) -> Recording:
    """Refuse, drop or fill the rows without a value, as `data.missing` says."""
    is_missing = np.isnan(recording.values)
    is_incomplete = is_missing.any(axis=1)
    if not is_incomplete.any():
        return recording
    columns = ", ".join(np.array(rules.columns)[is_missing.any(axis=0)])
    count = int(is_incomplete.sum())
    where = f"{'row' if count == 1 else 'rows'} {name_rows(recording.rows[is_incomplete], file)}"
    problem = f"{counted(count, 'row')} without {columns} ({where})"
    if rules.missing is Missing.refuse:
        raise UserError(
            "data.missing",
            f"{recording.name}: {problem}",
            hint="Set data.missing=fill or data.missing=drop.",
        )
    if rules.missing is Missing.drop:
        notes.dropped[recording.name] = problem
        require(
            not is_incomplete.all(),
            "data.missing",
            f"{recording.name}: no row is whole",
            hint="Leave out the column.",
        )
        return recording.take(np.flatnonzero(~is_incomplete))
    for name, is_empty in zip(rules.columns, is_missing.all(axis=0).tolist(), strict=True):
        require(
            not is_empty,
            "data.missing",
            f"{recording.name}: {name} has no value",
            hint="Leave it out.",
        )
    notes.filled[recording.name] = problem
    if rules.past_only:
        carried = _carry_forward(recording, is_missing)
        if left_out := len(recording.times) - len(carried.times):
            notes.headless[recording.name] = f"{counted(left_out, 'first row')} without {columns}"
        return carried
    times = recording.times
    values = recording.values.copy()
    for number in range(len(rules.columns)):
        is_known = ~is_missing[:, number]
        values[:, number] = np.interp(times, times[is_known], values[is_known, number])
    return replace(recording, values=values)


def _carry_forward(recording: Recording, is_missing: NDArray[np.bool_]) -> Recording:
    """Fill each missing value with the last one before it.

    Rows before the first value of some column are left out.
    """
    # [nan, 5, nan, 7] → [-1, 1, 1, 3] → [5, 5, 7] behind the first row
    source = _last_measured(~is_missing)
    begin = int((source < 0).any(axis=1).sum())
    values = np.take_along_axis(recording.values, np.maximum(source, 0), axis=0)
    return replace(recording, values=values, measured=~is_missing).take(slice(begin, None))


def _last_measured(measured: NDArray[np.bool_]) -> NDArray[np.int64]:
    """`[samples, columns]`: for each value the last row, up to its own, that was measured, or -1.

    One column measured no, yes, no, yes → -1, 1, 1, 3.
    """
    rows = np.arange(len(measured))[:, None]
    return np.maximum.accumulate(np.where(measured, rows, -1), axis=0)


def _cut_at_gaps(recording: Recording, max_gap: float) -> list[Recording]:
    """The pieces between gaps longer than `max_gap` seconds, numbered from 1."""
    cuts = np.flatnonzero(np.diff(recording.times) > max_gap) + 1
    if not len(cuts):
        return [recording]
    pieces = []
    ends = [0, *cuts.tolist(), len(recording.times)]
    for number, (first, stop) in enumerate(itertools.pairwise(ends), 1):
        piece = recording.take(slice(first, stop))
        pieces.append(replace(piece, name=f"{piece.name} part {number}"))
    return pieces


# Samples that a step makes of one recording at most: 67 million take some gigabytes. A recording
# that is as long itself may get ten times its own.
_MOST_SAMPLES = 1 << 26


def _shortest_step(times: Floats) -> float:
    """A step, in seconds, that surely makes no more samples of a recording than it may."""
    return 1.1 * float(times[-1] - times[0]) / max(_MOST_SAMPLES, 10 * len(times))


def resample(recording: Recording, step: float, *, past_only: bool = False) -> Recording:
    """Samples at a fixed step from the first one on, linear between two samples.

    With `past_only` each is the last sample at or before its time.
    """
    times = recording.times
    # The last time counts even where its distance is a rounding less than a whole step.
    num_steps = (times[-1] - times[0]) / step * (1 + 1e-12)
    require(
        num_steps < max(_MOST_SAMPLES, 10 * len(times)),
        "data.step",
        f"{step:g} s makes {num_steps:.0e} samples of {recording.name}, which has {len(times):,}",
        hint=f"Set a step of at least {_shortest_step(times):.2g} s.",
    )
    count = int(np.floor(num_steps)) + 1
    new_times = times[0] + step * np.arange(count)
    if past_only:
        return _hold(recording, new_times, step)
    columns = [np.interp(new_times, times, column) for column in recording.values.T]
    at_or_before = np.searchsorted(times, new_times, side="right") - 1
    source = np.clip(at_or_before, 0, len(times) - 1)
    return replace(
        recording, values=np.stack(columns, axis=1), times=new_times, rows=recording.rows[source]
    )


# A sample may stand behind the time that it was written for by this part of a step, and by so many
# roundings of the largest time.
_STEPS_OFF = 1e-6
_ROUNDINGS_OFF = 4


def _hold(recording: Recording, new_times: Floats, step: float) -> Recording:
    """The last sample at or before each of these times.

    A value counts as measured where it is newer than the one at the time before.
    """
    # times 0 2 4, new_times 0 1 2 3 4 → source 0 0 1 1 2, measured yes no yes no yes
    times = recording.times
    largest = np.abs(times[[0, -1]]).max()
    slack = step * _STEPS_OFF + _ROUNDINGS_OFF * np.spacing(largest)
    source = np.searchsorted(times, new_times + slack, side="right") - 1
    source_before = np.append(-1, source[:-1])
    is_new = _last_measured(measured_columns(recording))[source] > source_before[:, None]
    return replace(
        recording,
        values=recording.values[source],
        times=new_times,
        rows=recording.rows[source],
        measured=None if is_new.all() else is_new,
    )
