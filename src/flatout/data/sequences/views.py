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
    recording: NDArray[np.integer]


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
            "recording": rows.recording.astype(np.int32, copy=False),
        }
        if config.problem is SequenceProblem.label:
            labels = recordings.fixed("label")[recording]
            columns["targets"] = labels.astype(np.int64) if info.facts["classes"] else labels
        store.splits[split] = StoreSplit(split, len(rows.start), columns)
    for name in (RECORDINGS, SEGMENTS):
        store.splits.pop(name)


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
    counts = np.maximum(0, -(-(stop - first) // stride))
    places = np.empty(int(counts.sum()), np.int64)
    end = 0
    for begin, count in zip(first.tolist(), counts.tolist(), strict=True):
        places[end : end + count] = np.arange(begin, begin + count * stride, stride)
        end += count
    return places, counts


def _of_rows(segments: Segments, counts: Places) -> NDArray[np.int32]:
    return np.repeat(segments.recording.astype(np.int32), counts)


def _too_short(info: SequenceInfo, split: str, longest: int) -> UserError:
    """The error of a split without a single window."""
    config = info.config
    needed, keys = config.lookback or 1, f"data.lookback={config.lookback}"
    if config.problem is SequenceProblem.forecast:
        needed, keys = needed + config.horizon, f"{keys} and data.horizon={config.horizon}"
    what = f"{keys} need {needed} samples, the longest of the {split} recordings has {longest}"
    return UserError("data.lookback", what, hint="Lower them, or name longer recordings.")
