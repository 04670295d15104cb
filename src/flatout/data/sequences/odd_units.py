"""Find recordings that may hold a column in another unit than the others do.

Each half of a recording is compared with the median recording: a logger may change its unit in the
middle of a file. A column is suspected where it is ten times as large, or where its mean is many
spreads away. Shapes: R recordings, H their two halves, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flatout.data.checks.findings import counted, name_few
from flatout.data.sequences.columns import Floats

if TYPE_CHECKING:
    from flatout.data.sequences.splitting import RecordingEntry

_LEAST_RECORDINGS = 3  # of fewer the median says nothing
_TIMES = 10.0  # the usual root mean square; metres for centimetres are 100 times off
_SPREADS = 3.0  # from the usual mean: degrees Fahrenheit for Celsius are far off
_SIGMAS = 1.4826  # a normal distribution's deviation, in median distances from its median


def describe_odd_units(columns: Sequence[str], recordings: Sequence[RecordingEntry]) -> list[str]:
    """A line for each column that some recordings seem to hold in another unit."""
    if len(recordings) < _LEAST_RECORDINGS:
        return []
    halves = [half for recording in recordings for half in recording.halves]
    shape = (len(recordings), 2, len(columns))
    mean_RHC = np.array([half.mean for half in halves]).reshape(shape)
    variance_RHC = np.array([half.squares / half.count for half in halves]).reshape(shape)
    is_odd_RHC = _find_odd(mean_RHC, variance_RHC)
    usual_C = np.median(mean_RHC, axis=(0, 1))
    lines = []
    for number in np.flatnonzero(is_odd_RHC.any(axis=(0, 1))).tolist():
        mean_RH = mean_RHC[:, :, number]
        is_odd_RH = is_odd_RHC[:, :, number]
        odd = np.flatnonzero(is_odd_RH.any(axis=1)).tolist()
        named = [_name(recordings[row], mean_RH[row], is_odd_RH[row]) for row in odd]
        lines.append(
            f"{columns[number]} of {counted(len(odd), 'recording')} lies elsewhere than in the"
            f" median recording (mean {usual_C[number]:.4g}): {name_few(named)}; is it in another"
            " unit?"
        )
    return lines


def _find_odd(mean_RHC: Floats, variance_RHC: Floats) -> NDArray[np.bool_]:
    """Whether each half of each recording seems to be in another unit, by column."""
    # Means 20, 21 and 70 (Fahrenheit) with spreads of 2: the usual mean is 21, the distances are 1,
    # 0 and 49, so recordings lie about 1.5 apart. 49 is more than 3 * (2 + 1.5): the third is odd.
    # Values that no scale can hold are refused by name elsewhere.
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
