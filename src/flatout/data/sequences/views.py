"""Rows of the store as a network reads them: whole recordings, windows or chunks, each an index into the samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from flatout.data.checks.findings import counted
from flatout.data.sequences.choices import SequenceProblem
from flatout.data.sequences.info import SequenceInfo
from flatout.data.sequences.recordings import RECORDINGS, SEGMENTS
from flatout.data.sequences.settings import SequenceDataConfig
from flatout.data.sequences.splitting import Segment
from flatout.data.sequences.windows import Cut, Segments
from flatout.data.store.store import Array, Ragged, StoreSplit
from flatout.data.tables.splits import SPLITS
from flatout.errors import require

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


def open_views(info: SequenceInfo) -> None:
    """Put the rows that the settings ask for into the store's splits."""
    store = info.store
    recordings, segments = store.splits[RECORDINGS], store.splits[SEGMENTS]
    ragged, width = recordings.ragged("values"), len(info.columns)
    values, starts = ragged.values.reshape(-1, width), ragged.offsets // width
    splits = segments.fixed("split")
    for number, split in enumerate(SPLITS):
        if split not in info.facts["splits"]:
            continue
        chosen = splits == number
        recording = segments.fixed("recording")[chosen]
        begin = starts[recording]
        first, stop = (begin + segments.fixed(name)[chosen] for name in ("first", "stop"))
        info.segments[split] = Segments(begin, first, stop, recording)
        num_rows = _cut(info.config, split).count(info.segments[split])
        names = [info.recording_names[number] for number in recording.tolist()]
        _require_long_enough(info.config, split, num_rows, names, info.segments[split])
        info.notes.extend(_describe_short(info.config, split, names, stop - begin))
        labels = recordings.fixed("label") if info.config.problem is SequenceProblem.label else None
        make = partial(_columns, info, split, values, labels)
        store.splits[split] = Views(split, num_rows, values, make)
    for name in (RECORDINGS, SEGMENTS):
        store.splits.pop(name)


def _cut(config: SequenceDataConfig, split: str) -> Cut:
    """How the segments of a split become rows; all but training read every window."""
    horizon = config.horizon if config.problem is SequenceProblem.forecast else 0
    return Cut(config.lookback, horizon, config.chunk, config.stride if split == "train" else 1)


def _columns(info: SequenceInfo, split: str, values: Array, labels: Array | None) -> dict[str, Array | Ragged]:
    segments = info.segments[split]
    rows = _cut(info.config, split).rows(segments)
    columns: dict[str, Array | Ragged] = {
        "tokens": Ragged(values, rows.start, rows.length),
        "recording": rows.recording.astype(np.int32, copy=False),
    }
    if labels is not None:
        found = labels[segments.recording]
        columns["targets"] = found.astype(np.int64) if info.facts["classes"] else found
    return columns


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
