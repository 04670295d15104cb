"""Large files of recordings as scratch files of numbers, of which a block at a time is in memory.

A file that needs no rule (no group, label, step, gap or integral) is copied once. The scales, the
store and answers are then read off the copy. Any other file is read as a whole. Open this file to
change which files are copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from flatout.data.sequences.columns import Floats, RecordingRules, read_blocks
from flatout.data.sequences.recording import Recording
from flatout.data.store.store import written
from flatout.data.tables.formats.file import FileTable
from flatout.data.tables.table import Table

if TYPE_CHECKING:
    from flatout.data.sequences.recordings import ReadingNotes

# Smaller files are read as a whole: a copy on disk would cost more than it saves.
LEAST_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class ScratchValues:
    """Columns of a file of float64 `[samples, width]`; `[first:stop]` reads these rows only."""

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
        offset = start * width * np.float64().itemsize
        numbers = np.fromfile(self.path, np.float64, count * width, offset=offset)
        return numbers.reshape(count, width)[:, self.columns]


class Scratch:
    """Scratch files of numbers for the large files of a source; memory does not grow with a file.

    A file is copied once, and then read from there twice: for the scales and for the store. Only a
    recording that needs no rule can be copied. Any other one is read as a whole, which also reports
    what is wrong with it.
    """

    def __init__(self, folder: Path, rules: RecordingRules, *, keeps_times: bool = False) -> None:
        """Scratch files go to `folder`; with `keeps_times` they have a last column of times."""
        self.folder = folder
        self.rules = rules
        self.keeps_times = keeps_times
        self._recordings: dict[str, Recording | None] = {}

    def read(self, file: Table, notes: ReadingNotes) -> Recording | None:
        """A large file as a recording; None if it has to be read as a whole."""
        rules = self.rules
        is_changed = rules.group or rules.label or rules.step or rules.max_gap or rules.cumulate
        if is_changed or not isinstance(file, FileTable) or file.path.stat().st_size < LEAST_BYTES:
            return None
        if file.name not in self._recordings:
            path = self.folder / f"{len(self._recordings)}.float64"
            self._recordings[file.name] = self._copy(file, path)
        recording = self._recordings[file.name]
        if recording is not None:
            notes.look_at_steps(file.name, recording.longest_s, recording.step)
        return recording

    def _copy(self, file: FileTable, path: Path) -> Recording | None:
        """Write the numbers of a file to the scratch file.

        None if a value is missing, a time does not rise, or there are fewer than two samples.
        """
        rules = self.rules
        samples = 0
        steps = []
        last = None
        dates: pa.DataType | None = None
        longest_s = 0.0
        with written():
            output = path.open("wb")
        with output:
            for _, values, times, block_dates in read_blocks(file, rules):
                dates = dates or block_dates
                # The last time of the block before belongs to the first step of this one.
                block_steps = np.diff(times if last is None else np.append(last, times))
                if np.isnan(values).any() or (block_steps <= 0).any():
                    path.unlink()
                    return None
                if len(block_steps):
                    steps.append(float(np.median(block_steps)))
                longest_s = max(longest_s, float(block_steps.max(initial=0.0)))
                last = times[-1:]
                samples += len(values)
                numbers = np.column_stack([values, times]) if self.keeps_times else values
                with written():
                    output.write(np.ascontiguousarray(numbers).data)
        if samples < 2:
            return None
        columns = len(rules.columns)
        width = columns + self.keeps_times
        return Recording(
            name=file.name,
            part=file.name,
            values=ScratchValues(path, samples, width, slice(columns)),
            times=ScratchValues(path, samples, width, -1),
            rows=np.empty(0, np.int64),
            longest_s=longest_s if rules.time is not None else 0.0,
            step=float(np.median(steps)),
            dates=dates,
        )


def blocks_of(
    values: Floats | ScratchValues, rows: int, first: int = 0, stop: int | None = None
) -> Iterator[Floats]:
    """Samples from `first` to before `stop`, `rows` at a time."""
    end = len(values) if stop is None else stop
    for at in range(first, end, rows):
        yield values[at : min(at + rows, end)]
