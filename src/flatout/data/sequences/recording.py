"""One recording: its samples and times, its names, and which of its values were measured."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One run of samples."""

    name: str  # of its file and its group
    part: str  # what splits keep together: its file, or the first column of its group
    values: Any  # [samples, columns] float64; of a large file `ScratchValues`
    times: Any  # [samples] seconds; numbers from 0 where there is no column of times
    # [samples] rows in their file, from 0. A resampled one has the row at or before it; a large
    # file has none.
    rows: NDArray[np.int64]
    step: float = 1.0  # median seconds between two samples, as they were written
    longest_s: float = 0.0  # of a large file with times: the most seconds between two samples
    label: str | None = None
    whole: str = ""  # of a recording with a group: its name before gaps part it
    # the type that `times` are written in if they were dates, and count from 1970
    dates: pa.DataType | None = None
    group: dict[str, object] = field(default_factory=dict)  # its values in the columns of groups
    # [samples, columns] False where a value repeats one that was measured before; None where all
    # were measured.
    measured: NDArray[np.bool_] | None = None

    def take(self, chosen: slice | NDArray[np.int64]) -> Recording:
        """The recording with some of its samples."""
        return replace(
            self,
            values=self.values[chosen],
            times=self.times[chosen],
            rows=self.rows[chosen],
            measured=None if self.measured is None else self.measured[chosen],
        )


def measured_columns(recording: Recording) -> NDArray[np.bool_]:
    """`[samples, columns]`, read only: whether each value was measured, and repeats none before."""
    if recording.measured is None:
        return np.broadcast_to(np.True_, recording.values.shape)
    return recording.measured


def measured_targets(recording: Recording, targets: int) -> NDArray[np.bool_]:
    """`measured_columns` of the targets, which are the last columns."""
    return measured_columns(recording)[:, -targets:].copy()
