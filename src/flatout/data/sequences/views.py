"""Make the rows that a network reads: whole recordings, windows or chunks of a store's samples.

The store has each sample once; a row is only a place and a length in it. `Cut` computes the places
from the segments of a split. `Views` computes them when they are first read, so that a store of any
size opens at once. Open this file to add a way to cut recordings into rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flatout.data.checks.findings import counted, name_few
from flatout.data.sequences.settings import SequenceDataConfig, SequenceProblem
from flatout.data.store.store import Array, Ragged, Store, StoreSplit
from flatout.data.tables.splits import SPLITS
from flatout.errors import require

# Splits of the store on disk: all samples, and which of them train, validate and test.
RECORDINGS = "recordings"
SEGMENTS = "segments"
# A column of `RECORDINGS`, where values were filled or resampled: whether each target was measured.
MEASURED = "measured"
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segments:
    """Samples of one split: absolute places in the store."""

    start: Places  # where each segment's recording begins: a window may read from here on
    first: Places  # the first sample that has an answer here
    stop: Places
    recording: Places

    @classmethod
    def of_one(cls, samples: int) -> Segments:
        """A whole recording."""
        zero = np.zeros(1, np.int64)
        return cls(zero, zero, np.array([samples]), zero)


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Where rows begin, how long they are, and of which recording they are."""

    start: Places
    length: NDArray[np.int32]
    recording: NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Cut:
    """How segments become rows: windows, forecasts or chunks.

    Each segment is a row where nothing is set.
    """

    lookback: int | None = None  # samples of a window
    # samples of a forecast behind its window; 0: the window's last sample is answered
    horizon: int = 0
    chunk: int | None = None  # samples of a chunk
    stride: int = 1  # samples between two windows

    def count(self, segments: Segments) -> int:
        """Rows that `rows` makes, without making them."""
        return int(self._spans(segments)[1].sum())

    def rows(self, segments: Segments) -> RowPlaces:
        """The rows of all segments, segment after segment.

        An estimate's first windows are shorter than `lookback`: nothing was measured before. A
        forecast's windows are all whole. Of chunks the last may be shorter.
        """
        # One recording of samples 10 to 14, lookback 3 and stride 2: windows end at 10, 12 and 14,
        # so they would start at 8, 10 and 12. The first is cut: start 10 10 12, length 1 3 3.
        first, counts, step, size = self._spans(segments)
        start = np.empty(int(counts.sum()), np.int64)
        length = np.empty(len(start), np.int32)
        end = 0
        for number, count in enumerate(counts.tolist()):
            rows = slice(end, end + count)
            start[rows] = np.arange(count) * step + first[number]
            stops = np.minimum(start[rows] + size, segments.stop[number])
            np.maximum(start[rows], segments.start[number], out=start[rows])
            length[rows] = stops - start[rows]
            end += count
        return RowPlaces(start, length, np.repeat(segments.recording.astype(np.int32), counts))

    def _spans(self, segments: Segments) -> tuple[Places, Places, int, int]:
        """Where the first row of each segment begins, and how many it has.

        The last two are the samples between the starts of two rows, and those of a row.
        """
        if self.lookback is None:
            first = segments.first
            stop = segments.stop
            size = self.chunk or int((stop - first).max(initial=1))
            step = size
        else:  # a window may begin before its recording, and is then cut there
            size = self.lookback + self.horizon
            step = self.stride
            first = segments.first - self.lookback
            stop = segments.stop - size + 1
            first = np.maximum(first, segments.start) if self.horizon else first + 1
        # divided by `step` and rounded up
        counts = np.maximum(0, -(-(stop - first) // step))
        return first, counts, step, size


@dataclass(eq=False)
class Views(StoreSplit):
    """Rows of a split; their places are computed when they are first read."""

    name: str
    cut: Cut
    segments: Segments
    samples: Array
    targets: Array | None  # the label of each recording
    measured: Array | None = None  # `[samples, K]` whether each target was; None: all were

    def __post_init__(self) -> None:
        self.num_rows = self.cut.count(self.segments)

    @cached_property
    def columns(self) -> dict[str, Array | Ragged]:
        rows = self.cut.rows(self.segments)
        tokens = Ragged(self.samples, rows.start, rows.length)
        recording = rows.recording.astype(np.int32, copy=False)
        columns: dict[str, Array | Ragged] = {"tokens": tokens, "recording": recording}
        if self.targets is not None:
            columns["targets"] = self.targets
        if self.measured is not None:
            columns["targets"] = Ragged(self.measured, rows.start, rows.length)
        return columns

    @property
    def num_bytes(self) -> int:
        of_measured = 0 if self.measured is None else self.measured.nbytes
        of_rows = self.num_rows * (8 + 4 + 4)  # of a row's place, length and recording
        return self.samples.nbytes + of_measured + of_rows


def open_views(store: Store, config: SequenceDataConfig) -> tuple[dict[str, Segments], list[str]]:
    """Replace the store's splits by the rows that the settings ask for.

    Returns the segments of each split, and warnings about short recordings.
    """
    recordings = store.splits.pop(RECORDINGS)
    segments_on_disk = store.splits.pop(SEGMENTS)
    ragged = recordings.ragged("values")
    width = len(store.facts["columns"])
    values = ragged.values.reshape(-1, width)
    starts = ragged.offsets // width
    all_segments = {}
    notes = []
    measured = None
    if store.facts.get("repeated"):
        measured = recordings.ragged(MEASURED).values.reshape(-1, len(config.targets))
    for split in [name for name in SPLITS if name in store.facts["splits"]]:
        is_of_split = segments_on_disk.fixed("split") == SPLITS.index(split)
        recording = segments_on_disk.fixed("recording")[is_of_split]
        begin = starts[recording]
        # On disk they count from the recording's first sample, here from that of the store.
        first = begin + segments_on_disk.fixed("first")[is_of_split]
        stop = begin + segments_on_disk.fixed("stop")[is_of_split]
        segments = Segments(begin, first, stop, recording)
        all_segments[split] = segments
        targets = None
        if config.problem is SequenceProblem.label:
            targets = recordings.fixed("label")[recording]
            if store.facts["classes"]:
                targets = targets.astype(np.int64)
        views = Views(split, _cut(config, split), segments, values, targets, measured)
        store.splits[split] = views
        names = [store.facts["recordings"][number] for number in recording.tolist()]
        _require_length(config, split, views.num_rows, names, segments)
        notes += _describe_short(config, split, names, stop - begin)
    return all_segments, notes


def _cut(config: SequenceDataConfig, split: str) -> Cut:
    horizon = config.horizon if config.problem is SequenceProblem.forecast else 0
    return Cut(config.lookback, horizon, config.chunk, config.stride if split == "train" else 1)


def require_rows(
    config: SequenceDataConfig, split: str, spans: list[tuple[int, int]], names: list[str]
) -> None:
    """Check that the segments of a split are long enough, before there is a store.

    `spans` has the first sample and the end of each, `names` the name of its recording.
    """
    first, stop = np.array(spans).T
    places = Segments(np.zeros_like(first), first, stop, np.arange(len(first)))
    _require_length(config, split, _cut(config, split).count(places), names, places)


def _describe_short(
    config: SequenceDataConfig, split: str, names: list[str], samples: NDArray[np.int64]
) -> list[str]:
    """A warning where recordings are shorter than a window; `samples` before each segment's end."""
    needed, keys = _needed(config)
    short = np.flatnonzero(samples < needed)
    if not len(short) or config.lookback is None:
        return []
    named = name_few([f"{names[place]} ({samples[place]:,})" for place in short])
    how = "left out" if config.problem is SequenceProblem.forecast else "read in shorter windows"
    what = f"{counted(len(short), 'recording')} shorter than the {needed:,} samples of {keys} {how}"
    return [f"warning {split}: {what}: {named}"]


def _needed(config: SequenceDataConfig) -> tuple[int, str]:
    """Samples of a window and its forecast, and the settings that make them."""
    lookback = config.lookback or 1
    keys = f"data.lookback={config.lookback}"
    if config.problem is SequenceProblem.forecast:
        return lookback + config.horizon, f"{keys} and data.horizon={config.horizon}"
    return lookback, keys


def _require_length(
    config: SequenceDataConfig, split: str, rows: int, names: list[str], segments: Segments
) -> None:
    """Refuse a split whose longest recording, or longest segment, is too short for a row."""
    needed, keys = _needed(config)
    samples = segments.stop - segments.start
    longest = int(samples.argmax())
    hint = "Lower the number, or name longer recordings."
    require(
        bool(samples[longest] >= needed),
        keys,
        f"{needed:,} samples are needed, the longest {split} recording has {samples[longest]:,}"
        f" ({names[longest]})",
        hint=hint,
    )
    longest_part = int((segments.stop - segments.first).max())
    require(
        rows > 0,
        "data.horizon",
        f"no forecast of {config.horizon} samples fits the {split} samples of a recording, at most"
        f" {longest_part}",
        hint=hint,
    )
