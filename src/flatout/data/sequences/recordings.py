"""Tables as recordings: parted by file, group and gap, checked, filled and resampled to a fixed step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.checks.findings import counted
from flatout.data.sequences.choices import Missing, SequenceProblem
from flatout.data.sequences.columns import Floats, GroupNumbers, are_dates, name_rows, read_numbers, read_seconds
from flatout.data.tables.formats.many_files import ManyFiles
from flatout.data.tables.table import Table, require_columns
from flatout.data.tables.values import decoded, written
from flatout.errors import UserError, require

if TYPE_CHECKING:
    from flatout.data.sequences.settings import SequenceDataConfig

RECORDINGS, SEGMENTS = "recordings", "segments"
"""Splits of the store on disk: the samples, and which of them belong to training, validation and test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One run of samples."""

    name: str
    """Of its file and its group."""
    part: str
    """What splits keep together: its file, or the first column of its group."""
    values: Floats
    """[samples, columns]"""
    times: Floats
    """[samples] seconds; numbers from 0 where there is no column of times."""
    rows: NDArray[np.int64]
    """[samples] numbers of the rows in their file, from 0; of resampled ones the row at or before."""
    label: str | None = None
    is_dated: bool = False
    """Whether `times` were dates, and count from 1970."""

    def slice(self, start: int, stop: int) -> Recording:
        cut = slice(start, stop)
        return replace(self, values=self.values[cut], times=self.times[cut], rows=self.rows[cut])


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRules:
    """How tables become recordings: the same for training and for new files."""

    columns: list[str]
    time: str | None
    group: list[str]
    label: str | None
    step: float | None
    max_gap: float | None
    missing: Missing
    cumulate: list[str] = field(default_factory=list)
    """Columns whose integral is put before all others."""
    targets: list[str] = field(default_factory=list)
    """Columns that are answered, for messages."""

    @classmethod
    def of(cls, config: SequenceDataConfig) -> RecordingRules:
        """Features are read, then targets; labels are no column of a recording."""
        features, is_label = config.features or [], config.problem is SequenceProblem.label
        return cls(
            columns=[name for name in features if name not in config.targets] + ([] if is_label else config.targets),
            time=config.time,
            group=list(config.group or []),
            label=config.targets[0] if is_label else None,
            step=config.step,
            max_gap=config.max_gap,
            missing=Missing(config.missing),
            cumulate=list(config.cumulate),
            targets=config.targets,
        )

    @property
    def names(self) -> list[str]:
        """Columns of a recording's values: integrals, then those of the tables."""
        return [*(f"{name} cumulated" for name in self.cumulate), *self.columns]

    @property
    def are_plain(self) -> bool:
        """Whether a file is one recording whose values stand in it as they are."""
        return not (self.group or self.label or self.step or self.max_gap or self.cumulate)


@dataclass(slots=True)
class ReadingNotes:
    """What was found while recordings were read."""

    filled: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    gaps: int = 0
    short: int = 0
    """Recordings of a single sample, which are left out."""
    steps: list[float] = field(default_factory=list)
    """The median seconds between two samples of each recording, as they were written."""

    def lines(self) -> list[str]:
        """In words, with the setting that changes it."""
        found = [f"warning {name}: {what} filled; data.missing=drop" for name, what in self.filled.items()]
        found += [f"warning {name}: {what} dropped; data.missing=fill" for name, what in self.dropped.items()]
        found += [f"gaps: {self.gaps:,} longer than data.max_gap split recordings"] if self.gaps else []
        found += [f"warning recordings: {self.short:,} of a single sample left out"] if self.short else []
        return found


def files_of(table: Table) -> list[Table]:
    """The tables of a table in several files."""
    return list(table.tables) if isinstance(table, ManyFiles) else [table]


def read_recordings(
    table: Table, rules: RecordingRules, notes: ReadingNotes, advance: Callable[[int], None] = lambda rows: None
) -> Iterator[Recording]:
    """The recordings of a table, file by file; one file is in memory at a time."""
    for file in files_of(table):
        require_rules_columns(file, rules)
        for recording in _parted(file, rules):
            yield from _made_even(file, recording, rules, notes)
            advance(len(recording.rows))


