"""What a model's answers are worth: torchmetrics states on the device, plain numbers at the end of a split.

For one class a row everything is read off one confusion matrix, so a batch costs one count. Classes that occur neither
among the targets nor among the answers take no part in an average, as in scikit-learn.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric, PearsonCorrCoef, R2Score
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MultilabelAUROC,
    MultilabelExactMatch,
    MultilabelStatScores,
)

from flatout.data.problem import Problem
from flatout.errors import UserError, did_you_mean

BEST_MODE = {
    "accuracy": "max",
    "macro_f1": "max",
    "micro_f1": "max",
    "f1": "max",
    "macro_recall": "max",
    "auroc": "max",
    "subset_accuracy": "max",
    "r2": "max",
    "pearson": "max",
    "dice": "max",
    "precision": "max",
    "recall": "max",
    "exact": "max",
    "word_accuracy": "max",
    "mae": "min",
    "rmse": "min",
    "max_error": "min",
    "mse_scaled": "min",
    "mae_scaled": "min",
    "perplexity": "min",
    "masked_accuracy": "max",
}
"""Whether more or less of a metric is better."""

# Evenly spaced on the scale of logits: evenly spaced probabilities would see nothing of a confident model.
_THRESHOLDS = [0.0, *torch.linspace(-12, 12, 198).sigmoid().tolist(), 1.0]
_MOST_CLASSES_FOR_AUROC = 50


def monitored_metric(problem: Problem) -> str:
    """The default metric by which the best checkpoint is chosen."""
    return {Problem.single: "accuracy", Problem.multi: "micro_f1", Problem.regression: "rmse"}[problem]


def require_metric(name: str, available: Iterable[str], where: str) -> None:
    names = list(available)
    if name not in names:
        raise UserError(where, f"no metric {name!r}", allowed=", ".join(names), hint=did_you_mean(name, names))


@dataclass(frozen=True, slots=True)
class Counted:
    """What a split's answers were, on the host."""

    classes: list[str]
    confusion: NDArray[np.int64] | None
    """[C, C] rows by true class (down) and answered class (across); None unless it is one class a row."""
    binned: NDArray[np.int64] | None
    """[T, C, 2, 2] rows by threshold, class, whether it is theirs, whether answered; None for many classes."""
    are_several: bool
    """Whether a row has several classes."""


