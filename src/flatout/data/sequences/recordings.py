"""Tables as recordings: parted by file, group and gap, checked, filled and resampled to a fixed
step.

A large file that is one recording as it stands is read block by block, by way of a scratch file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.checks.findings import counted
from flatout.data.sequences.columns import (
    Floats,
    GroupNumbers,
    RecordingRules,
    name_rows,
    read_blocks,
)
from flatout.data.sequences.settings import Missing
from flatout.data.store.store import written
from flatout.data.tables.formats.file import FileTable
from flatout.data.tables.table import Table, as_texts, decoded, is_blank, mask_of
from flatout.errors import UserError, require


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One run of samples."""

    name: str  # of its file and its group
    part: str  # what splits keep together: its file, or the first column of its group
    values: Any  # [samples, columns] float64; of a large file `ScratchValues`
    times: Any  # [samples] seconds; numbers from 0 where there is no column of times
    rows: NDArray[np.int64]
    """[samples] rows in their file, from 0; of resampled ones the row at or before; none of a large
    file."""
    step: float = 1.0  # median seconds between two samples, as they were written
    longest_s: float = 0.0  # of a large file with times: the most seconds between two samples
    label: str | None = None
    whole: str = ""  # of a recording with a group: its name before gaps part it
    is_dated: bool = False  # whether `times` were dates, and count from 1970
    measured: NDArray[np.bool_] | None = None
    """[samples, columns] False where a value repeats one that was measured before; None where all
    were measured."""

    def take(self, chosen: slice | NDArray[np.int64]) -> Recording:
        taken = replace(
            self, values=self.values[chosen], times=self.times[chosen], rows=self.rows[chosen]
        )
        return taken if self.measured is None else replace(taken, measured=self.measured[chosen])