def require_rules_columns(table: Table, rules: RecordingRules) -> None:
    """Check that a table has the columns of the settings."""
    wanted: dict[str, str] = {}
    for kind, names in (
        ("features", [name for name in rules.columns if name not in rules.targets]),
        ("target", [name for name in rules.columns if name in rules.targets]),
    ):
        wanted |= {
            f"data.{kind}" + (f"[{number}]" if len(names) > 1 else ""): name for number, name in enumerate(names)
        }
    wanted |= {} if rules.time is None else {"data.time": rules.time}
    wanted |= {} if rules.label is None else {"data.target": rules.label}
    require_columns(table, wanted)
    for name in rules.group:  # a group may be a feature too
        require_columns(table, {"data.group": name})


@dataclass(slots=True)
class _Rows:
    """The rows of a file as numbers."""

    values: Floats
    times: Floats | None
    labels: pa.Array | None
    codes: NDArray[np.int64] | None
    """The group of each row; None where the file is one recording."""
    groups: dict[str, str]
    """The groups in the order of their codes, and the part of each."""
    is_dated: bool


def _read_rows(file: Table, rules: RecordingRules) -> _Rows:
    """Read block by block, so that texts of a large file are never in memory together."""
    names = list(dict.fromkeys([*rules.columns, *rules.group, *filter(None, (rules.time, rules.label))]))
    values, times, labels, codes, groups, first = [], [], [], [], GroupNumbers(rules.group), 0
    is_dated = False
    for block in file.blocks(names):
        column = {name: block.column(name) for name in names}
        values.append(np.stack([read_numbers(column[name], name, file, first) for name in rules.columns], axis=1))
        if rules.time is not None:
            is_dated = is_dated or are_dates(column[rules.time].slice(0, 1))
            times.append(read_seconds(column[rules.time], rules.time, file, first))
        if rules.label is not None:
            labels.append(written(decoded(column[rules.label])))
        if rules.group:
            codes.append(groups.number([column[name] for name in rules.group]))
        first += block.num_rows
    require(first > 0, file.name, "no rows", hint="Name a file that holds some.")
    return _Rows(
        values=np.concatenate(values),
        times=np.concatenate(times) if times else None,
        labels=pa.chunked_array(labels).combine_chunks() if labels else None,
        codes=np.concatenate(codes) if codes else None,
        groups=groups.part_of,
        is_dated=is_dated,
    )


def _parted(file: Table, rules: RecordingRules) -> Iterator[Recording]:
    """The recordings of a file as they are written, in the order in which they begin."""
    rows = _read_rows(file, rules)
    numbers = np.arange(len(rows.values))
    if rows.codes is None:
        yield _recording(file, "", file.name, rows, slice(None), numbers)
        return
    order = np.argsort(rows.codes, kind="stable")
    bounds = np.searchsorted(rows.codes[order], np.arange(len(rows.groups) + 1))
    for number, (name, part) in enumerate(rows.groups.items()):
        chosen = order[bounds[number] : bounds[number + 1]]
        yield _recording(file, name, part, rows, chosen, numbers[: len(chosen)])


def _recording(
    file: Table, group: str, part: str, rows: _Rows, chosen: NDArray[np.int64] | slice, numbers: NDArray[np.int64]
) -> Recording:
    """The chosen rows of a file as one recording."""
    places = numbers if isinstance(chosen, slice) else chosen
    return Recording(
        name=f"{file.name}: {group}" if group else file.name,
        part=part,
        values=rows.values[chosen],
        times=numbers.astype(np.float64) if rows.times is None else rows.times[chosen],
        rows=places,
        label=None if rows.labels is None else _label_of(rows.labels.take(pa.array(places)), group, file),
        is_dated=rows.is_dated,
    )


def _label_of(column: pa.Array, name: str, file: Table) -> str:
    """The one label of a recording."""
    found = pc.unique(pc.drop_null(column)).to_pylist()
    whose = f"{file.name}: {name}" if name else file.name
    hint = "Write the same value in all rows of a recording, or part recordings with data.group."
    listed = ", ".join(map(repr, found[:3]))
    require(len(found) == 1, "data.target", f"{whose} has {len(found)} labels ({listed})", allowed="one", hint=hint)
    return str(found[0])


