"""Baselines for networks on recordings: ridge regression, and an answer that is simpler still.

- Estimates and forecasts: ridge regression on the window. It takes one pass over the training
  windows and a solve for each penalty; the validation recordings choose the penalty. Simpler still:
  a forecast repeats the last value, an estimate is ridge regression on the last sample.
- Labels: ridge regression on the mean, spread, least, most, first and last value of each column; a
  class is a vector with a one. Simpler still: the commonest class, or the mean.

Windows are gathered in blocks, so memory stays flat. Each rank computes all baselines by itself.

Shapes: N windows, L samples, F inputs, K targets or labels, H horizon, D inputs of the ridge, R
recordings.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.baselines.ridge import PENALTIES, RidgeSums
from flatout.data.problem import Problem
from flatout.data.sequences.info import SequenceInfo
from flatout.data.sequences.views import Cut
from flatout.errors import require
from flatout.models.series import WindowRidge, own_pasts
from flatout.tasks.sequence_scores import SequenceScores

_WINDOWS_A_BLOCK = 4096
_MOST_WINDOWS = 100_000  # of a split with more, evenly spread ones are read
_MOST_INPUTS = 1024  # numbers of a window; where the network reads whole recordings
_MOST_NUMBERS = 1 << 24  # inputs and answers that `window_rows` returns
# what metrics call the splits
_SHORT = {"validation": "val", "test": "test"}
_USUAL_LOOKBACK = 16  # samples that the ridge reads where the network reads whole recordings


@dataclass(frozen=True, slots=True)
class Baseline:
    """A model in closed form, and its errors on validation and test."""

    name: str
    ridge: WindowRidge
    metrics: dict[str, dict[str, float]]


def build_baselines(info: SequenceInfo) -> list[Baseline]:
    """Ridge regression on the window, then the simplest answer."""
    shape = info.shape
    samples = shape.lookback or min(_USUAL_LOOKBACK, _most_samples(info))
    ridges = {f"ridge on {samples} samples": _solve(info, samples)}
    if shape.horizon:
        ridges["last value"] = WindowRidge(shape)  # zero until it is solved: repeats the last value
    elif samples > 1:
        ridges["ridge on the last sample"] = _solve(info, 1)
    return [Baseline(name, ridge, _judge(info, ridge)) for name, ridge in ridges.items()]


def _most_samples(info: SequenceInfo) -> int:
    """How many samples a ridge may read, so that its inputs are not too many."""
    return max(1, _MOST_INPUTS // (1 if info.shape.horizon else info.shape.inputs))


def window_rows(info: SequenceInfo) -> tuple[int, Tensor, Tensor, Tensor]:
    """How many samples the ridge reads, its rows over all splits, and the recording of each row.

    The rows are `[N, D]` inputs and `[N, O]` answers in fp32, of all windows or evenly spread ones.
    """
    samples = min(info.shape.lookback or _USUAL_LOOKBACK, _most_samples(info))
    ridge = WindowRidge(replace(info.shape, lookback=samples))
    rows_a_window = info.shape.targets if info.shape.horizon else 1
    numbers_a_window = sum(ridge.weight.shape) * rows_a_window * len(info.segments)
    most_windows = max(1, _MOST_NUMBERS // numbers_a_window)
    all_inputs = list[Tensor]()
    all_answers = list[Tensor]()
    all_recordings = list[Tensor]()
    for split in info.segments:
        for windows, answers, recording_N in _blocks(info, ridge, split, most_windows):
            inputs_ND, answers_NO = _rows_of_ridge(ridge, windows, answers)
            is_known_N = ~answers_NO.isnan().any(1)
            all_inputs.append(inputs_ND[is_known_N].float())
            all_answers.append(answers_NO[is_known_N].float())
            rows = len(inputs_ND) // len(windows)
            all_recordings.append(recording_N.repeat_interleave(rows)[is_known_N])
    inputs_ND = torch.cat(all_inputs)
    require(
        len(inputs_ND) > 0,
        "data.target",
        "no window has all its targets measured",
        hint="Lower data.horizon, or leave out what was filled with data.missing=drop.",
    )
    return samples, inputs_ND, torch.cat(all_answers), torch.cat(all_recordings)


def _solve(info: SequenceInfo, lookback: int) -> WindowRidge:
    """The ridge on so many samples, with the penalty that errs least on validation."""
    ridge = WindowRidge(replace(info.shape, lookback=lookback))
    # one set of sums for all outputs; one for each where some of their truths were not measured
    is_complete = info.measured("train") is None
    sums = list[RidgeSums]()
    for windows, answers, _ in _blocks(info, ridge, "train", _MOST_WINDOWS):
        rows = _rows_of_ridge(ridge, windows, answers)
        of_block = [RidgeSums.of(*rows)] if is_complete else _sums_of_outputs(*rows)
        sums = list(map(operator.add, sums, of_block)) if sums else of_block
    held_out = list[tuple[Tensor, Tensor]]()
    for windows, answers, _ in _blocks(info, ridge, "validation", _MOST_WINDOWS // 4):
        held_out.append(_rows_of_ridge(ridge, windows, answers))
    least_error = float("inf")
    for penalty in PENALTIES:
        maps = [of_output.solve_map(of_output.growing(penalty)) for of_output in sums]
        weight = torch.cat([weight_DO for weight_DO, _ in maps], 1)
        bias = torch.cat([bias_O for _, bias_O in maps])
        squares = list[Tensor]()
        for inputs, answers in held_out:
            squares.append((inputs @ weight + bias - answers).square().nansum())
        error = float(torch.stack(squares).sum())
        if error < least_error:
            least_error = error
            ridge.set(weight.float(), bias.float())
    return ridge


def _sums_of_outputs(inputs_ND: Tensor, answers_NO: Tensor) -> list[RidgeSums]:
    """The sums of each output by itself, over the rows where its truth was measured."""
    sums = []
    for number in range(answers_NO.shape[1]):
        answer_N1 = answers_NO[:, number : number + 1]
        known_N = ~answer_N1[:, 0].isnan()
        sums.append(RidgeSums.of(inputs_ND[known_N], answer_N1[known_N]))
    return sums


def _rows_of_ridge(
    ridge: WindowRidge, windows_NLF: Tensor, answers: Tensor
) -> tuple[Tensor, Tensor]:
    """`[N, D]` inputs and `[N, O]` answers in double precision; a row a window.

    For forecasts a row for each series of a window: the past of the series, and its next values,
    both less its last value.
    """
    if not ridge.shape.horizon:
        return windows_NLF.flatten(1).double(), answers.double()
    series_NKL, last_NK1 = own_pasts(windows_NLF, ridge.shape)
    changes_NKH = answers.transpose(1, 2) - last_NK1
    return series_NKL.flatten(0, 1).double(), changes_NKH.flatten(0, 1).double()


def _judge(info: SequenceInfo, ridge: WindowRidge) -> dict[str, dict[str, float]]:
    """The metrics of a ridge on validation and test."""
    _, factor = info.scaler.of_targets(len(info.targets))
    metrics = {}
    for split, short in _SHORT.items():
        if split not in info.segments:
            continue
        scores = SequenceScores(len(info.recording_names), info.targets, factor)
        for windows, answers, recording_N in _blocks(info, ridge, split, None):
            guesses = ridge.answer(windows)
            answers_a_window = answers[..., 0].numel() // len(answers)
            recordings = recording_N.repeat_interleave(answers_a_window)
            scores.add(guesses.flatten(0, -2), answers.flatten(0, -2), recordings)
        metrics[short] = scores.values(is_alone=True)
    return metrics


def _blocks(
    info: SequenceInfo, ridge: WindowRidge, split: str, most: int | None
) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of `[N, L, F]` windows, their answers, and the recording of each window.

    Of more than `most` windows evenly spread ones; None: all. A window that begins before its
    recording repeats the recording's first sample. An answer is NaN where no target was measured.
    """
    # A recording begins at sample 10; its window that ends before sample 12 reads 3 samples, and a
    # horizon of 2 answers the next ones:
    #
    #     places    12 + [-3 -2 -1] = 9 10 11, not before 10    →  10 10 11
    #     after     12 + [0 1]                                  →  12 13
    shape = ridge.shape
    segments = info.segments[split]
    lookback = shape.lookback or 1
    horizon = shape.horizon
    rows = Cut(lookback, horizon).rows(segments)
    values = info.rows_of(split).values
    measured = info.measured(split)
    every = 1 if most is None else max(1, -(-len(rows.start) // most))
    for begin in range(0, len(rows.start), _WINDOWS_A_BLOCK * every):
        chosen = np.arange(begin, min(begin + _WINDOWS_A_BLOCK * every, len(rows.start)), every)
        ends = rows.start[chosen] + rows.length[chosen] - horizon
        places = np.maximum(ends[:, None] + np.arange(-lookback, 0), rows.start[chosen, None])
        after = ends[:, None] + np.arange(horizon) if horizon else ends - 1
        windows = values[places][..., : shape.inputs]
        answers = values[after][..., -shape.targets :]
        if measured is not None:
            answers = np.where(measured[after] == 0, np.float32(np.nan), answers)
        recordings = torch.from_numpy(rows.recording[chosen]).long()
        yield torch.from_numpy(windows), torch.from_numpy(answers), recordings


def judge_label_ridge(info: SequenceInfo) -> dict[str, Any]:
    """The name of the baseline and its metrics on validation and test."""
    numbers = {split: numbers_of(info, split) for split in info.segments}
    labels = {split: labels_of(info, split) for split in info.segments}
    numbers_RD = numbers["train"]
    mean_K = labels["train"].mean(0)
    center_D = numbers_RD.mean(0)
    spread_D = numbers_RD.std(0, correction=0)
    spread_D = torch.where(spread_D > 0, spread_D, 1.0)
    scaled_RD = (numbers_RD - center_D) / spread_D

    def answer(split: str, weight_DK: Tensor) -> Tensor:
        return (numbers[split] - center_D) / spread_D @ weight_DK + mean_K

    def error(weight_DK: Tensor) -> float:
        return float((answer("validation", weight_DK) - labels["validation"]).square().mean())

    sums = RidgeSums.of(scaled_RD, labels["train"])
    best = min((sums.solve(penalty)[0] for penalty in PENALTIES), key=error)
    is_class = info.labels.problem is Problem.single
    simplest = "accuracy of the commonest class" if is_class else "rmse of the mean"
    metrics: dict[str, float] = {}
    for split, short in _SHORT.items():
        if split in labels:
            labels_RK = labels[split]
            judged = _judge_labels(answer(split, best), labels_RK, is_class=is_class)
            plain = _judge_labels(mean_K.expand_as(labels_RK), labels_RK, is_class=is_class)
            for name, value in judged.items():
                metrics[f"{short}/{name}"] = value
            metrics[f"{short}/{simplest}"] = plain["accuracy" if is_class else "rmse"]
    return {"name": "ridge on means and ends", "metrics": metrics}


def _judge_labels(answers_RK: Tensor, labels_RK: Tensor, *, is_class: bool) -> dict[str, float]:
    """Accuracy of classes, or errors of numbers."""
    if is_class:
        is_right_R = answers_RK.argmax(1) == labels_RK.argmax(1)
        return {"accuracy": float(is_right_R.double().mean())}
    errors_RK = answers_RK - labels_RK
    return {"rmse": float(errors_RK.square().mean().sqrt()), "mae": float(errors_RK.abs().mean())}


def numbers_of(info: SequenceInfo, split: str) -> Tensor:
    """`[R, D]` what the ridge on labels reads: six numbers for each column of each recording."""
    rows = info.rows_of(split)
    numbers = []
    for start, length in zip(rows.offsets.tolist(), rows.lengths.tolist(), strict=True):
        values = np.asarray(rows.values[start : start + length], np.float64)
        parts = values.mean(0), values.std(0), values.min(0), values.max(0), values[0], values[-1]
        numbers.append(np.concatenate(parts))
    return torch.from_numpy(np.stack(numbers))


def labels_of(info: SequenceInfo, split: str) -> Tensor:
    """`[R, K]` the label of each recording: a one at its class, or its number."""
    labels = torch.from_numpy(np.asarray(info.store.splits[split].fixed("targets")))
    if info.labels.problem is Problem.single:
        return torch.nn.functional.one_hot(labels.long(), len(info.labels.classes)).double()
    return labels.double().unsqueeze(1)
