"""What a network that labels recordings is compared with: ridge regression on a few numbers of each recording.

The numbers are the mean, spread, least, most, first and last value of each column. One pass over the recordings and a
solve for each penalty; the penalty is chosen on the validation recordings. Classes are answered as one number each.
Beside it stands the simplest answer: the commonest class, or the mean. Each rank computes all of it alone.

Shapes: R recordings, F columns, D numbers, K labels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.data.problem import Problem
from flatout.data.sequences.info import SequenceInfo
from flatout.models.window_ridge import PENALTIES

NAME = "ridge on means and ends"
_SHORT = {"validation": "val", "test": "test"}


def judge_label_ridge(info: SequenceInfo) -> dict[str, Any]:
    """The name of the baseline and its metrics on validation and test."""
    splits = {split: (_numbers_of(info, split), _labels_of(info, split)) for split in ("train", *_SHORT)}
    numbers_RD, labels_RK = splits["train"]
    center_D, spread_D, mean_K = numbers_RD.mean(0), numbers_RD.std(0, correction=0), labels_RK.mean(0)
    spread_D = torch.where(spread_D > 0, spread_D, 1.0)
    scaled_RD, left_RK = (numbers_RD - center_D) / spread_D, labels_RK - mean_K

    def answer(split: str, weight_DK: Tensor) -> Tensor:
        return (splits[split][0] - center_D) / spread_D @ weight_DK + mean_K

    def error(weight_DK: Tensor) -> float:
        return float((answer("validation", weight_DK) - splits["validation"][1]).square().mean())

    weights = [_solve(scaled_RD, left_RK, penalty) for penalty in PENALTIES]
    best = min(weights, key=error)
    is_class = info.labels.problem is Problem.single
    simplest = "accuracy of the commonest class" if is_class else "rmse of the mean"
    metrics: dict[str, float] = {}
    for split, short in _SHORT.items():
        labels_LK = splits[split][1]
        if len(labels_LK):
            found = _judge(answer(split, best), labels_LK, is_class=is_class)
            plain = _judge(mean_K.expand_as(labels_LK), labels_LK, is_class=is_class)
            metrics |= {f"{short}/{name}": value for name, value in found.items()}
            metrics[f"{short}/{simplest}"] = plain["accuracy" if is_class else "rmse"]
    return {"name": NAME, "metrics": metrics}


def _solve(inputs_RD: Tensor, labels_RK: Tensor, penalty: float) -> Tensor:
    products = inputs_RD.T @ inputs_RD
    products.diagonal().add_(penalty)
    weight: Tensor = torch.linalg.solve(products, inputs_RD.T @ labels_RK)
    return weight


def _judge(answers_RK: Tensor, labels_RK: Tensor, *, is_class: bool) -> dict[str, float]:
    """Metrics that need no probabilities."""
    if is_class:
        return {"accuracy": float((answers_RK.argmax(1) == labels_RK.argmax(1)).double().mean())}
    errors_RK = answers_RK - labels_RK
    return {"rmse": float(errors_RK.square().mean().sqrt()), "mae": float(errors_RK.abs().mean())}


def _numbers_of(info: SequenceInfo, split: str) -> Tensor:
    """`[R, D]` numbers of each recording; none where the split is not there."""
    if split not in info.segments:
        return torch.empty(0, 0, dtype=torch.float64)
    rows, found = info.rows_of(split), []
    for start, length in zip(rows.offsets.tolist(), rows.lengths.tolist(), strict=True):
        values = np.asarray(rows.values[start : start + length], np.float64)
        parts = values.mean(0), values.std(0), values.min(0), values.max(0), values[0], values[-1]
        found.append(np.concatenate(parts))
    return torch.from_numpy(np.stack(found))


def _labels_of(info: SequenceInfo, split: str) -> Tensor:
    """`[R, K]` a one for the class of each recording, or its number."""
    if split not in info.segments:
        return torch.empty(0, 0, dtype=torch.float64)
    labels = torch.from_numpy(np.asarray(info.store.splits[split].fixed("targets")))
    if info.labels.problem is Problem.single:
        return torch.nn.functional.one_hot(labels.long(), len(info.labels.classes)).double()
    return labels.double().unsqueeze(1)
