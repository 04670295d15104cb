"""Rows of the store as a network reads them: whole recordings, windows or chunks, each an index into the samples.

A `Ragged` column says where each row begins and how long it is. Rows may overlap, so a window costs twelve bytes,
whatever its lookback, and a sample lies once in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flatout.data.sequences.settings import SequenceProblem
from flatout.data.store.store import Array, Ragged, StoreSplit
from flatout.data.tables.splits import SPLITS
from flatout.errors import UserError

if TYPE_CHECKING:
    from flatout.data.sequences.info import SequenceInfo

Places = NDArray[np.int64]
RECORDINGS, SEGMENTS = "recordings", "segments"
"""Splits of the store on disk: the samples, and which of them belong to training, validation and test."""


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
    recording: Places


def open_views(info: SequenceInfo) -> None:
    """Put the rows that the settings ask for into the store's splits."""
    store, config = info.store, info.config
    recordings, segments = store.splits[RECORDINGS], store.splits[SEGMENTS]
    ragged, width = recordings.ragged("values"), len(info.columns)
    values = ragged.values.reshape(-1, width)
    starts = ragged.offsets // width
    splits = segments.fixed("split")
    for number, split in enumerate(SPLITS):
        if split not in info.facts["splits"]:
            continue
        chosen = splits == number
        recording = segments.fixed("recording")[chosen]
        begin = starts[recording]
        first, stop = (begin + segments.fixed(name)[chosen] for name in ("first", "stop"))
        found = info.segments[split] = Segments(begin, first, stop, recording)
        stride = config.stride if split == "train" else 1
        if config.problem is SequenceProblem.forecast:
            assert config.lookback is not None
            rows = forecast_windows(found, config.lookback, config.horizon, stride)
        elif config.lookback is not None:
            rows = estimate_windows(found, config.lookback, stride)
        elif config.chunk is not None:
            rows = chunks(found, config.chunk)
        else:
            rows = Rows(first, (stop - first).astype(np.int32), recording)
        if not len(rows.start):
            raise _too_short(info, split, int((stop - begin).max()))
        columns: dict[str, Array | Ragged] = {
            "tokens": Ragged(values, rows.start, rows.length),
            "recording": rows.recording.astype(np.int32),
        }
        if config.problem is SequenceProblem.label:
            labels = recordings.fixed("label")[recording]
            columns["targets"] = labels.astype(np.int64) if info.facts["classes"] else labels
        store.splits[split] = StoreSplit(split, len(rows.start), columns)
    for name in (RECORDINGS, SEGMENTS):
        store.splits.pop(name)


def estimate_windows(segments: Segments, lookback: int, stride: int = 1) -> Rows:
    """Windows that end at every `stride`-th sample; the first ones of a recording are shorter."""
    ends, segment = _every(segments.first, segments.stop, stride)
    start = np.maximum(segments.start[segment], ends - lookback + 1)
    return Rows(start, (ends + 1 - start).astype(np.int32), segments.recording[segment])


def forecast_windows(segments: Segments, lookback: int, horizon: int, stride: int = 1) -> Rows:
    """Windows of `lookback` samples with the `horizon` samples behind them, which all have their answers here."""
    earliest = np.maximum(segments.first, segments.start + lookback)
    firsts, segment = _every(earliest, segments.stop - horizon + 1, stride)
    length = np.broadcast_to(np.int32(lookback + horizon), len(firsts))
    return Rows(firsts - lookback, length, segments.recording[segment])


def chunks(segments: Segments, size: int) -> Rows:
    """Runs of `size` samples one after the other; the last of a recording is shorter."""
    start, segment = _every(segments.first, segments.stop, size)
    length = np.minimum(size, segments.stop[segment] - start).astype(np.int32)
    return Rows(start, length, segments.recording[segment])


def _every(first: Places, stop: Places, stride: int) -> tuple[Places, Places]:
    """Every `stride`-th place from `first` to before `stop`, and the number of its segment."""
    counts = np.maximum(0, -(-(stop - first) // stride))
    segment = np.repeat(np.arange(len(first)), counts)
    ends = np.cumsum(counts)
    places = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    places -= np.repeat(ends - counts, counts)
    places *= stride
    places += first[segment]
    return places, segment


def _too_short(info: SequenceInfo, split: str, longest: int) -> UserError:
    """The error of a split without a single window."""
    config = info.config
    needed, keys = config.lookback or 1, f"data.lookback={config.lookback}"
    if config.problem is SequenceProblem.forecast:
        needed, keys = needed + config.horizon, f"{keys} and data.horizon={config.horizon}"
    what = f"{keys} need {needed} samples, the longest of the {split} recordings has {longest}"
    return UserError("data.lookback", what, hint="Lower them, or name longer recordings.")
