"""Errors of answers to recordings: as metrics, and kept for pictures of one split.

Metrics are in each target's own unit, over all recordings and for each. Sums are kept for each
recording and target on the device, so a batch costs a few additions and memory stays flat. Pictures
show some recordings whole, and errors by value and by time, of the first target. Of a forecast they
show the farthest step, and errors by step of the horizon.

Shapes: N answers, R recordings, K targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.distributed.collectives import of_all_ranks
from flatout.tasks.score_intervals import Interval, bootstrap

NAMES = ("rmse", "mae", "max_error", "r2", "mse_scaled", "mae_scaled")
_COUNT, _SQUARES, _ABSOLUTE, _TRUTH, _TRUTH_SQUARES = range(5)
Floats = NDArray[np.float64]
Points = list[tuple[float, float]]
_MOST_ANSWERS = 2_000_000
_BINS = 20
_WORST = 3


class SequenceScores:
    """Adds up errors on scaled values, and says what they are in each target's unit."""

    def __init__(self, recordings: int, targets: Sequence[str], factor: Sequence[float]) -> None:
        self.targets = list(targets)
        self._factor = torch.tensor(list(factor), dtype=torch.float64)
        # each one's errors over all recordings, of the last `values`
        self.of_targets: dict[str, dict[str, float]] = {}
        shape = recordings, len(self.targets)
        self._sums = torch.zeros(5, *shape, dtype=torch.float64)
        self._largest = torch.zeros(shape, dtype=torch.float64)

    def reset(self) -> None:
        self._sums.zero_()
        self._largest.zero_()

    def add(self, answers_NK: Tensor, truths_NK: Tensor, recording_N: Tensor) -> None:
        self._sums = self._sums.to(answers_NK.device)
        self._largest = self._largest.to(answers_NK.device)
        """Take in scaled answers; a truth that is NaN was not measured, and does not count."""
        is_known_NK = ~truths_NK.isnan()
        errors_NK = (answers_NK.double() - truths_NK.double()).where(is_known_NK, 0.0)
        truths_NK = truths_NK.double().where(is_known_NK, 0.0)
        absolute_NK = errors_NK.abs()
        parts = is_known_NK.double(), errors_NK**2, absolute_NK, truths_NK, truths_NK**2
        self._sums.index_add_(1, recording_N, torch.stack(parts))
        self._largest.scatter_reduce_(
            0, recording_N.unsqueeze(1).expand_as(absolute_NK), absolute_NK, "amax"
        )

    def values(self, *, is_alone: bool = False) -> dict[str, float]:
        """Each metric over all ranks, or of this one alone; of several targets their mean, and the
        error of each.
        """
        sums, largest = (
            (self._sums.cpu(), self._largest.cpu()) if is_alone else self._of_all_ranks()
        )
        whole = sums.sum(1), largest.amax(0)
        by_target = _errors(*whole, self._factor).items()
        for number, target in enumerate(self.targets):
            self.of_targets[target] = {name: float(errors[number]) for name, errors in by_target}
        return {name: float(value) for name, value in self._values_of(*whole).items()}

    def _values_of(self, sums: Tensor, largest: Tensor) -> dict[str, Tensor]:
        """Each metric from `[5, …, K]` sums."""
        by_target = _errors(sums, largest, self._factor)
        found = {name: by_target[name].mean(-1) for name in ("rmse", "mae", "max_error", "r2")}
        count = sums[_COUNT].sum(-1)
        found |= {
            "mse_scaled": sums[_SQUARES].sum(-1) / count,
            "mae_scaled": sums[_ABSOLUTE].sum(-1) / count,
        }
        if len(self.targets) > 1:
            found |= {
                f"rmse_{name}": by_target["rmse"][..., number]
                for number, name in enumerate(self.targets)
            }
        return found

    def intervals(self) -> dict[str, Interval]:
        """The 95 % interval of each metric but the largest error, over recordings; every rank takes
        part.
        """

        def values_of(sums: Tensor) -> dict[str, Tensor]:
            parts = sums.unflatten(-1, (5, -1)).movedim(-2, 0).flip(0)
            found = self._values_of(parts, torch.zeros_like(parts[0]))
            return {name: value for name, value in found.items() if name != "max_error"}

        sums = self._of_all_ranks()[0].flip(0)  # so that the count comes last
        return bootstrap(sums.movedim(0, 1).flatten(1), values_of)

    def by_recording(self) -> dict[str, Tensor]:
        """`[R, K]` of each error; NaN where a recording has no answer."""
        return _errors(*self._of_all_ranks(), self._factor)

    def _of_all_ranks(self) -> tuple[Tensor, Tensor]:
        sums, largest = zip(*of_all_ranks([self._sums.cpu(), self._largest.cpu()]), strict=True)
        return torch.stack(sums).sum(0), torch.stack(largest).amax(0)


def names_of(targets: Sequence[str]) -> list[str]:
    return [*NAMES, *(f"rmse_{name}" for name in targets if len(targets) > 1)]