class TaskMetrics(nn.Module, ABC):
    """The metrics of one kind of problem; `build` makes the right one."""

    def __init__(self, classes: list[str]) -> None:
        super().__init__()
        self.classes = classes

    @staticmethod
    def build(problem: Problem, classes: list[str]) -> TaskMetrics:
        """The metrics of a problem."""
        if problem is Problem.single:
            return SingleMetrics(classes)
        return MultiMetrics(classes) if problem is Problem.multi else NumberMetrics(classes)

    @abstractmethod
    def names(self) -> list[str]:
        """Names of what `compute` returns."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in a batch of answers."""
        for metric in self._metrics():
            metric.update(outputs, targets)

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Each metric over everything since the last reset."""

    def per_class(self) -> list[dict[str, Any]]:
        """Precision, recall and F1 of each class, the commonest first; empty for numbers."""
        return []

    def confusion(self) -> Tensor | None:
        """Rows by true class (down) and answered class (across), on the host; None unless it is one class a row."""
        return None

    def binned(self) -> Tensor | None:
        """[T, C, 2, 2] rows by threshold, class, whether it is theirs, and whether it was answered, over all ranks."""
        return None

    def counted(self) -> Counted | None:
        """What the answers since the last reset were; None for numbers. On every rank at once."""
        return None

    def reset(self) -> None:
        for metric in self._metrics():
            metric.reset()

    def _metrics(self) -> list[Metric]:
        return [metric for metric in self.children() if isinstance(metric, Metric)]


class SingleMetrics(TaskMetrics):
    """One class a row; of two classes `f1` is that of the second."""

    def __init__(self, classes: list[str]) -> None:
        super().__init__(classes)
        count = len(classes)
        self.counts = MulticlassConfusionMatrix(count, validate_args=False)
        self.auroc: Metric | None = None
        if count == 2:
            self.auroc = BinaryAUROC(thresholds=_THRESHOLDS, validate_args=False)
        elif count <= _MOST_CLASSES_FOR_AUROC:
            self.auroc = MulticlassAUROC(count, average="none", thresholds=_THRESHOLDS, validate_args=False)

    def names(self) -> list[str]:
        names = ["accuracy", "macro_f1", "micro_f1", "macro_recall"]
        names += ["f1"] if len(self.classes) == 2 else []
        return names + (["auroc"] if self.auroc is not None else [])

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.counts.update(outputs.argmax(-1), targets)
        if self.auroc is not None:
            probabilities = outputs.softmax(-1)
            self.auroc.update(probabilities[:, 1] if len(self.classes) == 2 else probabilities, targets)

    def compute(self) -> dict[str, float]:
        counts = self.confusion().double()
        correct, targets, answers = counts.diag(), counts.sum(1), counts.sum(0)
        f1, recall = _f1(correct, targets, answers), correct / targets.clamp(min=1)
        seen = targets + answers > 0
        accuracy = float(correct.sum() / counts.sum().clamp(min=1))
        values = {
            "accuracy": accuracy,
            "macro_f1": float(f1[seen].mean()) if seen.any() else 0.0,
            "micro_f1": accuracy,
            "macro_recall": float(recall[targets > 0].mean()) if (targets > 0).any() else 0.0,
        }
        if len(self.classes) == 2:
            values["f1"] = float(f1[1])
        if self.auroc is not None:
            values["auroc"] = _mean_over_mixed(self.auroc.compute(), targets, counts.sum())
        return values

    def confusion(self) -> Tensor:
        return self.counts.compute().cpu()

    def binned(self) -> Tensor | None:
        found = _binned(self.auroc)
        if found is None or len(self.classes) > 2:
            return found
        # Of two classes one is counted: the other is answered where that one is not.
        return torch.stack([found.flip(0, 1, 2), found], 1)

    def counted(self) -> Counted:
        return Counted(self.classes, self.confusion().numpy(), _on_host(self.binned()), are_several=False)

    def per_class(self) -> list[dict[str, Any]]:
        counts = self.confusion().double()
        return class_rows(self.classes, counts.diag(), counts.sum(1), counts.sum(0))


class MultiMetrics(TaskMetrics):
    """Several classes a row; a class is answered from its threshold on, which is one half until others are known."""

    thresholds: Tensor

    def __init__(self, classes: list[str]) -> None:
        super().__init__(classes)
        count = len(classes)
        self.counts = MultilabelStatScores(count, average="none", validate_args=False)
        self.auroc: Metric | None = None
        if count <= _MOST_CLASSES_FOR_AUROC:
            self.auroc = MultilabelAUROC(count, average="none", thresholds=_THRESHOLDS, validate_args=False)
        self.exact = MultilabelExactMatch(count, validate_args=False)
        self.register_buffer("thresholds", torch.full((count,), 0.5), persistent=False)

    def names(self) -> list[str]:
        names = ["micro_f1", "macro_f1", "macro_recall", "subset_accuracy"]
        return names + (["auroc"] if self.auroc is not None else [])

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        probabilities, whole = outputs.sigmoid(), targets.long()
        answered = (probabilities >= self.thresholds).long()
        self.counts.update(answered, whole)
        self.exact.update(answered, whole)
        if self.auroc is not None:
            self.auroc.update(probabilities, whole)

    def compute(self) -> dict[str, float]:
        correct, targets, answers, rows = self._totals()
        f1 = _f1(correct, targets, answers)
        values = {
            "micro_f1": float(_f1(correct.sum(), targets.sum(), answers.sum())),
            "macro_f1": float(f1.mean()),
            "macro_recall": float((correct / targets.clamp(min=1)).mean()),
            "subset_accuracy": float(self.exact.compute()),
        }
        if self.auroc is not None:
            values["auroc"] = _mean_over_mixed(self.auroc.compute(), targets, rows)
        return values

    def binned(self) -> Tensor | None:
        return _binned(self.auroc)

    def counted(self) -> Counted:
        return Counted(self.classes, None, _on_host(self.binned()), are_several=True)

    def per_class(self) -> list[dict[str, Any]]:
        return class_rows(self.classes, *self._totals()[:3])

    def _totals(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        counts = self.counts.compute().double().cpu()  # [C, 5]: tp, fp, tn, fn, support
        return counts[:, 0], counts[:, 4], counts[:, 0] + counts[:, 1], counts[:, :4].sum(1)


class NumberMetrics(TaskMetrics):
    """A number a row."""

    def __init__(self, classes: list[str]) -> None:
        super().__init__(classes)
        self.mae, self.mse = MeanAbsoluteError(), MeanSquaredError()
        self.r2, self.pearson = _R2(), PearsonCorrCoef()

    def names(self) -> list[str]:
        return ["mae", "rmse", "r2", "pearson"]

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        super().update(outputs.flatten(), targets.flatten())

    def compute(self) -> dict[str, float]:
        with warnings.catch_warnings():  # numbers that are all alike have no correlation: nan says so
            warnings.filterwarnings("ignore", message="The variance of predictions or target is close to zero")
            pearson = float(self.pearson.compute())
        mae, rmse = float(self.mae.compute()), float(self.mse.compute()) ** 0.5
        return {"mae": mae, "rmse": rmse, "r2": float(self.r2.compute()), "pearson": pearson}


class _R2(R2Score):
    """R² that is unknown, not an error, below two rows; asked after the ranks were added up, so that all agree."""

    def compute(self) -> Tensor:
        return super().compute() if int(self.total) > 1 else self.residual.new_tensor(float("nan"))


def _binned(metric: Metric | None) -> Tensor | None:
    """Counts by threshold of a binned curve, over all ranks."""
    if metric is None:
        return None
    with metric.sync_context():
        counts = metric.confmat
        assert isinstance(counts, Tensor)
        return counts.cpu().clone()


def _on_host(counts: Tensor | None) -> NDArray[np.int64] | None:
    return None if counts is None else counts.numpy()


def _f1(correct: Tensor, targets: Tensor, answers: Tensor) -> Tensor:
    return 2 * correct / (targets + answers).clamp(min=1)


def _mean_over_mixed(values: Tensor, targets: Tensor, rows: Tensor) -> float:
    """Mean over the classes that some rows have and some have not; others have no curve. NaN where there is none."""
    is_mixed = (targets > 0) & (targets < rows)
    values = values.flatten().double().cpu().expand(len(targets))  # two classes share one value
    return float(values[is_mixed].mean()) if is_mixed.any() else float("nan")


def class_rows(classes: list[str], correct: Tensor, targets: Tensor, answers: Tensor) -> list[dict[str, Any]]:
    """Precision, recall and F1 of each class, the commonest first."""
    columns = {
        "precision": correct / answers.clamp(min=1),
        "recall": correct / targets.clamp(min=1),
        "f1": _f1(correct, targets, answers),
    }
    rows = [
        {"class": name, **{key: float(values[i]) for key, values in columns.items()}, "support": int(targets[i])}
        for i, name in enumerate(classes)
    ]
    return sorted(rows, key=lambda row: -row["support"])
