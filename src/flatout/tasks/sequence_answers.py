"""The answers to one split, kept for pictures: some recordings whole, and errors by value and by time.

Pictures show the first target. Of a forecast they show the farthest step, and errors by the step of the horizon.

Shapes: N answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch

if TYPE_CHECKING:
    from flatout.tasks.sequences import SequenceRegressor

Floats = NDArray[np.float64]
_MOST_ANSWERS, _BINS = 2_000_000, 20
_WORST = 3


@dataclass(frozen=True, slots=True)
class Series:
    """One recording: what was answered, and what it should be."""

    name: str
    rmse: float
    places: Floats
    """[N] samples since the recording's beginning."""
    truths: Floats
    answers: Floats


@dataclass(frozen=True, slots=True)
class KeptAnswers:
    """What pictures are drawn from."""

    target: str
    series: list[Series]
    """The median recording, then the worst ones."""
    by_value: list[tuple[float, float]]
    """Middle of each range of the target, and the root mean square error there."""
    by_time: list[tuple[float, float]]
    """Samples since the beginning, or steps of the horizon, and the root mean square error there."""
    time_name: str = field(default="sample of the recording")
    errors: list[dict[str, Any]] = field(default_factory=list)
    """A row for each recording and target: its errors, the largest first."""
    of_targets: list[dict[str, Any]] = field(default_factory=list)
    """A row for each target: its errors over all recordings."""


def choose_recordings(errors: Floats) -> list[int]:
    """The recording with the median error and the three with the largest, where there are so many."""
    known = np.flatnonzero(np.isfinite(errors))
    order = known[np.argsort(errors[known], kind="stable")]
    chosen = [order[(len(order) - 1) // 2], *order[::-1][:_WORST]] if len(order) else []
    return list(dict.fromkeys(int(number) for number in chosen))


@torch.inference_mode()
def keep_answers(task: SequenceRegressor, feed: Feed, split: str) -> KeptAnswers:
    """Answer a split once more; of very many answers the first two million."""
    by_recording = task.scores.by_recording()
    rows = _rows_of_errors(by_recording, task.info.recording_names, task.scores.targets)
    of_targets = [{"target": name, **values} for name, values in task.scores.of_targets.items()]
    errors = by_recording["rmse"][:, 0].numpy()
    chosen = choose_recordings(errors)
    task.start_judging({"validation": "val"}.get(split, split))
    task.eval()
    found: list[tuple[Floats, ...]] = []
    count = 0
    for batch in feed.afresh():
        found.append(_answers(task, batch, split))
        count += len(found[-1][0])
        if count >= _MOST_ANSWERS:
            break
    recordings, places, steps, truths, answers = (np.concatenate(parts) for parts in zip(*found, strict=True))
    horizon = task.shape.horizon
    is_drawn = steps == horizon if horizon else np.ones(len(steps), np.bool_)
    series = []
    for number in chosen:
        mine = np.flatnonzero(is_drawn & (recordings == number))
        mine = mine[np.argsort(places[mine], kind="stable")]
        name, parts = task.info.recording_names[number], (places[mine], truths[mine], answers[mine])
        series.append(Series(name, float(errors[number]), *parts))
    squares = (answers - truths) ** 2
    ends = (0.5, horizon + 0.5)  # each step of the horizon is the middle of its range
    by_time = _means(steps, squares, horizon, ends) if horizon else _means(places, squares, _BINS)
    time_name = "sample of the horizon" if horizon else "sample of the recording"
    return KeptAnswers(
        task.scores.targets[0], series, _means(truths, squares, _BINS), by_time, time_name, rows, of_targets
    )


def _rows_of_errors(
    by_recording: dict[str, torch.Tensor], recordings: list[str], targets: list[str]
) -> list[dict[str, Any]]:
    known = by_recording["rmse"].isfinite().nonzero().tolist()
    rows = [
        {"recording": recordings[place], "target": targets[number]}
        | {name: float(values[place, number]) for name, values in by_recording.items()}
        for place, number in known
    ]
    return sorted(rows, key=lambda row: -row["rmse"])


def _answers(task: SequenceRegressor, batch: FlatBatch, split: str) -> tuple[Floats, ...]:
    """Recording, place, step of the horizon, truth and answer of each answer of a batch, in the target's unit."""
    answers, truths = task.answers_and_truths(batch)
    shape, rows = task.shape, task.info.rows_of(split)
    number = batch.rows[: batch.num_real].numpy()
    begin, lengths = rows.offsets[number], rows.lengths[number].astype(np.int64)
    per_row = lengths if shape.is_each_step else np.full(len(number), max(1, shape.horizon))
    first = begin if shape.is_each_step else begin + (shape.lookback or 0) if shape.horizon else begin + lengths - 1
    within = np.arange(per_row.sum()) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    recording = task.info.recording_of_rows(split)[number]
    segments = task.info.segments[split]
    start = np.zeros(len(task.info.recording_names), np.int64)
    start[segments.recording] = segments.start
    places = np.repeat(first - start[recording], per_row) + within
    both = (task.in_units(each)[..., 0].flatten().double().cpu().numpy() for each in (truths, answers))
    return np.repeat(recording, per_row), places, within + 1, *both


def _means(
    where: Floats, squares: Floats, bins: int, ends: tuple[float, float] | None = None
) -> list[tuple[float, float]]:
    """Root mean squares in equal ranges, as points at their middles; ranges without an answer are left out."""
    low, high = ends or (float(where.min()), float(where.max()))
    width = (high - low) / bins or 1.0
    place = np.clip(((where - low) / width).astype(np.int64), 0, bins - 1)
    counts, sums = np.bincount(place, minlength=bins), np.bincount(place, squares, minlength=bins)
    return [(low + (i + 0.5) * width, float(np.sqrt(sums[i] / counts[i]))) for i in range(bins) if counts[i]]
