"""`predict RUN FOLDER` of a run on recordings: a row for each sample that is answered, recording after recording.

Files are read as in training: the same columns, resampling and scales. Answers are written block by block. A large file
that is one recording is read in blocks too; of others one is in memory at a time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from flatout.cli.rows import readable
from flatout.data.sequences.columns import dates_of
from flatout.data.sequences.long_files import LongRecording
from flatout.data.sequences.recordings import Recording
from flatout.data.store.progress import Progress
from flatout.data.tables.output import block_writer
from flatout.data.tables.sources import open_source
from flatout.inference.sequences import SequencePredictor


def predict_recordings(arguments: argparse.Namespace, predictor: SequencePredictor) -> None:
    """Write the answers to all recordings of a file or a folder."""
    with readable(arguments.file, "predict") as file:
        table = open_source(file, where="FILE")
        with block_writer(arguments.out) as write, Progress() as progress:
            advance, rows = progress.task("predicting"), 0
            for recording in predictor.read_long(table):
                for block in answer_blocks(predictor, recording):
                    write(block)
                    rows += block.num_rows
                advance(len(recording.times))
    for line in predictor.lines():
        print(line, file=sys.stderr)
    if arguments.out is not None:
        print(f"written to {arguments.out}: {rows:,} rows")


def answer_blocks(predictor: SequencePredictor, recording: Recording | LongRecording) -> Iterator[pa.RecordBatch]:
    """Rows with the recording's name, the time and the answers."""
    time = predictor.rules.time or "step"
    written = dates_of if recording.is_dated else np.asarray
    if predictor.shape.labels:
        yield _block(recording, {}, _label_columns(predictor, predictor.answer(recording.values[:])))
        return
    if predictor.shape.horizon:
        step = predictor.step_s or 1.0
        times = recording.times[-1:] + step * np.arange(1, predictor.shape.horizon + 1)
        yield _block(recording, {time: written(times)}, _columns(predictor, next(predictor.stream(recording.values))))
        return
    start = 0
    for answers in predictor.stream(recording.values):
        times = recording.times[start : start + len(answers)]
        yield _block(recording, {time: written(times)}, _columns(predictor, answers))
        start += len(answers)


def _columns(predictor: SequencePredictor, answers: Any) -> dict[str, Any]:
    return {name: answers[:, number] for number, name in enumerate(predictor.names)}


def _label_columns(predictor: SequencePredictor, answer: Any) -> dict[str, Any]:
    if not predictor.has_classes:
        return {"prediction": answer}
    best = int(answer.argmax())
    return {"prediction": [predictor.names[best]], "probability": [float(answer[best])]}


def _block(recording: Recording | LongRecording, times: dict[str, Any], answers: dict[str, Any]) -> pa.RecordBatch:
    columns = {name: pa.array(values) for name, values in {**times, **answers}.items()}
    count = len(next(iter(columns.values())))
    return pa.RecordBatch.from_pydict({"recording": pa.array([recording.name] * count, pa.string()), **columns})