def _made_even(file: Table, recording: Recording, rules: RecordingRules, notes: ReadingNotes) -> Iterator[Recording]:
    """A recording without missing values, cut at gaps, resampled."""
    if rules.time is not None:
        _require_rising(file, recording, rules.time)
    whole = _without_missing(file, recording, rules, notes)
    pieces = [whole] if rules.max_gap is None else _cut_at_gaps(whole, rules.max_gap)
    notes.gaps += len(pieces) - 1
    for piece in pieces:
        even = piece if rules.step is None else resample(piece, rules.step)
        if len(even.times) < 2:
            notes.short += 1
            continue
        notes.steps.append(float(np.median(np.diff(piece.times))))
        yield _with_integrals(even, rules) if rules.cumulate else even


def _with_integrals(recording: Recording, rules: RecordingRules) -> Recording:
    """Integrals over time by trapezoids, before the other columns."""
    columns = recording.values[:, [rules.columns.index(name) for name in rules.cumulate]]
    hours = np.diff(recording.times)[:, None] / (1.0 if rules.time is None else 3600.0)
    areas = (columns[1:] + columns[:-1]) / 2 * hours
    integrals = np.concatenate([np.zeros_like(columns[:1]), areas.cumsum(axis=0)])
    return replace(recording, values=np.concatenate([integrals, recording.values], axis=1))


def _require_rising(file: Table, recording: Recording, name: str) -> None:
    falls = np.flatnonzero(np.diff(recording.times) <= 0)
    if not falls.size:
        return
    place = int(falls[0])
    before, after = recording.times[place : place + 2]
    how = f"repeats {after:g}" if before == after else f"goes back from {before:g} to {after:g}"
    row = file.locate(int(recording.rows[place + 1]) + 1)
    hint = "Sort the rows by time, or name the columns that part recordings: data.group=[COLUMN]."
    raise UserError("data.time", f"{recording.name}: {name} {how} in row {row}", hint=hint)


def _without_missing(file: Table, recording: Recording, rules: RecordingRules, notes: ReadingNotes) -> Recording:
    is_missing = np.isnan(recording.values)
    lacking = is_missing.any(axis=1)
    if not lacking.any():
        return recording
    where = name_rows(recording.rows[lacking], file)
    columns = ", ".join(np.array(rules.columns)[is_missing.any(axis=0)])
    count = int(lacking.sum())
    what = f"{counted(count, 'row')} without {columns} ({'row' if count == 1 else 'rows'} {where})"
    if rules.missing is Missing.refuse:
        raise UserError("data.missing", f"{recording.name}: {what}", hint="Set data.missing=fill or data.missing=drop.")
    if rules.missing is Missing.drop:
        notes.dropped[recording.name] = what
        kept = np.flatnonzero(~lacking)
        require(kept.size > 0, "data.missing", f"{recording.name}: no row is whole", hint="Leave out the column.")
        return replace(recording, values=recording.values[kept], times=recording.times[kept], rows=recording.rows[kept])
    notes.filled[recording.name] = what
    values = recording.values.copy()
    for number, name in enumerate(rules.columns):
        known = ~is_missing[:, number]
        require(bool(known.any()), "data.missing", f"{recording.name}: {name} has no value", hint="Leave it out.")
        values[:, number] = np.interp(recording.times, recording.times[known], values[known, number])
    return replace(recording, values=values)


def _cut_at_gaps(recording: Recording, max_gap: float) -> list[Recording]:
    cuts = np.flatnonzero(np.diff(recording.times) > max_gap) + 1
    bounds: Sequence[int] = [0, *cuts.tolist(), len(recording.times)]
    pieces = [recording.slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    if len(pieces) == 1:
        return pieces
    return [replace(piece, name=f"{piece.name} part {number}") for number, piece in enumerate(pieces, 1)]


def resample(recording: Recording, step: float) -> Recording:
    """Linear between samples, at a fixed step from the first sample on."""
    times = recording.times
    count = int(np.floor((times[-1] - times[0]) / step * (1 + 1e-12))) + 1
    wanted = times[0] + step * np.arange(count)
    columns = [np.interp(wanted, times, column) for column in recording.values.T]
    place = np.clip(np.searchsorted(times, wanted, side="right") - 1, 0, len(times) - 1)
    return replace(recording, values=np.stack(columns, axis=1), times=wanted, rows=recording.rows[place])
