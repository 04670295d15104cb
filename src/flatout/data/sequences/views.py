"""Rows of the store as a network reads them: whole recordings, windows or chunks, each an index
into the samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flatout.data.checks.findings import counted
from flatout.data.sequences.settings import SequenceDataConfig, SequenceProblem
from flatout.data.store.store import Array, Ragged, Store, StoreSplit
from flatout.data.tables.splits import SPLITS
from flatout.errors import require

RECORDINGS = "recordings"
SEGMENTS = "segments"
MEASURED = "measured"
"""Splits of the store on disk: the samples, and which of them belong to training, validation and
test; and the column that says of each target whether it was measured then, in stores whose values
were filled or resampled."""
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
    """How segments become rows: windows, forecasts or chunks; each segment is a row where nothing
    is set.
    """

    lookback: int | None = None
    # samples of a forecast behind its window; 0: the window's last sample is answered
    horizon: int = 0
    chunk: int | None = None
    stride: int = 1

    def count(self, segments: Segments) -> int:
        """Rows that `rows` makes, without making them."""
        return int(self._spans(segments)[1].sum())

    def rows(self, segments: Segments) -> RowPlaces:
        """Windows: of estimates at every `stride`-th sample, the first shorter; of forecasts whole;
        of chunks all.
        """
        first, counts, step, size = self._spans(segments)
        start, length = np.empty(int(counts.sum()), np.int64), np.empty(int(counts.sum()), np.int32)
        end = 0
        for number, count in enumerate(counts.tolist()):
            own = slice(end, end + count)
            start[own] = np.arange(count) * step + first[number]
            stops = np.minimum(start[own] + size, segments.stop[number])
            np.maximum(start[own], segments.start[number], out=start[own])
            length[own] = stops - start[own]
            end += count
        return RowPlaces(start, length, np.repeat(segments.recording.astype(np.int32), counts))

    def _spans(self, segments: Segments) -> tuple[Places, Places, int, int]:
        """Where the first row of each segment begins, how many it has, samples between two rows,
        and of one.
        """
        if self.lookback is None:
            first, stop = segments.first, segments.stop
            size = self.chunk or int((stop - first).max(initial=1))
            step = size
        else:  # a window may begin before its recording, and is then cut there
            size = self.lookback + self.horizon
            step = self.stride
            first, stop = segments.first - self.lookback, segments.stop - size + 1
            first = np.maximum(first, segments.start) if self.horizon else first + 1
        return first, np.maximum(0, -(-(stop - first) // step)), step, size


class Views(StoreSplit):
    """Rows of a split, whose places are computed when they are first read: opening takes no time at
    any size.
    """

    def __init__(
        self,
        name: str,
        cut: Cut,
        segments: Segments,
        samples: Array,
        targets: Array | None,
        measured: Array | None = None,
    ) -> None:
        """`targets`: the label of each recording; `measured`: of each sample, `[samples, K]`; None:
        all were.
        """
        self.name = name
        self.num_rows = cut.count(segments)
        self._cut = cut
        self._segments = segments
        self._samples = samples
        self._targets = targets
        self._measured = measured

    @cached_property
    def columns(self) -> dict[str, Array | Ragged]:
        rows = self._cut.rows(self._segments)
        tokens = Ragged(self._samples, rows.start, rows.length)
        recording = rows.recording.astype(np.int32, copy=False)
        columns: dict[str, Array | Ragged] = {"tokens": tokens, "recording": recording}
        if self._targets is not None:
            columns["targets"] = self._targets
        if self._measured is not None:
            columns["targets"] = Ragged(self._measured, rows.start, rows.length)
        return columns

    @property
    def num_bytes(self) -> int:
        of_measured = 0 if self._measured is None else self._measured.nbytes
        of_rows = self.num_rows * (8 + 4 + 4)  # of a row's place, length and recording
        return self._samples.nbytes + of_measured + of_rows


def open_views(store: Store, config: SequenceDataConfig) -> tuple[dict[str, Segments], list[str]]:
    """Put the rows that the settings ask for into the store's splits; the samples of each split,
    and what was found.
    """
    recordings, places = store.splits.pop(RECORDINGS), store.splits.pop(SEGMENTS)
    ragged = recordings.ragged("values")
    width = len(store.facts["columns"])
    values = ragged.values.reshape(-1, width)
    starts = ragged.offsets // width
    splits = places.fixed("split")
    found = {}
    notes = []
    measured = None
    if store.facts.get("repeated"):
        measured = recordings.ragged(MEASURED).values.reshape(-1, len(config.targets))
    for split in [each for each in SPLITS if each in store.facts["splits"]]:
        chosen = splits == SPLITS.index(split)
        recording = places.fixed("recording")[chosen]
        begin = starts[recording]
        first, stop = (begin + places.fixed(name)[chosen] for name in ("first", "stop"))
        segments = found[split] = Segments(begin, first, stop, recording)
        targets = (
            recordings.fixed("label")[recording]
            if config.problem is SequenceProblem.label
            else None
        )
        if targets is not None and store.facts["classes"]:
            targets = targets.astype(np.int64)
        views = store.splits[split] = Views(
            split, _cut(config, split), segments, values, targets, measured
        )
        names = [store.facts["recordings"][each] for each in recording.tolist()]
        _require_length(config, split, views.num_rows, names, segments)
        notes += _describe_short(config, split, names, stop - begin)
    return found, notes


def _cut(config: SequenceDataConfig, split: str) -> Cut:
    horizon = config.horizon if config.problem is SequenceProblem.forecast else 0
    return Cut(config.lookback, horizon, config.chunk, config.stride if split == "train" else 1)


def require_rows(
    config: SequenceDataConfig, split: str, spans: list[tuple[int, int]], names: list[str]
) -> None:
    """Check that the segments of a split (first sample, stop) are long enough, before there is a
    store.
    """
    first, stop = np.array(spans).T
    places = Segments(np.zeros_like(first), first, stop, np.arange(len(first)))
    _require_length(config, split, _cut(config, split).count(places), names, places)


def _describe_short(
    config: SequenceDataConfig, split: str, names: list[str], samples: NDArray[np.int64]
) -> list[str]:
    needed, keys = _needed(config)
    short = np.flatnonzero(samples < needed)
    if not len(short) or config.lookback is None:
        return []
    listed = ", ".join(f"{names[place]} ({samples[place]:,})" for place in short[:3])
    how = "left out" if config.problem is SequenceProblem.forecast else "read in shorter windows"
    what = f"{counted(len(short), 'recording')} shorter than the {needed:,} samples of {keys} {how}"
    return [f"warning {split}: {what}: {listed}{', …' if len(short) > 3 else ''}"]


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
    own = int((segments.stop - segments.first).max())
    require(
        rows > 0,
        "data.horizon",
        f"no forecast of {config.horizon} samples fits the {split} samples of a recording, at most"
        f" {own}",
        hint=hint,
    )
