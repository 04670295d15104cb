"""Recordings that may be in another unit than the others: each one's halves are compared with the
median recording.

A column is suspected where it is ten times as large, or where its mean is many spreads away. Half a
recording is compared by itself, since a logger may change its unit in the middle of a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flatout.data.checks.findings import counted
from flatout.data.sequences.columns import Floats

if TYPE_CHECKING:
    from flatout.data.sequences.splitting import RecordingEntry

_LEAST_RECORDINGS = 3  # of fewer the median says nothing
_TIMES = 10.0
_SPREADS = 3.0
_SIGMAS = 1.4826  # a normal distribution's deviation, in median distances from its median
_SHOWN = 3


def describe_odd_units(columns: Sequence[str], recordings: Sequence[RecordingEntry]) -> list[str]:
    """A line for each column that some recordings seem to hold in another unit than the median
    recording.
    """
    recordings = [recording for recording in recordings if recording.halves]
    if len(recordings) < _LEAST_RECORDINGS:
        return []
    mean_RHC = np.stack([[half["mean"] for half in recording.halves] for recording in recordings])
    variance_RHC = np.stack(
        [[half["squares"] / half["count"] for half in recording.halves] for recording in recordings]
    )
    is_odd_RHC = _find_odd(mean_RHC, variance_RHC)
    usual_C = np.median(mean_RHC, axis=(0, 1))
    lines = []
    for number in np.flatnonzero(is_odd_RHC.any(axis=(0, 1))).tolist():
        places = np.flatnonzero(is_odd_RHC[:, :, number].any(axis=1)).tolist()
        named = [
            _name(recordings[place], mean_RHC[place, :, number], is_odd_RHC[place, :, number])
            for place in places
        ]
        listed = f"{', '.join(named[:_SHOWN])}{', …' if len(named) > _SHOWN else ''}"
        what = f"of {counted(len(places), 'recording')} lies elsewhere than in the median recording"
        lines.append(
            f"{columns[number]} {what} (mean {usual_C[number]:.4g}): {listed}; is it in another"
            " unit?"
        )
    return lines


def _find_odd(mean_RHC: Floats, variance_RHC: Floats) -> NDArray[np.bool_]:
    """Whether each half of each recording seems to be in another unit, by column."""
    # values that no scale can hold are refused by name
    with np.errstate(over="ignore", invalid="ignore"):
        size_RHC = np.sqrt(mean_RHC**2 + variance_RHC)
        usual_size_C = np.median(size_RHC, axis=(0, 1))
        usual_C = np.median(mean_RHC, axis=(0, 1))
        within_C = np.median(np.sqrt(variance_RHC), axis=(0, 1))
        distance_RHC = np.abs(mean_RHC - usual_C)
        between_C = _SIGMAS * np.median(distance_RHC, axis=(0, 1))
        is_large = (usual_size_C > 0) & (size_RHC > _TIMES * usual_size_C)
        # A column that is constant within recordings, such as a setting of each, may well differ
        # between them.
        is_far = (within_C > 0) & (distance_RHC > _SPREADS * (within_C + between_C))
    return is_large | is_far


def _name(recording: RecordingEntry, mean_H: Floats, is_odd_H: NDArray[np.bool_]) -> str:
    """A recording, which half of it is odd unless both are, and the mean there."""
    if is_odd_H.all():
        return f"{recording.name} ({mean_H.mean():.4g})"
    half = int(is_odd_H.argmax())
    return f"{recording.name} ({('first', 'second')[half]} half: {mean_H[half]:.4g})"