def _errors(sums: Tensor, largest: Tensor, factor: Tensor) -> dict[str, Tensor]:
    count = sums[_COUNT].masked_fill(sums[_COUNT] == 0, float("nan"))
    spread = sums[_TRUTH_SQUARES] - sums[_TRUTH] ** 2 / count
    return {
        "rmse": (sums[_SQUARES] / count).sqrt() * factor,
        "mae": sums[_ABSOLUTE] / count * factor,
        "max_error": largest * factor,
        "r2": 1 - sums[_SQUARES] / spread.masked_fill(spread <= 0, float("nan")),
    }


@dataclass(frozen=True, slots=True)
class Series:
    """One recording: what was answered, and what it should be."""

    name: str
    rmse: float
    places: Floats  # [N] samples since the recording's beginning
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


def choose_recordings(errors: Floats) -> list[int]:
    """The recording with the median error and the three with the largest, where there
    are so many.
    """
    known = np.flatnonzero(np.isfinite(errors))
    order = known[np.argsort(errors[known], kind="stable")]
    chosen = [order[(len(order) - 1) // 2], *order[::-1][:_WORST]] if len(order) else []
    return list(dict.fromkeys(int(number) for number in chosen))


@torch.inference_mode()
def keep_answers(task: Any, feed: Feed, split: str) -> KeptAnswers:
    """Let a SequenceRegressor answer a split once more; of very many answers the first
    two million.
    """
    by_recording = task.scores.by_recording()
    names = task.info.recording_names
    rows = [
        {"recording": names[place], "target": task.scores.targets[number]}
        | {name: float(values[place, number]) for name, values in by_recording.items()}
        for place, number in by_recording["rmse"].isfinite().nonzero().tolist()
    ]
    rows.sort(key=lambda row: -row["rmse"])
    of_targets = [{"target": name, **values} for name, values in task.scores.of_targets.items()]
    errors = by_recording["rmse"][:, 0].numpy()
    task.start_judging({"validation": "val"}.get(split, split))
    task.eval()
    found: list[tuple[Floats, ...]] = []
    count = 0
    for batch in feed.afresh():
        found.append(_answers(task, batch, split))
        count += len(found[-1][0])
        if count >= _MOST_ANSWERS:
            break
    recordings, places, steps, truths, answers = (
        np.concatenate(parts) for parts in zip(*found, strict=True)
    )
    horizon = task.shape.horizon
    is_drawn = steps == horizon if horizon else np.ones(len(steps), np.bool_)
    series = []
    for number in choose_recordings(errors):
        mine = np.flatnonzero(is_drawn & (recordings == number))
        mine = mine[np.argsort(places[mine], kind="stable")]
        series.append(
            Series(names[number], float(errors[number]), places[mine], truths[mine], answers[mine])
        )
    squares = (answers - truths) ** 2
    ends = (0.5, horizon + 0.5)  # each step of the horizon is the middle of its range
    by_time = _means(steps, squares, horizon, ends) if horizon else _means(places, squares, _BINS)
    time_name = "sample of the horizon" if horizon else "sample of the recording"
    by_value = _means(truths, squares, _BINS)
    return KeptAnswers(
        task.scores.targets[0], series, by_value, by_time, time_name, rows, of_targets
    )


def _answers(task: Any, batch: FlatBatch, split: str) -> tuple[Floats, ...]:
    """Recording, place, step of the horizon, truth and answer of each answer of a batch, in the
    target's unit.
    """
    answers, truths = task.answers_and_truths(batch)
    shape = task.shape
    rows = task.info.rows_of(split)
    number = batch.rows[: batch.num_real].numpy()
    begin = rows.offsets[number]
    lengths = rows.lengths[number].astype(np.int64)
    per_row = lengths if shape.is_each_step else np.full(len(number), max(1, shape.horizon))
    first = (
        begin
        if shape.is_each_step
        else begin + (shape.lookback or 0)
        if shape.horizon
        else begin + lengths - 1
    )
    within = np.arange(per_row.sum()) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    recording = task.info.recording_of_rows(split)[number]
    segments = task.info.segments[split]
    start = np.zeros(len(task.info.recording_names), np.int64)
    start[segments.recording] = segments.start
    places = np.repeat(first - start[recording], per_row) + within
    both = [
        task.in_units(each)[..., 0].flatten().double().cpu().numpy() for each in (truths, answers)
    ]
    truths, answers = both
    known = np.flatnonzero(~np.isnan(truths))
    columns = (np.repeat(recording, per_row), places, within + 1, truths, answers)
    return tuple(column[known] for column in columns)


def _means(
    where: Floats, squares: Floats, bins: int, ends: tuple[float, float] | None = None
) -> Points:
    """Root mean squares in equal ranges, as points at their middles; ranges without an answer are
    left out.
    """
    low, high = ends or (float(where.min()), float(where.max()))
    width = (high - low) / bins or 1.0
    place = np.clip(((where - low) / width).astype(np.int64), 0, bins - 1)
    counts, sums = np.bincount(place, minlength=bins), np.bincount(place, squares, minlength=bins)
    return [
        (low + (i + 0.5) * width, float(np.sqrt(sums[i] / counts[i])))
        for i in range(bins)
        if counts[i]
    ]
