"""Does a file hold a column in another unit than the recordings that a run was trained on?

Each column of the answered recordings is compared with the training samples: where its values lie,
and how large they are. A column in another unit (millivolts instead of volts) is found by both. Its
size differs by a factor, and its values lie where the network has never learned. Open this file to
change what a run warns of when it reads new recordings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from flatout.data.checks.findings import counted, name_few
from flatout.data.sequences.columns import Floats
from flatout.data.sequences.info import ColumnRanges, describe_units


@dataclass(slots=True)
class UnitCheck:
    """Adds up recordings column by column, and compares them with the training samples."""

    columns: list[str]  # that the network reads
    sizes: list[float]  # root mean square of each over the training samples; empty: not known
    ranges: ColumnRanges | None  # of each over the training samples; None: not known
    _squares: Floats = field(default_factory=lambda: np.zeros(()))  # sum of each column
    _samples: int = 0
    _apart: dict[str, list[str]] = field(default_factory=dict)
    """For each column the recordings whose values lie apart from the training samples, with their
    range."""

    def add(self, blocks: Iterable[Floats], name: str) -> None:
        """Add a recording in blocks `[samples, columns]`; further columns do not count."""
        outside = np.zeros(len(self.columns), np.int64)
        samples_before = self._samples

        def read_inputs() -> Iterator[Floats]:
            for block in blocks:
                inputs = block[:, : len(self.columns)]
                self._samples += len(inputs)
                with np.errstate(over="ignore"):
                    self._squares = self._squares + np.square(inputs).sum(axis=0)
                if self.ranges is not None:
                    outside[:] += self.ranges.count_outside(inputs)
                yield inputs

        ranges = ColumnRanges.of(read_inputs())
        if self.ranges is None:
            return
        for number in self.ranges.find_apart(ranges, outside, self._samples - samples_before):
            line = f"{name} ({ranges.least[number]:.4g} to {ranges.most[number]:.4g})"
            self._apart.setdefault(self.columns[number], []).append(line)

    def lines(self) -> list[str]:
        """A warning for each column that may be in another unit, over all recordings."""
        if not self._samples or not self.sizes:
            return []
        ratios = np.sqrt(self._squares / self._samples) / np.maximum(self.sizes, 1e-30)
        lines = []
        for number, column in enumerate(self.columns):
            of_column = describe_units([column], ratios[number : number + 1], self._samples)
            # A column that lies apart is named with its recordings, which says more than its size.
            if column in self._apart and self.ranges is not None:
                size = f" and is {ratios[number]:.3g} times as large" if of_column else ""
                recordings = self._apart[column]
                trained = f"{self.ranges.least[number]:.4g} to {self.ranges.most[number]:.4g}"
                of_column = [
                    f"{column} lies elsewhere than in training ({trained}){size} in"
                    f" {counted(len(recordings), 'recording')}: {name_few(recordings)}; is it in"
                    " another unit?"
                ]
            lines += [f"warning {line}" for line in of_column]
        return lines