@dataclass(slots=True)
class ReadingNotes:
    """What was found while recordings were read."""

    filled: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    headless: dict[str, str] = field(default_factory=dict)
    """Rows that were to be filled and have no value before them."""
    holes: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Recordings with a gap of many steps: seconds of the longest one, and of a step."""
    gaps: int = 0
    short: int = 0  # recordings of a single sample, which are left out
    brief: list[str] = field(default_factory=list)  # and those too short for what is asked of them
    steps: list[float] = field(default_factory=list)
    """The median seconds between two samples of each recording, as they were written."""
    is_resampled: bool = False  # whether recordings get one step, whatever they were written with

    def look_at_steps(self, name: str, longest_s: float, step_s: float) -> None:
        """Note the step of a recording, and its longest gap where that is far longer."""
        self.steps.append(step_s)
        if longest_s > _STEPS_OF_A_HOLE * step_s:
            self.holes[name] = longest_s, step_s

    def lines(self) -> list[str]:
        """In words, with the setting that changes it."""
        found = [
            f"warning {name}: {what} filled; data.missing=drop"
            for name, what in self.filled.items()
        ]
        found += [
            f"warning {name}: {what} dropped: no value before"
            for name, what in self.headless.items()
        ]
        found += [
            f"warning {name}: {what} dropped; data.missing=fill"
            for name, what in self.dropped.items()
        ]
        found += (
            [f"gaps: {self.gaps:,} longer than data.max_gap split recordings"] if self.gaps else []
        )
        found += self._describe_holes()
        found += self._describe_rates()
        found += (
            [f"warning recordings: {self.short:,} of a single sample left out"]
            if self.short
            else []
        )
        named = f"{', '.join(self.brief[:3])}{', …' if len(self.brief) > 3 else ''}"
        found += (
            [f"warning recordings: {len(self.brief):,} too short, left out: {named}"]
            if self.brief
            else []
        )
        return found

    def _describe_holes(self) -> list[str]:
        if not self.holes:
            return []
        name = max(self.holes, key=lambda hole: self.holes[hole][0])
        longest_s, step_s = self.holes[name]
        others = (
            f"; {counted(len(self.holes) - 1, 'recording')} more with such gaps"
            if len(self.holes) > 1
            else ""
        )
        what = f"longest gap {longest_s:,.10g} s, with a sample every {step_s:.10g} s{others}"
        return [
            f"warning {name}: {what}; windows reach across it unless data.max_gap parts recordings"
            " there"
        ]

    def _describe_rates(self) -> list[str]:
        if self.is_resampled or not self.steps:
            return []
        least_s, median_s, most_s = np.quantile(self.steps, (0, 0.5, 1)).tolist()
        if least_s >= median_s * (1 - OTHER_RATE) and most_s <= median_s * (1 + OTHER_RATE):
            return []
        what = f"a sample every {least_s:.10g} to {most_s:.10g} s, as if all were alike"
        return [f"warning recordings: {what}; data.step={median_s:.10g} resamples them"]


OTHER_RATE = 0.05  # share by which the median time between samples may differ between recordings
_STEPS_OF_A_HOLE = 10.0  # from so many steps between two samples on a gap is warned of


def read_recordings(
    table: Table,
    rules: RecordingRules,
    notes: ReadingNotes,
    advance: Callable[[int], None] = lambda rows: None,
) -> Iterator[Recording]:
    """The recordings of a table, file by file; one file is in memory at a time."""
    for file in table.tables or [table]:
        for recording in _parted(file, rules):
            yield from _made_even(file, recording, rules, notes)
            advance(len(recording.rows))


def _parted(file: Table, rules: RecordingRules) -> Iterator[Recording]:
    """The recordings of a file as they are written, in the order in which they begin."""
    groups = GroupNumbers(rules.group)
    values = []
    times = []
    labels = []
    codes = []
    is_dated = False
    for block, own_values, own_times, are_dates in read_blocks(file, rules):
        values.append(own_values)
        times.append(own_times)
        is_dated = is_dated or are_dates
        if rules.label is not None:
            labels.append(as_texts(decoded(block.column(rules.label))))
        if rules.group:
            columns = [as_texts(decoded(block.column(name))) for name in rules.group]
            for name, column in zip(rules.group, columns, strict=True):
                lacking = np.flatnonzero(mask_of(pc.fill_null(is_blank(column), True))) + sum(
                    map(len, values[:-1])
                )
                require(
                    not lacking.size,
                    "data.group",
                    f"{file.name}: {name} is missing in row {name_rows(lacking, file)}",
                    hint="Write the group in each row.",
                )
            codes.append(groups.number(columns))
    places = np.arange(sum(map(len, times)))
    require(len(places) > 0, file.name, "no rows", hint="Name a file that holds some.")
    column = pa.chunked_array(labels).combine_chunks() if labels else None
    numbers: dict[str, Any] = {
        "values": np.concatenate(values),
        "times": np.concatenate(times),
        "rows": places,
    }
    whole = Recording(name=file.name, part=file.name, **numbers, is_dated=is_dated)
    chosen: list[Any] = [slice(None)]
    if rules.group:
        code = np.concatenate(codes)
        order = np.argsort(code, kind="stable")
        chosen = np.split(order, np.searchsorted(code[order], np.arange(1, len(groups.part_of))))
    for (name, part), rows in zip((groups.part_of or {"": file.name}).items(), chosen, strict=True):
        full = f"{file.name}: {name}" if name else file.name
        one = replace(whole.take(rows), name=full, whole=full, part=part)
        seconds = (
            one.times if rules.time is not None else np.arange(len(one.rows), dtype=np.float64)
        )
        label = None if column is None else _label_of(column.take(pa.array(one.rows)), one.name)
        yield replace(one, times=seconds, label=label)


def _label_of(column: pa.Array, whose: str) -> str:
    found = pc.unique(column.filter(pc.invert(is_blank(column)))).to_pylist()
    hint = "Write the same value in all rows of a recording, or part recordings with data.group."
    listed = ", ".join(map(repr, found[:3]))
    require(
        len(found) == 1,
        "data.target",
        f"{whose} has {len(found)} labels ({listed})",
        allowed="one",
        hint=hint,
    )
    return str(found[0])


def _made_even(
    file: Table, recording: Recording, rules: RecordingRules, notes: ReadingNotes
) -> Iterator[Recording]:
    if rules.time is not None:
        _require_rising(file, recording, rules.time)
    whole = _without_missing(file, recording, rules, notes)
    pieces = [whole] if rules.max_gap is None else _cut_at_gaps(whole, rules.max_gap)
    notes.gaps += len(pieces) - 1
    for piece in pieces:
        even = (
            piece if rules.step is None else resample(piece, rules.step, past_only=rules.past_only)
        )
        if len(even.times) < 2:
            notes.short += 1
            continue
        apart = np.diff(piece.times)
        step_s = float(np.median(apart))
        notes.is_resampled = rules.step is not None
        notes.look_at_steps(
            piece.name, float(apart.max()) if rules.time is not None else 0.0, step_s
        )
        yield replace(_with_integrals(even, rules) if rules.cumulate else even, step=step_s)


def _with_integrals(recording: Recording, rules: RecordingRules) -> Recording:
    """Integrals over time by trapezoids, before the other columns."""
    columns = recording.values[:, [rules.columns.index(name) for name in rules.cumulate]]
    hours = np.diff(recording.times)[:, None] / (1.0 if rules.time is None else 3600.0)
    areas = (columns[1:] + columns[:-1]) / 2 * hours
    integrals = np.concatenate([np.zeros_like(columns[:1]), areas.cumsum(axis=0)])
    whole = replace(recording, values=np.concatenate([integrals, recording.values], axis=1))
    if recording.measured is None:
        return whole
    of_integrals = np.ones(integrals.shape, np.bool_)
    return replace(whole, measured=np.concatenate([of_integrals, recording.measured], axis=1))


def _require_rising(file: Table, recording: Recording, name: str) -> None:
    falls = np.flatnonzero(np.diff(recording.times) <= 0)
    if not falls.size:
        return
    place = int(falls[0])
    are_dates = recording.is_dated
    moments = recording.times[place : place + 2].tolist()
    before, after = (
        str(np.datetime64(round(at * 1e3), "ms")) if are_dates else f"{at:.15g}" for at in moments
    )
    how = f"repeats {after}" if before == after else f"goes back from {before} to {after}"
    row = file.locate(int(recording.rows[place + 1]) + 1)
    raise UserError(
        "data.time",
        f"{recording.name}: {name} {how} in row {row}",
        hint=(
            "Sort the rows by time, or name the columns that part recordings: data.group=[COLUMN]."
        ),
    )


def _without_missing(
    file: Table, recording: Recording, rules: RecordingRules, notes: ReadingNotes
) -> Recording:
    is_missing = np.isnan(recording.values)
    lacking = is_missing.any(axis=1)
    if not lacking.any():
        return recording
    columns = ", ".join(np.array(rules.columns)[is_missing.any(axis=0)])
    count = int(lacking.sum())
    where = f"{'row' if count == 1 else 'rows'} {name_rows(recording.rows[lacking], file)}"
    what = f"{counted(count, 'row')} without {columns} ({where})"
    if rules.missing is Missing.refuse:
        raise UserError(
            "data.missing",
            f"{recording.name}: {what}",
            hint="Set data.missing=fill or data.missing=drop.",
        )
    if rules.missing is Missing.drop:
        notes.dropped[recording.name] = what
        is_bare = bool(lacking.all())
        require(
            not is_bare,
            "data.missing",
            f"{recording.name}: no row is whole",
            hint="Leave out the column.",
        )
        return recording.take(np.flatnonzero(~lacking))
    for name, is_bare in zip(rules.columns, is_missing.all(axis=0).tolist(), strict=True):
        require(
            not is_bare,
            "data.missing",
            f"{recording.name}: {name} has no value",
            hint="Leave it out.",
        )
    notes.filled[recording.name] = what
    if rules.past_only:
        carried = _carry_forward(recording, is_missing)
        if left_out := len(recording.times) - len(carried.times):
            notes.headless[recording.name] = f"{counted(left_out, 'first row')} without {columns}"
        return carried
    values = recording.values.copy()
    for number in range(len(rules.columns)):
        known = ~is_missing[:, number]
        values[:, number] = np.interp(
            recording.times, recording.times[known], values[known, number]
        )
    return replace(recording, values=values)


def _carry_forward(recording: Recording, is_missing: NDArray[np.bool_]) -> Recording:
    """Each missing value as the last one before it; rows before the first value of some column are
    left out.
    """
    # [nan, 5, nan, 7] → [-1, 1, 1, 3] → [5, 5, 7] behind the first row
    source = _last_measured(~is_missing)
    begin = int((source < 0).any(axis=1).sum())
    values = np.take_along_axis(recording.values, np.maximum(source, 0), axis=0)
    return replace(recording, values=values, measured=~is_missing).take(slice(begin, None))


def _last_measured(measured: NDArray[np.bool_]) -> NDArray[np.int64]:
    """`[samples, columns]` the last row up to each one whose value was measured; -1 where there is
    none.
    """
    rows = np.arange(len(measured))[:, None]
    return np.maximum.accumulate(np.where(measured, rows, -1), axis=0)


def _cut_at_gaps(recording: Recording, max_gap: float) -> list[Recording]:
    cuts = np.flatnonzero(np.diff(recording.times) > max_gap) + 1
    if not len(cuts):
        return [recording]
    pieces = [
        recording.take(slice(*ends))
        for ends in itertools.pairwise([0, *cuts.tolist(), len(recording.times)])
    ]
    return [
        replace(piece, name=f"{piece.name} part {number}") for number, piece in enumerate(pieces, 1)
    ]


def resample(recording: Recording, step: float, *, past_only: bool = False) -> Recording:
    """Samples at a fixed step from the first one on: linear between two samples, or the last one at
    or before.
    """
    times = recording.times
    count = int(np.floor((times[-1] - times[0]) / step * (1 + 1e-12))) + 1
    wanted = times[0] + step * np.arange(count)
    if past_only:
        return _hold(recording, wanted, step)
    columns = [np.interp(wanted, times, column) for column in recording.values.T]
    place = np.clip(np.searchsorted(times, wanted, side="right") - 1, 0, len(times) - 1)
    return replace(
        recording, values=np.stack(columns, axis=1), times=wanted, rows=recording.rows[place]
    )


def measured_targets(recording: Recording, targets: int) -> NDArray[np.bool_]:
    """`[samples, targets]` whether each target, the last columns, was measured then, and is no
    repeated value.
    """
    if recording.measured is None:
        return np.ones((len(recording.values), targets), np.bool_)
    return recording.measured[:, -targets:]


_STEPS_OFF = 1e-6
_ROUNDINGS_OFF = 4
"""Part of a step, and roundings of a time, by which a sample may stand behind the time that it was
written for."""


def _hold(recording: Recording, wanted: Floats, step: float) -> Recording:
    """At each of these times the last sample at or before; measured is what is newer than the time
    before.
    """
    # times 0 2 4, wanted 0 1 2 3 4 → rows 0 0 1 1 2, measured yes no yes no yes
    times, values = recording.times, recording.values
    slack = step * _STEPS_OFF + _ROUNDINGS_OFF * np.spacing(np.abs(times[[0, -1]]).max())
    place = np.searchsorted(times, wanted + slack, side="right") - 1
    before = np.append(-1, place[:-1])
    measured = np.ones(values.shape, np.bool_) if recording.measured is None else recording.measured
    is_new = _last_measured(measured)[place] > before[:, None]
    held = replace(recording, values=values[place], times=wanted, rows=recording.rows[place])
    return replace(held, measured=None if is_new.all() else is_new)


# smaller files are read as a whole: a copy on disk would cost more than it saves
LEAST_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class ScratchValues:
    """Some columns of `[samples, width]` float64 in a file; a slice of rows is read when it is
    asked for.
    """

    path: Path
    samples: int
    width: int
    columns: slice | int  # a slice for `[samples, columns]`, or the one column of `[samples]`

    def __len__(self) -> int:
        return self.samples

    @property
    def shape(self) -> tuple[int, int]:
        return self.samples, np.arange(self.width)[self.columns].size

    def __getitem__(self, rows: slice) -> Floats:
        start, stop, _ = rows.indices(len(self))
        width = self.width
        count = max(0, stop - start)
        read = np.fromfile(
            self.path, np.float64, count * width, offset=start * width * np.float64().itemsize
        )
        return read.reshape(count, width)[:, self.columns]


class Scratch:
    """The scratch files of the large files of one preparation, so that memory does not grow with a
    file.
    """

    # Its numbers go to a scratch file beside the store, once; scales and store are then made from
    # that file. It serves a recording that is written down as it stands. Any other one is read as a
    # whole, which also reports what is wrong.

    def __init__(self, folder: Path, rules: RecordingRules, *, keeps_times: bool = False) -> None:
        self.folder = folder
        self.rules = rules
        self.keeps_times = keeps_times
        self._found: dict[str, Recording | None] = {}

    def read(self, file: Table, notes: ReadingNotes) -> Recording | None:
        """A large file as a recording; None where it has to be read as a whole."""
        rules = self.rules
        is_changed = rules.group or rules.label or rules.step or rules.max_gap or rules.cumulate
        if is_changed or not isinstance(file, FileTable) or file.path.stat().st_size < LEAST_BYTES:
            return None
        if file.name not in self._found:
            self._found[file.name] = self._copy(file, self.folder / f"{len(self._found)}.float64")
        if (found := self._found[file.name]) is not None:
            notes.look_at_steps(file.name, found.longest_s, found.step)
        return found

    def _copy(self, file: FileTable, path: Path) -> Recording | None:
        """Write the numbers of a file to the scratch file; None where a value is missing or a time
        does not rise.
        """
        rules = self.rules
        samples = 0
        steps = []
        last = None
        is_dated = False
        longest_s = 0.0
        with written():
            output = path.open("wb")
        with output:
            for _, values, times, are_dates in read_blocks(file, rules):
                is_dated = is_dated or are_dates
                apart = np.diff(times if last is None else np.append(last, times))
                if np.isnan(values).any() or (apart <= 0).any():
                    path.unlink()
                    return None
                steps += [float(np.median(apart))] if len(apart) else []
                longest_s = max(longest_s, float(apart.max(initial=0.0)))
                last = times[-1:]
                samples = samples + len(values)
                numbers = np.column_stack([values, times]) if self.keeps_times else values
                with written():
                    output.write(np.ascontiguousarray(numbers).data)
        if samples < 2:
            return None
        width = (columns := len(rules.columns)) + self.keeps_times
        kept: dict[str, Any] = {"values": ScratchValues(path, samples, width, slice(columns))}
        kept |= {"times": ScratchValues(path, samples, width, -1), "rows": np.empty(0, np.int64)}
        kept |= {"longest_s": longest_s if rules.time is not None else 0.0}
        return Recording(
            name=file.name, part=file.name, **kept, step=float(np.median(steps)), is_dated=is_dated
        )


def blocks_of(
    values: Floats | ScratchValues, rows: int, first: int = 0, stop: int | None = None
) -> Iterator[Floats]:
    """Samples from `first` to before `stop`, so many at a time."""
    end = len(values) if stop is None else stop
    for at in range(first, end, rows):
        yield values[at : min(at + rows, end)]
