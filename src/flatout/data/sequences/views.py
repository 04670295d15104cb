"""Rows of the store as a network reads them: whole recordings, windows or chunks, each an index into the samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flatout.data.checks.findings import counted
from flatout.data.sequences.settings import SequenceDataConfig, SequenceProblem
from flatout.data.store.store import Array, Ragged, Store, StoreSplit
from flatout.data.tables.splits import SPLITS
from flatout.errors import require

if TYPE_CHECKING:
    from flatout.data.sequences.splitting import Segment

RECORDINGS, SEGMENTS = "recordings", "segments"
"""Splits of the store on disk: the samples, and which of them belong to training, validation and test."""
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
class RowPlaces:
    """Where rows begin, how long they are, and of which recording they are."""

    start: Places
    length: NDArray[np.int32]
    recording: NDArray[np.integer]

    def slice(self, start: int, stop: int | None) -> RowPlaces:
        rows = slice(start, stop)
        return RowPlaces(self.start[rows], self.length[rows], self.recording[rows])


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

    def rows(self, segments: Segments) -> RowPlaces:
        """Where each row begins, its length and its recording."""
        if self.lookback is not None and self.horizon:
            return forecast_windows(segments, self.lookback, self.horizon, self.stride)
        if self.lookback is not None:
            return estimate_windows(segments, self.lookback, self.stride)
        if self.chunk is not None:
            return chunks(segments, self.chunk)
        return RowPlaces(segments.first, (segments.stop - segments.first).astype(np.int32), segments.recording)


def estimate_windows(segments: Segments, lookback: int, stride: int = 1) -> RowPlaces:
    """Windows that end at every `stride`-th sample; the first ones of a recording are shorter."""
    start, counts = _every(segments.first - lookback + 1, segments.stop - lookback + 1, stride)
    length = np.full(len(start), lookback, np.int32)
    begin = np.cumsum(counts) - counts
    for number in np.flatnonzero(segments.first - lookback + 1 < segments.start):
        head = slice(begin[number], begin[number] + min(counts[number], -(-(lookback - 1) // stride)))
        before = np.maximum(segments.start[number] - start[head], 0)
        start[head] += before
        length[head] -= before.astype(np.int32)
    return RowPlaces(start, length, _of_rows(segments, counts))


def forecast_windows(segments: Segments, lookback: int, horizon: int, stride: int = 1) -> RowPlaces:
    """Windows of `lookback` samples with the `horizon` samples behind them, which all have their answers here."""
    earliest = np.maximum(segments.first, segments.start + lookback)
    start, counts = _every(earliest - lookback, segments.stop - horizon + 1 - lookback, stride)
    length = np.broadcast_to(np.int32(lookback + horizon), len(start))
    return RowPlaces(start, length, _of_rows(segments, counts))


def chunks(segments: Segments, size: int) -> RowPlaces:
    """Runs of `size` samples one after the other; the last of a recording is shorter."""
    start, counts = _every(segments.first, segments.stop, size)
    length = np.minimum(size, np.repeat(segments.stop, counts) - start).astype(np.int32)
    return RowPlaces(start, length, _of_rows(segments, counts))


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


_BYTES_A_ROW = 8 + 4 + 4
"""Of its place, its length and its recording."""
_NAMED = 3


class Views(StoreSplit):
    """Rows of a split, whose places are computed when they are first read: opening takes no time at any size."""

    def __init__(self, name: str, num_rows: int, samples: Array, make: Callable[[], dict[str, Array | Ragged]]) -> None:
        self.name, self.num_rows, self._samples, self._make = name, num_rows, samples, make

    @cached_property
    def columns(self) -> dict[str, Array | Ragged]:
        return self._make()

    @property
    def num_bytes(self) -> int:
        return self._samples.nbytes + self.num_rows * _BYTES_A_ROW


def open_views(store: Store, config: SequenceDataConfig) -> tuple[dict[str, Segments], list[str]]:
    """Put the rows that the settings ask for into the store's splits; the samples of each split, and what was found."""
    recordings, places = store.splits.pop(RECORDINGS), store.splits.pop(SEGMENTS)
    ragged, width = recordings.ragged("values"), len(store.facts["columns"])
    values, starts = ragged.values.reshape(-1, width), ragged.offsets // width
    splits, found, notes = places.fixed("split"), {}, []
    for number, split in enumerate(SPLITS):
        if split not in store.facts["splits"]:
            continue
        chosen = splits == number
        recording = places.fixed("recording")[chosen]
        begin = starts[recording]
        first, stop = (begin + places.fixed(name)[chosen] for name in ("first", "stop"))
        segments = found[split] = Segments(begin, first, stop, recording)
        cut = _cut(config, split)
        num_rows, names = cut.count(segments), [store.facts["recordings"][number] for number in recording.tolist()]
        _require_long_enough(config, split, num_rows, names, segments)
        notes += _describe_short(config, split, names, stop - begin)
        targets = None
        if config.problem is SequenceProblem.label:
            targets = recordings.fixed("label")[recording]
            targets = targets.astype(np.int64) if store.facts["classes"] else targets
        store.splits[split] = Views(split, num_rows, values, partial(_columns, cut, segments, values, targets))
    return found, notes


