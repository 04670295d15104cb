"""A large file as one recording, block by block, so that memory does not grow with the file.

Its numbers go to a scratch file beside the store, once; scales and store are then made from that file. It serves
a recording that is written down as it stands. One that is grouped, resampled, filled, cut at gaps or wrong somewhere is
read as a whole, which also reports what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from flatout.data.sequences.columns import Floats, are_dates, read_numbers, read_seconds
from flatout.data.sequences.recordings import ReadingNotes, RecordingRules
from flatout.data.store.store import written
from flatout.data.tables.formats.file import FileTable
from flatout.data.tables.table import Table

LEAST_BYTES = 1 << 24
"""Smaller files are read as a whole: a copy on disk would cost more than it saves."""
_BYTES_A_NUMBER = 8


@dataclass(frozen=True, slots=True)
class ScratchValues:
    """`[samples, columns]` float64 in a file; a slice of rows is read when it is asked for."""

    path: Path
    shape: tuple[int, int]
    width: int
    """Columns of the file; the first ones are these."""

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Floats:
        start, stop, _ = rows.indices(len(self))
        width, count = self.width, max(0, stop - start)
        with self.path.open("rb") as file:
            file.seek(start * width * _BYTES_A_NUMBER)
            return np.fromfile(file, np.float64, count * width).reshape(count, width)[:, : self.shape[1]]


@dataclass(frozen=True, slots=True)
class ScratchTimes:
    """`[samples]` seconds: the last column of a scratch file that holds them."""

    path: Path
    samples: int
    width: int

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, rows: slice) -> Floats:
        return ScratchValues(self.path, (self.samples, self.width), self.width)[rows][:, -1]


@dataclass(frozen=True, slots=True)
class LongRecording:
    """One run of samples that are not in memory."""

    name: str
    part: str
    values: ScratchValues
    step: float | None
    """Median seconds between two samples; None without a column of times."""
    times: ScratchTimes
    """Where the scratch keeps them."""
    is_dated: bool = False
    """Whether times were dates, and count from 1970."""
    label: None = None


class Scratch:
    """The scratch files of the large files of one preparation."""

    def __init__(self, folder: Path, rules: RecordingRules, *, keeps_times: bool = False) -> None:
        self.folder, self.rules, self.keeps_times = folder, rules, keeps_times
        self._found: dict[str, LongRecording | None] = {}

    def read(self, file: Table, notes: ReadingNotes) -> LongRecording | None:
        """A large file as a recording; None where it has to be read as a whole."""
        if not self.rules.are_plain or not isinstance(file, FileTable) or file.path.stat().st_size < LEAST_BYTES:
            return None
        if file.name not in self._found:
            self._found[file.name] = self._copy(file, self.folder / f"{len(self._found)}.float64")
        found = self._found[file.name]
        if found is not None and found.step is not None:
            notes.steps.append(found.step)
        elif found is not None:
            notes.steps.append(1.0)
        return found

    def _copy(self, file: FileTable, path: Path) -> LongRecording | None:
        """Write the numbers of a file to the scratch file; None where a value is missing or a time does not rise."""
        rules, samples, steps, last, is_dated = self.rules, 0, [], None, False
        names = list(dict.fromkeys([*rules.columns, *filter(None, [rules.time])]))
        with written():
            output = path.open("wb")
        with output:
            for block in file.blocks(names):
                values, times = self._numbers(file, block, samples)
                is_dated = is_dated or (rules.time is not None and are_dates(block.column(rules.time).slice(0, 1)))
                apart = np.diff(times if last is None else np.append(last, times))
                if np.isnan(values).any() or (apart <= 0).any():
                    path.unlink()
                    return None
                steps += [float(np.median(apart))] if len(apart) else []
                last, samples = times[-1:], samples + len(values)
                kept = np.column_stack([values, times]) if self.keeps_times else values
                with written():
                    output.write(np.ascontiguousarray(kept).data)
        if samples < 2:
            return None
        step = None if rules.time is None else float(np.median(steps))
        width = len(rules.columns) + self.keeps_times
        written_values = ScratchValues(path, (samples, len(rules.columns)), width)
        return LongRecording(file.name, file.name, written_values, step, ScratchTimes(path, samples, width), is_dated)

    def _numbers(self, file: FileTable, block: pa.RecordBatch, first: int) -> tuple[Floats, Floats]:
        """The values and the times of a block."""
        name, columns = self.rules.time, self.rules.columns
        values = np.stack([read_numbers(block.column(each), each, file, first) for each in columns], axis=1)
        if name is None:
            return values, np.arange(first, first + len(values), dtype=np.float64)
        return values, read_seconds(block.column(name), name, file, first)


def blocks_of(values: Floats | ScratchValues, rows: int, first: int = 0, stop: int | None = None) -> Iterator[Floats]:
    """Samples from `first` to before `stop`, so many at a time."""
    end = len(values) if stop is None else stop
    for at in range(first, end, rows):
        yield values[at : min(at + rows, end)]
