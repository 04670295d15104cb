"""Recordings of different splits that share samples, though they are not equal: one file is a part of the other.

Runs of eight samples get a hash, and one run in sixteen is kept, chosen by its hash. So a run that stands in two
recordings is kept in both or in neither. A sample costs half a byte. A flat signal has one run, which counts once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flatout.data.sequences.columns import Floats

_SAMPLES_A_RUN, _KEPT = 8, np.uint64(16)
_LEAST_RUNS, _LEAST_SHARE = 4, 0.5
_FACTOR, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)


@dataclass(frozen=True, slots=True)
class Overlap:
    """A recording whose samples stand in another one as well."""

    recording: int
    other: int
    share: float
    """Of its runs of samples."""


class Overlaps:
    """Keeps runs of each recording, then compares those of different splits."""

    def __init__(self) -> None:
        self._runs: list[NDArray[np.uint64]] = []

    def begin(self) -> None:
        """A recording is next."""
        self._runs.append(np.empty(0, np.uint64))

    def add(self, values: Floats) -> None:
        """Take in a block of the recording `[samples, columns]`; runs across two blocks are left out."""
        self._runs[-1] = np.union1d(self._runs[-1], _runs_of(values))

    def find(self, splits: list[int]) -> list[Overlap]:
        """Recordings that share most of their runs with one recording of an earlier split; `splits` by recording."""
        found: list[Overlap] = []
        for split in sorted(set(splits))[1:]:
            before = [number for number, each in enumerate(splits) if each < split and len(self._runs[number])]
            if not before:
                continue
            runs = np.concatenate([self._runs[number] for number in before])
            owners = np.repeat(before, [len(self._runs[number]) for number in before])
            for number in (number for number, each in enumerate(splits) if each == split):
                own = self._runs[number]
                shared = owners[np.isin(runs, own)]
                if len(own) < _LEAST_RUNS or not len(shared):
                    continue
                other = int(np.bincount(shared).argmax())
                share = int((shared == other).sum()) / len(own)
                if share >= _LEAST_SHARE:
                    found.append(Overlap(number, other, share))
        return found


def _runs_of(values: Floats) -> NDArray[np.uint64]:
    """Hashes of the runs that are kept."""
    if len(values) < _SAMPLES_A_RUN:
        return np.empty(0, np.uint64)
    rows = np.zeros(len(values), np.uint64)
    for column in values.T:  # unsigned numbers wrap around, as a hash should
        rows = _mix(rows ^ np.ascontiguousarray(column).view(np.uint64))
    runs = np.zeros(len(values) - _SAMPLES_A_RUN + 1, np.uint64)
    for place in range(_SAMPLES_A_RUN):
        runs = _mix(runs ^ rows[place : place + len(runs)])
    kept: NDArray[np.uint64] = np.unique(runs[runs % _KEPT == 0])
    return kept


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed: NDArray[np.uint64] = (numbers ^ (numbers >> _SHIFT)) * _FACTOR
    return mixed ^ (mixed >> _SHIFT)
