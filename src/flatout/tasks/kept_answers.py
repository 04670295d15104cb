"""Answers to recordings kept for pictures of one split.

`keep_answers` lets the network answer a split once more. Pictures show some recordings whole, and
errors by value and by time, of the first target. For a forecast they show the farthest step, and
errors by step of the horizon.

Shapes: N answers, R recordings, K targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.ragged import numbers_in_row, row_indices

if TYPE_CHECKING:
    from flatout.tasks.sequences import SequenceRegressor

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Points = list[tuple[float, float]]
_MOST_ANSWERS = 2_000_000  # of a split with more, the first ones are kept
_BINS = 20  # ranges of values or times, each a point of a picture
_WORST = 3  # recordings with the largest errors that are shown


@dataclass(frozen=True, slots=True)
class Series:
    """One recording: what was answered, and what it should be."""

    name: str
    rmse: float
    places: Integers  # [N] samples since the recording's beginning
    truths: Floats
    answers: Floats


@dataclass(frozen=True, slots=True)
class KeptAnswers:
    """What pictures are drawn from."""

    target: str
    series: list[Series]  # the median recording, then the worst ones
    by_value: Points  # middle of each range of the target, and the root mean square error there
    # samples since the beginning, or steps of the horizon, and the root mean square error there
    by_time: Points
    time_name: str
    # a row for each recording and target: its errors, the largest first
    errors: list[dict[str, Any]]
    of_targets: list[dict[str, Any]]  # a row for each target: its errors over all recordings


@dataclass(frozen=True, slots=True)
class _Answers:
    """Answers of the first target in its unit, one after the other: all fields are `[N]`."""

    recordings: Integers  # the number of the recording
    places: Integers  # samples since the recording's beginning
    steps: Integers  # 1 for a row's first answer; in forecasts the step of the horizon
    truths: Floats
    answers: Floats


def choose_recordings(errors: Floats) -> list[int]:
    """The recording with the median error, then the three with the largest, as far as there are.

    Recordings whose error is not finite have no answer, and are left out.
    """
    answered = np.flatnonzero(np.isfinite(errors))
    if not len(answered):
        return []
    order = answered[np.argsort(errors[answered], kind="stable")]
    median = order[(len(order) - 1) // 2]
    worst = order[::-1][:_WORST]
    return list(dict.fromkeys(int(number) for number in [median, *worst]))


@torch.inference_mode()
def keep_answers(task: SequenceRegressor, feed: Feed, split: str) -> KeptAnswers:
    """Answer a split once more, and keep what pictures show."""
    by_recording = task.scores.by_recording()
    rows = _rows_of_errors(task, by_recording)
    of_targets = [{"target": name, **values} for name, values in task.scores.of_targets.items()]
    errors = by_recording["rmse"][:, 0].numpy()
    task.start_judging({"validation": "val"}.get(split, split))
    task.eval()
    of_split = _answer_split(task, feed, split)
    horizon = task.shape.horizon
    squares = (of_split.answers - of_split.truths) ** 2
    if horizon:
        ends = (0.5, horizon + 0.5)  # each step of the horizon is the middle of its range
        by_time = _mean_errors(of_split.steps, squares, horizon, ends)
        time_name = "sample of the horizon"
    else:
        by_time = _mean_errors(of_split.places, squares, _BINS)
        time_name = "sample of the recording"
    return KeptAnswers(
        target=task.scores.targets[0],
        series=_choose_series(task, of_split, errors),
        by_value=_mean_errors(of_split.truths, squares, _BINS),
        by_time=by_time,
        time_name=time_name,
        errors=rows,
        of_targets=of_targets,
    )


def _rows_of_errors(
    task: SequenceRegressor, by_recording: dict[str, Tensor]
) -> list[dict[str, Any]]:
    """A row for each recording and target with answers, the largest rmse first."""
    rows = list[dict[str, Any]]()
    for recording, target in by_recording["rmse"].isfinite().nonzero().tolist():
        row: dict[str, Any] = {
            "recording": task.info.recording_names[recording],
            "target": task.scores.targets[target],
        }
        for name, values in by_recording.items():
            row[name] = float(values[recording, target])
        rows.append(row)
    rows.sort(key=lambda row: -row["rmse"])
    return rows


def _answer_split(task: SequenceRegressor, feed: Feed, split: str) -> _Answers:
    """The answers of a split, up to the most that are kept."""
    batches = list[_Answers]()
    count = 0
    for batch in feed.all_rows():
        batches.append(_answer_batch(task, batch, split))
        count += len(batches[-1].answers)
        if count >= _MOST_ANSWERS:
            break
    return _Answers(
        recordings=np.concatenate([batch.recordings for batch in batches]),
        places=np.concatenate([batch.places for batch in batches]),
        steps=np.concatenate([batch.steps for batch in batches]),
        truths=np.concatenate([batch.truths for batch in batches]),
        answers=np.concatenate([batch.answers for batch in batches]),
    )


def _choose_series(task: SequenceRegressor, of_split: _Answers, errors: Floats) -> list[Series]:
    """The recordings that pictures show whole; of forecasts their farthest steps."""
    is_drawn = np.ones(len(of_split.steps), np.bool_)
    if task.shape.horizon:
        is_drawn = of_split.steps == task.shape.horizon
    series = list[Series]()
    for number in choose_recordings(errors):
        samples = np.flatnonzero(is_drawn & (of_split.recordings == number))
        samples = samples[np.argsort(of_split.places[samples], kind="stable")]
        name = task.info.recording_names[number]
        rmse = float(errors[number])
        series.append(
            Series(
                name,
                rmse,
                of_split.places[samples],
                of_split.truths[samples],
                of_split.answers[samples],
            )
        )
    return series


def _answer_batch(task: SequenceRegressor, batch: FlatBatch, split: str) -> _Answers:
    """The answers of a batch whose truths were measured.

    Take a row that begins 100 samples after its recording, with 5 samples to read. With a horizon
    of 2 it has answers at the places 105 and 106; without one, a single answer at place 104.
    """
    answers, truths = task.answers_and_truths(batch)
    shape = task.shape
    split_rows = task.info.rows_of(split)
    rows = batch.rows[: batch.num_real].numpy()
    first = split_rows.offsets[rows]  # the sample of a row's first answer
    lengths = split_rows.lengths[rows].astype(np.int64)
    counts = np.full(len(rows), max(1, shape.horizon))  # answers of each row
    if shape.is_each_step:
        counts = lengths
    elif shape.horizon:
        first = first + (shape.lookback or 0)
    else:
        first = first + lengths - 1
    recordings = task.info.recording_of_rows(split)[rows]
    segments = task.info.segments[split]
    begins = np.zeros(len(task.info.recording_names), np.int64)
    begins[segments.recording] = segments.start
    true_values = _first_target(task, truths)
    is_measured = np.flatnonzero(~np.isnan(true_values))
    return _Answers(
        recordings=np.repeat(recordings, counts)[is_measured],
        places=row_indices(first - begins[recordings], counts)[is_measured],
        steps=numbers_in_row(counts)[is_measured] + 1,
        truths=true_values[is_measured],
        answers=_first_target(task, answers)[is_measured],
    )


def _first_target(task: SequenceRegressor, scaled: Tensor) -> Floats:
    """`[N]` values of the first target in its unit, on the host."""
    return task.in_units(scaled)[..., 0].flatten().double().cpu().numpy()


def _mean_errors(
    where: NDArray[Any], squares: Floats, bins: int, ends: tuple[float, float] | None = None
) -> Points:
    """The root mean square error in ranges of equal width, as points at their middles.

    `where` says where each error belongs; `ends` are those of all ranges, else its least and its
    largest value. Ranges without an error are left out.
    """
    # Errors where all values are equal have no width to divide: one range holds them all.
    low, high = ends or (float(where.min()), float(where.max()))
    width = (high - low) / bins or 1.0
    place = np.clip(((where - low) / width).astype(np.int64), 0, bins - 1)
    counts = np.bincount(place, minlength=bins)
    sums = np.bincount(place, squares, minlength=bins)
    points: Points = []
    for number in range(bins):
        if counts[number]:
            middle = low + (number + 0.5) * width
            points.append((middle, float(np.sqrt(sums[number] / counts[number]))))
    return points
