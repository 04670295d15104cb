"""Rows of the store as a network reads them: whole recordings, windows or chunks, each an index into the samples."""

from __future__ import annotations

import numpy as np

from flatout.data.sequences.choices import SequenceProblem
from flatout.data.sequences.info import SequenceInfo
from flatout.data.sequences.windows import Rows, Segments, chunks, estimate_windows, forecast_windows
from flatout.data.store.store import Array, Ragged, StoreSplit
from flatout.data.tables.splits import SPLITS
from flatout.errors import UserError

RECORDINGS, SEGMENTS = "recordings", "segments"
"""Splits of the store on disk: the samples, and which of them belong to training, validation and test."""


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


def _too_short(info: SequenceInfo, split: str, longest: int) -> UserError:
    """The error of a split without a single window."""
    config = info.config
    needed, keys = config.lookback or 1, f"data.lookback={config.lookback}"
    if config.problem is SequenceProblem.forecast:
        needed, keys = needed + config.horizon, f"{keys} and data.horizon={config.horizon}"
    what = f"{keys} need {needed} samples, the longest of the {split} recordings has {longest}"
    return UserError("data.lookback", what, hint="Lower them, or name longer recordings.")
