"""The second pass over recordings: their samples are scaled and written.

    in    recordings in the order of the first pass, and the survey that it made
    out   two splits of a store: the samples of all recordings, and the segments that say which
          samples belong to training, validation and test

Open this file to change what a store of recordings holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from flatout.data.sequences.columns import RecordingRules
from flatout.data.sequences.info import ROWS_A_BLOCK
from flatout.data.sequences.recording import Recording, measured_targets
from flatout.data.sequences.scratch import blocks_of
from flatout.data.sequences.survey import Survey
from flatout.data.sequences.views import MEASURED, RECORDINGS, SEGMENTS
from flatout.data.store.store import Column, StoreWriter
from flatout.data.tables.splits import SPLITS


class RecordingPass:
    """Writes the recordings of a source."""

    def __init__(self, rules: RecordingRules, survey: Survey) -> None:
        self.rules = rules
        self.survey = survey

    def write(self, writer: StoreWriter, recordings: Iterable[tuple[str, Recording]]) -> int:
        """Write all samples and segments; returns how many targets were not measured."""
        repeated = self._write_samples(writer, recordings)
        self._write_segments(writer)
        return repeated

    def _write_samples(
        self, writer: StoreWriter, all_recordings: Iterable[tuple[str, Recording]]
    ) -> int:
        """Write scaled samples; returns how many targets were not measured.

        Where values are carried forward, the store also says of each target whether it was
        measured, or repeats the value before.
        """
        columns = {"values": Column("float32", ragged=True), "label": Column("float32")}
        if self.rules.carries_forward:
            columns[MEASURED] = Column("uint8", ragged=True)
        recordings = writer.split(RECORDINGS, columns)
        scaler = self.survey.scaler
        labels = self.survey.numbers.astype(np.float32)
        repeated = 0
        for (_, recording), label in zip(all_recordings, labels, strict=False):
            # The values go in block by block; the row that is appended behind them has only their
            # length left to add.
            for block in blocks_of(recording.values, ROWS_A_BLOCK):
                recordings.extend("values", scaler.scale(block).reshape(-1))
            length = np.array([np.prod(recording.values.shape)], np.int32)
            others: dict[str, Any] = {}
            if self.rules.carries_forward:
                num_targets = len(self.rules.targets)
                measured = measured_targets(recording, num_targets).astype(np.uint8)
                repeated += int(measured.size - measured.sum(dtype=np.int64))
                others[MEASURED] = (measured.reshape(-1), np.array([measured.size], np.int32))
            recordings.append(
                values=(np.empty(0, np.float32), length), label=label.reshape(1), **others
            )
        return repeated

    def _write_segments(self, writer: StoreWriter) -> None:
        """Write which samples of which recording belong to which split."""
        names = ("split", "recording", "first", "stop")
        places = [
            (SPLITS.index(segment.split), segment.recording, segment.first, segment.stop)
            for segment in self.survey.segments
        ]
        segments = writer.split(SEGMENTS, {name: Column("int64") for name in names})
        segments.append(**dict(zip(names, np.array(places).T, strict=True)))
