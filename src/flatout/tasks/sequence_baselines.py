"""What a network on sequences is compared with: ridge regression, solved in closed form, and less.

Estimates and forecasts are compared with ridge regression on the window. It has one pass over the
training windows and a solve for each penalty; the penalty is chosen on the validation recordings. A
forecast's simplest answer repeats the last value; an estimate's is ridge regression on the last
sample. Windows are gathered in blocks, so memory stays flat. Labels are compared with ridge
regression on the mean, spread, least, most, first and last value of each column. Classes are
answered as one number each. The simplest answer is the commonest class, or the mean. Each rank
computes all alone.

Shapes: N windows, L samples, F inputs, K targets or labels, H horizon, D inputs of the ridge, R
recordings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import starmap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.data.problem import Problem
from flatout.data.sequences.info import SequenceInfo
from flatout.data.sequences.views import Cut
from flatout.errors import require
from flatout.models.series import PENALTIES, Sums, WindowRidge, own_pasts, ridge_sums, solve_ridge
from flatout.tasks.sequence_scores import SequenceScores

_WINDOWS_A_BLOCK = 4096
_MOST_WINDOWS = 100_000
_MOST_INPUTS = 1024
_MOST_NUMBERS = 1 << 24
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
    wide = shape.lookback or min(_USUAL_LOOKBACK, _most_samples(info))
    found = [(f"ridge on {wide} samples", _solve(info, wide))]
    if shape.horizon:
        found.append(("last value", WindowRidge(shape)))
    elif wide > 1:
        found.append(("ridge on the last sample", _solve(info, 1)))
    return [Baseline(name, ridge, _judge(info, ridge)) for name, ridge in found]


def _most_samples(info: SequenceInfo) -> int:
    return max(1, _MOST_INPUTS // (1 if info.shape.horizon else info.shape.inputs))


def window_rows(info: SequenceInfo) -> tuple[int, Tensor, Tensor, Tensor]:
    """Samples that the ridge reads, its inputs and answers over all splits, and the recording of
    each.
    """
    wide = min(info.shape.lookback or _USUAL_LOOKBACK, _most_samples(info))
    ridge = WindowRidge(replace(info.shape, lookback=wide))
    found = []
    numbers = (
        sum(ridge.weight.shape)
        * (info.shape.targets if info.shape.horizon else 1)
        * len(info.segments)
    )
    for split in info.segments:
        for windows, answers, recording_N in _blocks(
            info, ridge, split, max(1, _MOST_NUMBERS // numbers)
        ):
            inputs_ND, answers_NO = _rows_of_ridge(ridge, windows, answers)
            own = recording_N.repeat_interleave(len(inputs_ND) // len(windows))
            known_N = ~answers_NO.isnan().any(1)
            found.append((inputs_ND[known_N].float(), answers_NO[known_N].float(), own[known_N]))
    inputs_ND, answers_NO, recording_N = (torch.cat(each) for each in zip(*found, strict=True))
    require(
        len(inputs_ND) > 0,
        "data.target",
        "no window has all its targets measured",
        hint="Lower data.horizon, or leave out what was filled with data.missing=drop.",
    )
    return wide, inputs_ND, answers_NO, recording_N


def _solve(info: SequenceInfo, lookback: int) -> WindowRidge:
    ridge = WindowRidge(replace(info.shape, lookback=lookback))
    blocks = (
        _rows_of_ridge(ridge, *block[:2]) for block in _blocks(info, ridge, "train", _MOST_WINDOWS)
    )
    if info.measured("train") is None:
        sums = [reduce(_add, starmap(ridge_sums, blocks))]
    else:
        sums = reduce(_add_each, starmap(_sums_of_outputs, blocks))
    held = [
        _rows_of_ridge(ridge, *block[:2])
        for block in _blocks(info, ridge, "validation", _MOST_WINDOWS // 4)
    ]
    best = float("inf")
    for penalty in PENALTIES:
        solved = [solve_ridge(each, penalty) for each in sums]
        weight = torch.cat([each[0] for each in solved], 1)
        bias = torch.cat([mean_of_answers - mean @ own for own, mean, mean_of_answers in solved])
        errors = [(inputs @ weight + bias - answers).square().nansum() for inputs, answers in held]
        if (error := float(torch.stack(errors).sum())) < best:
            best = error
            ridge.set(weight.float(), bias.float())
    return ridge


def _add(total: Sums, more: Sums) -> Sums:
    return tuple(map(torch.add, total, more))


def _add_each(total: list[Sums], more: list[Sums]) -> list[Sums]:
    return list(map(_add, total, more))


def _sums_of_outputs(inputs_ND: Tensor, answers_NO: Tensor) -> list[Sums]:
    """The sums of each output by itself, over the rows where its truth was measured."""
    sums = []
    for number in range(answers_NO.shape[1]):
        answer_N1 = answers_NO[:, number : number + 1]
        known_N = ~answer_N1[:, 0].isnan()
        sums.append(ridge_sums(inputs_ND[known_N], answer_N1[known_N]))
    return sums


def _rows_of_ridge(
    ridge: WindowRidge, windows_NLF: Tensor, answers: Tensor
) -> tuple[Tensor, Tensor]:
    """`[N, D]` inputs and `[N, O]` answers in double precision; of a forecast a row for each
    series.
    """
    if not ridge.shape.horizon:
        return windows_NLF.flatten(1).double(), answers.double()
    series_NKL, last_NK1 = own_pasts(windows_NLF, ridge.shape)
    return series_NKL.flatten(0, 1).double(), (answers.transpose(1, 2) - last_NK1).flatten(
        0, 1
    ).double()


def _judge(info: SequenceInfo, ridge: WindowRidge) -> dict[str, dict[str, float]]:
    factor = info.scaler.of_targets(len(info.targets))[1]
    found = {}
    for split, short in _SHORT.items():
        if split not in info.segments:
            continue
        scores = SequenceScores(len(info.recording_names), info.targets, factor)
        for windows, answers, recording_N in _blocks(info, ridge, split, None):
            guesses = ridge.answer(windows)
            count = answers[..., 0].numel() // len(answers)
            scores.add(
                guesses.flatten(0, -2), answers.flatten(0, -2), recording_N.repeat_interleave(count)
            )
        found[short] = scores.values(is_alone=True)
    return found


def _blocks(
    info: SequenceInfo, ridge: WindowRidge, split: str, most: int | None
) -> Iterator[tuple[Tensor, ...]]:
    """`[N, L, F]` windows, their answers, and the recording of each; of very many windows evenly
    spread ones.

    An answer is NaN where no target was measured.
    """
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
        windows, answers = values[places][..., : shape.inputs], values[after][..., -shape.targets :]
        if measured is not None:
            answers = np.where(measured[after] == 0, np.float32(np.nan), answers)
        yield (
            torch.from_numpy(windows),
            torch.from_numpy(answers),
            torch.from_numpy(rows.recording[chosen]).long(),
        )


def judge_label_ridge(info: SequenceInfo) -> dict[str, Any]:
    """The name of the baseline and its metrics on validation and test."""
    splits = {split: (numbers_of(info, split), labels_of(info, split)) for split in info.segments}
    numbers_RD, labels_RK = splits["train"]
    center_D = numbers_RD.mean(0)
    spread_D = numbers_RD.std(0, correction=0)
    mean_K = labels_RK.mean(0)
    spread_D = torch.where(spread_D > 0, spread_D, 1.0)
    scaled_RD, left_RK = (numbers_RD - center_D) / spread_D, labels_RK - mean_K

    def answer(split: str, weight_DK: Tensor) -> Tensor:
        return (splits[split][0] - center_D) / spread_D @ weight_DK + mean_K

    def error(weight_DK: Tensor) -> float:
        return float((answer("validation", weight_DK) - splits["validation"][1]).square().mean())

    products = scaled_RD.T @ scaled_RD
    answers = scaled_RD.T @ left_RK
    diagonal = torch.eye(scaled_RD.shape[1]).double()
    best = min(
        (torch.linalg.solve(products + each * diagonal, answers) for each in PENALTIES), key=error
    )
    is_class = info.labels.problem is Problem.single
    simplest = "accuracy of the commonest class" if is_class else "rmse of the mean"
    metrics: dict[str, float] = {}
    for split, short in _SHORT.items():
        if split in splits:
            labels_LK = splits[split][1]
            found = _judge_labels(answer(split, best), labels_LK, is_class=is_class)
            plain = _judge_labels(mean_K.expand_as(labels_LK), labels_LK, is_class=is_class)
            metrics |= {f"{short}/{name}": value for name, value in found.items()}
            metrics[f"{short}/{simplest}"] = plain["accuracy" if is_class else "rmse"]
    return {"name": "ridge on means and ends", "metrics": metrics}


def _judge_labels(answers_RK: Tensor, labels_RK: Tensor, *, is_class: bool) -> dict[str, float]:
    if is_class:
        return {"accuracy": float((answers_RK.argmax(1) == labels_RK.argmax(1)).double().mean())}
    errors_RK = answers_RK - labels_RK
    return {"rmse": float(errors_RK.square().mean().sqrt()), "mae": float(errors_RK.abs().mean())}


def numbers_of(info: SequenceInfo, split: str) -> Tensor:
    """`[R, D]` numbers of each recording."""
    rows = info.rows_of(split)
    found = []
    for start, length in zip(rows.offsets.tolist(), rows.lengths.tolist(), strict=True):
        values = np.asarray(rows.values[start : start + length], np.float64)
        parts = values.mean(0), values.std(0), values.min(0), values.max(0), values[0], values[-1]
        found.append(np.concatenate(parts))
    return torch.from_numpy(np.stack(found))


def labels_of(info: SequenceInfo, split: str) -> Tensor:
    """`[R, K]` a one for the class of each recording, or its number."""
    labels = torch.from_numpy(np.asarray(info.store.splits[split].fixed("targets")))
    if info.labels.problem is Problem.single:
        return torch.nn.functional.one_hot(labels.long(), len(info.labels.classes)).double()
    return labels.double().unsqueeze(1)