def _cut(config: SequenceDataConfig, split: str) -> Cut:
    """How the segments of a split become rows; all but training read every window."""
    horizon = config.horizon if config.problem is SequenceProblem.forecast else 0
    return Cut(config.lookback, horizon, config.chunk, config.stride if split == "train" else 1)


def _columns(cut: Cut, segments: Segments, values: Array, targets: Array | None) -> dict[str, Array | Ragged]:
    rows = cut.rows(segments)
    columns: dict[str, Array | Ragged] = {
        "tokens": Ragged(values, rows.start, rows.length),
        "recording": rows.recording.astype(np.int32, copy=False),
    }
    return columns if targets is None else columns | {"targets": targets}


def require_rows(config: SequenceDataConfig, split: str, segments: Sequence[Segment], names: list[str]) -> None:
    """Check that the segments of a split are long enough, before there is a store."""
    first, stop = (np.array([getattr(each, name) for each in segments]) for name in ("first", "stop"))
    places = Segments(np.zeros_like(first), first, stop, np.arange(len(first)))
    _require_long_enough(config, split, _cut(config, split).count(places), names, places)


def _describe_short(config: SequenceDataConfig, split: str, names: list[str], samples: NDArray[np.int64]) -> list[str]:
    """A line where recordings of a split are shorter than a window."""
    needed, keys = _needed(config)
    short = np.flatnonzero(samples < needed)
    if not len(short) or config.lookback is None:
        return []
    listed = ", ".join(f"{names[place]} ({samples[place]:,})" for place in short[:_NAMED])
    listed += ", …" if len(short) > _NAMED else ""
    how = "left out" if config.problem is SequenceProblem.forecast else "read in shorter windows"
    what = f"{counted(len(short), 'recording')} shorter than the {needed:,} samples of {keys} {how}"
    return [f"warning {split}: {what}: {listed}"]


def _needed(config: SequenceDataConfig) -> tuple[int, str]:
    """Samples of a window and its forecast, and the settings that make them."""
    if config.problem is SequenceProblem.forecast:
        return (
            config.lookback or 1
        ) + config.horizon, f"data.lookback={config.lookback} and data.horizon={config.horizon}"
    return config.lookback or 1, f"data.lookback={config.lookback}"


def _require_long_enough(
    config: SequenceDataConfig, split: str, rows: int, names: list[str], segments: Segments
) -> None:
    """A split needs a row, and a recording at least as long as the window."""
    (needed, keys), samples = _needed(config), segments.stop - segments.start
    longest = int(samples.argmax())
    what = f"{needed:,} samples are needed, the longest {split} recording has {samples[longest]:,} ({names[longest]})"
    hint = "Lower the number, or name longer recordings."
    require(bool(samples[longest] >= needed), keys, what, hint=hint)
    own = int((segments.stop - segments.first).max())
    what = f"no forecast of {config.horizon} samples fits the {split} samples of a recording, at most {own}"
    require(rows > 0, "data.horizon", what, hint=hint)
