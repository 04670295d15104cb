"""Where rows begin and end among the samples: windows, forecasts and chunks of the recordings of a split.

Rows may overlap, so a window costs sixteen bytes, whatever its lookback, and a sample lies once in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segments:
    """Samples of one split: absolute places in the store."""

    start: Places
    """Where each segment's recording begins: a window may read from here on."""
    first: Places
    """The first sample that has an answer here."""
    stop: Places
    recording: Places


@dataclass(frozen=True, slots=True)
class Rows:
    """Where rows begin, how long they are, and of which recording they are."""

    start: Places
    length: NDArray[np.int32]
    recording: NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Cut:
    """How segments become rows: windows, forecasts or chunks; each segment is a row where nothing is set."""

    lookback: int | None = None
    horizon: int = 0
    """Samples of a forecast behind its window; 0: the window's last sample is answered."""
    chunk: int | None = None
    stride: int = 1

    def count(self, segments: Segments) -> int:
        """Rows that `rows` makes, without making them."""
        if self.lookback is not None and self.horizon:
            first = np.maximum(segments.first, segments.start + self.lookback)
            return int(_counts(first, segments.stop - self.horizon + 1, self.stride).sum())
        step = self.chunk if self.lookback is None else self.stride
        return len(segments.first) if step is None else int(_counts(segments.first, segments.stop, step).sum())

    def rows(self, segments: Segments) -> Rows:
        """Where each row begins, its length and its recording."""
        if self.lookback is not None and self.horizon:
            return forecast_windows(segments, self.lookback, self.horizon, self.stride)
        if self.lookback is not None:
            return estimate_windows(segments, self.lookback, self.stride)
        if self.chunk is not None:
            return chunks(segments, self.chunk)
        return Rows(segments.first, (segments.stop - segments.first).astype(np.int32), segments.recording)


def estimate_windows(segments: Segments, lookback: int, stride: int = 1) -> Rows:
    """Windows that end at every `stride`-th sample; the first ones of a recording are shorter."""
    start, counts = _every(segments.first - lookback + 1, segments.stop - lookback + 1, stride)
    length = np.full(len(start), lookback, np.int32)
    begin = np.cumsum(counts) - counts
    for number in np.flatnonzero(segments.first - lookback + 1 < segments.start):
        head = slice(begin[number], begin[number] + min(counts[number], -(-(lookback - 1) // stride)))
        before = np.maximum(segments.start[number] - start[head], 0)
        start[head] += before
        length[head] -= before.astype(np.int32)
    return Rows(start, length, _of_rows(segments, counts))


def forecast_windows(segments: Segments, lookback: int, horizon: int, stride: int = 1) -> Rows:
    """Windows of `lookback` samples with the `horizon` samples behind them, which all have their answers here."""
    earliest = np.maximum(segments.first, segments.start + lookback)
    start, counts = _every(earliest - lookback, segments.stop - horizon + 1 - lookback, stride)
    length = np.broadcast_to(np.int32(lookback + horizon), len(start))
    return Rows(start, length, _of_rows(segments, counts))


def chunks(segments: Segments, size: int) -> Rows:
    """Runs of `size` samples one after the other; the last of a recording is shorter."""
    start, counts = _every(segments.first, segments.stop, size)
    length = np.minimum(size, np.repeat(segments.stop, counts) - start).astype(np.int32)
    return Rows(start, length, _of_rows(segments, counts))


def _every(first: Places, stop: Places, stride: int) -> tuple[Places, Places]:
    """Every `stride`-th place from `first` to before `stop`, segment after segment, and how many each has."""
    counts = _counts(first, stop, stride)
    places = np.empty(int(counts.sum()), np.int64)
    end = 0
    for begin, count in zip(first.tolist(), counts.tolist(), strict=True):
        places[end : end + count] = np.arange(begin, begin + count * stride, stride)
        end += count
    return places, counts


def _counts(first: Places, stop: Places, stride: int) -> Places:
    counts: Places = np.maximum(0, -(-(stop - first) // stride))
    return counts


def _of_rows(segments: Segments, counts: Places) -> NDArray[np.int32]:
    return np.repeat(segments.recording.astype(np.int32), counts)
