"""Metrics of texts' answers: counts on the device while batches pass, numbers at a split's end.

With one class a row, everything is read off one confusion matrix, so a batch costs one count. A
class that occurs neither among the targets nor among the answers takes no part in an average, as in
scikit-learn.
"""

from __future__ import annotations

import math
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
from torchmetrics import classification as of_classes

from flatout.data.problem import Problem
from flatout.errors import did_you_mean, require
from flatout.tasks.score_intervals import Interval, OverRanks, RowSums, auroc_influence, bootstrap

_MORE_IS_BETTER = (
    "accuracy macro_f1 micro_f1 f1 macro_recall auroc subset_accuracy r2 pearson dice precision"
    " recall exact word_accuracy"
).split()
_LESS_IS_BETTER = "mae rmse max_error mse_scaled mae_scaled perplexity".split()
BEST_MODE = (
    dict.fromkeys(_MORE_IS_BETTER, "max")
    | dict.fromkeys(_LESS_IS_BETTER, "min")
    | {"masked_accuracy": "max"}
)
# Scores are ranked as log-odds. Near 0 thresholds are 0.008 apart, as a weak model's scores lie
# close together. Further out, up to 300, they are apart in proportion: so a confident model's
# scores differ, too.
_FARTHEST = 300.0
_NEAR = 2.0
_STEPS = torch.linspace(-1, 1, 3_001, dtype=torch.float64)
_FINITE = (_NEAR * (math.asinh(_FARTHEST / _NEAR) * _STEPS).sinh()).tolist()
# The last one is reached by no score, so that a curve begins at no answers.
_THRESHOLDS = [-math.inf, *_FINITE, math.inf]
_MOST_CLASSES_FOR_AUROC = 50


def monitored_metric(problem: Problem) -> str:
    """The default metric by which the best checkpoint is chosen."""
    return {Problem.single: "accuracy", Problem.multi: "micro_f1", Problem.regression: "rmse"}[
        problem
    ]


def require_metric(name: str, available: Iterable[str], where: str) -> None:
    names = list(available)
    require(
        name in names,
        where,
        f"no metric {name!r}",
        allowed=", ".join(names),
        hint=did_you_mean(name, names),
    )


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts of a split's answers, on the host."""

    classes: list[str]
    # [C, C] rows by true class (down) and answer; None: several classes a row
    confusion: NDArray[np.int64] | None
    binned: NDArray[np.int64] | None
    """[T, C, 2, 2] rows by threshold, class, whether it is theirs, whether answered; None for many
    classes."""


class TaskMetrics(nn.Module, ABC):
    """The metrics of one kind of problem; `build` makes the right one."""

    # what each row adds to the sums behind the metrics, of the rows whose numbers were given
    sums: RowSums
    auroc: _Areas | None

    def __init__(self, classes: list[str]) -> None:
        super().__init__()
        self.classes = classes
        self.auroc = None
        # numbers of rows, the buckets of their scores, and their classes
        self._ranked: list[tuple[Tensor, ...]] = []

    @staticmethod
    def build(problem: Problem, classes: list[str]) -> TaskMetrics:
        if problem is Problem.single:
            return SingleMetrics(classes)
        return MultiMetrics(classes) if problem is Problem.multi else NumberMetrics(classes)

    def names(self) -> list[str]:
        """Names of what `compute` returns."""
        return [
            *self.values_of(torch.zeros(self.sums.columns)),
            *["auroc"] * (self.auroc is not None),
        ]

    @abstractmethod
    def update(self, outputs: Tensor, targets: Tensor, rows: Tensor | None = None) -> None:
        """Add a batch of answers; `rows`: the numbers of their rows, which intervals need."""

    def compute(self) -> dict[str, float]:
        """Each metric since the last reset."""
        totals = self._totals()
        values = {name: float(value) for name, value in self.values_of(totals).items()}
        if self.auroc is not None:
            count = len(self.classes)
            # An area under a curve is a mean over the classes that some rows have and some have
            # not: the others have no curve.
            rows_of_class = totals[count : 2 * count]
            is_mixed = (rows_of_class > 0) & (rows_of_class < totals[-1])
            # two classes share one value
            areas = self.auroc.compute().flatten().double().cpu().expand(count)
            values["auroc"] = float(areas[is_mixed].mean())
        return values

    def _totals(self) -> Tensor:
        """`[S]` sums over all rows: of each class right answers, targets and answers, then others.

        Metrics of numbers have none.
        """
        raise NotImplementedError

    @abstractmethod
    def values_of(self, sums: Tensor) -> dict[str, Tensor]:
        """The metrics of `[…, S]` sums over rows, those of a curve left out."""

    def intervals(self, over_ranks: OverRanks | None = None) -> dict[str, Interval]:
        """The 95 % interval of each metric, from the rows whose numbers were given.

        On every rank at once.
        """
        sums = self.sums.gathered(over_ranks)
        intervals = bootstrap(sums, self.values_of)
        if self.auroc is None or not intervals:
            return intervals
        area = self.compute()["auroc"]
        binned = self._binned()
        assert binned is not None
        # Rows that reach each threshold, less those that reach the next one: [9, 4, 1] → [5, 3, 1].
        counts_TC2 = torch.from_numpy(binned.reshape(len(binned), -1, 2, 2)[..., 1])
        counts_TC2[:-1] -= counts_TC2[1:].clone()
        moves = RowSums(2)
        for rows, buckets, is_theirs in self._ranked:
            influence = auroc_influence(buckets.cpu(), is_theirs.cpu(), counts_TC2)
            moves.add(rows, torch.stack([influence, torch.ones_like(influence)], 1))

        def moved_area(sums: Tensor) -> dict[str, Tensor]:
            return {"auroc": (area + sums[..., 0]).clamp(0, 1)}

        return intervals | bootstrap(moves.gathered(over_ranks), moved_area)

    def per_class(self) -> list[dict[str, Any]]:
        """Precision, recall and F1 of each class, the commonest first; empty for numbers."""
        return class_rows(self.classes, *self._totals()[: 3 * len(self.classes)].view(3, -1))

    def counted(self) -> Counted | None:
        """Counts of the answers since the last reset; None for numbers. On every rank at once."""
        return None

    def reset(self) -> None:
        self.sums.reset()
        self._ranked.clear()
        for metric in self._metrics():
            metric.reset()

    def _rank(self, scores: Tensor, is_theirs: Tensor, rows: Tensor | None) -> None:
        """Count `[B, C]` log-odds by bucket, and keep the bucket of each row.

        The interval of the area under the curve needs the buckets.
        """
        assert self.auroc is not None
        # What is no number reaches no threshold.
        ranked = scores.clamp(max=_FARTHEST).contiguous()
        reached = torch.bucketize(ranked, self.auroc.edges.to(ranked.dtype), right=True)
        reached = torch.where(ranked.isnan(), 0, reached)
        self.auroc.update(reached, is_theirs)
        if rows is not None:
            self._ranked.append((rows, (reached - 1).clamp_(min=0).to(torch.int16), is_theirs))

    def _binned(self) -> NDArray[np.int64] | None:
        """[T, C, 2, 2] rows of all ranks by threshold, class, whether they have it, and answer."""
        if self.auroc is None:
            return None
        with self.auroc.sync_context():
            return self.auroc.confmat.cpu().numpy().copy()

    def _metrics(self) -> list[Metric]:
        return [metric for metric in self.children() if isinstance(metric, Metric)]


class _Areas(of_classes.MultilabelAUROC):
    """The area under each class's curve, from the number of thresholds that each score reaches.

    Torchmetrics compares each score with each threshold. Here a score comes as a count, is added to
    one bin, and the bins are summed up from above afterwards: a fiftieth of the time. Three
    thresholds, one class, rows that have it with 1, 3 and 3 thresholds reached:

        bins, by thresholds reached (0 to 3)        0 1 0 2
        summed up from above                        3 3 2 2

        rows answered at the thresholds 1 to 3        3 2 2
        rows not answered there, 3 less these         0 1 1

    Whole numbers add up to the same in any order, so this works where torch is deterministic, too.
    """

    # [T, C, 2, 2] rows by threshold, class, whether they have it, and whether it was answered
    confmat: Tensor

    def __init__(self, classes: int) -> None:
        super().__init__(classes, average="none", thresholds=_THRESHOLDS, validate_args=False)

    @property
    def edges(self) -> Tensor:
        edges = self.thresholds
        assert isinstance(edges, Tensor)
        return edges

    def update(self, reached_BC: Tensor, is_theirs_BC: Tensor) -> None:
        """Count rows by how many thresholds their scores reach, and whether they have the class."""
        classes = reached_BC.shape[1]
        bins = len(self.edges) + 1
        # One number for a class, whether a row has it, and the bin within. With 4 bins: a row that
        # has class 1 and reaches 3 thresholds is kind 2 * 1 + 1 = 3, and number 3 * 4 + 3 = 15.
        kinds_BC = 2 * torch.arange(classes, device=reached_BC.device) + is_theirs_BC.long()
        counts = _count_numbers(kinds_BC * bins + reached_BC, 2 * classes * bins)
        counts_C2T = counts.view(classes, 2, bins)
        answered_C2T = counts_C2T.flip(-1).cumsum(-1).flip(-1)
        not_answered_C2T = answered_C2T[..., :1] - answered_C2T
        # The first bin reaches no threshold, so it has no place in the result.
        both_C2T2 = torch.stack([not_answered_C2T, answered_C2T], -1)[:, :, 1:]
        self.confmat += both_C2T2.permute(2, 0, 1, 3)


class _Confusion(of_classes.MulticlassConfusionMatrix):
    """Counts rows by true and answered class, where torch is deterministic, too."""

    confmat: Tensor

    def update(self, answers: Tensor, targets: Tensor) -> None:
        pairs = targets * self.num_classes + answers
        self.confmat += _count_numbers(pairs, self.num_classes**2).view_as(self.confmat)


def _count_numbers(values: Tensor, length: int) -> Tensor:
    """How often each number occurs; unlike torch's `bincount` it does not wait for a GPU."""
    counts = torch.zeros(length, dtype=torch.long, device=values.device)
    return counts.index_add_(0, values.flatten(), torch.ones_like(values.flatten()))


def _log_odds(logits_BC: Tensor) -> Tensor:
    """For each class the logarithm of its probability over that of all others, in double."""
    logits_BC = logits_BC.double()
    shares_BC = logits_BC.log_softmax(-1)
    odds_BC = shares_BC - torch.log1p(-shares_BC.exp())
    # One minus a probability near 1 has no digits left, so the likeliest class is held against the
    # others themselves.
    highest_B1, likeliest_B1 = logits_BC.max(-1, keepdim=True)
    others_B1 = logits_BC.scatter(-1, likeliest_B1, -math.inf).logsumexp(-1, keepdim=True)
    return odds_BC.scatter(-1, likeliest_B1, highest_B1 - others_B1)


class SingleMetrics(TaskMetrics):
    """One class a row; of two classes `f1` is that of the second."""

    def __init__(self, classes: list[str]) -> None:
        super().__init__(classes)
        count = len(classes)
        self.counts = _Confusion(count, validate_args=False)
        self.sums = RowSums(3 * count + 1)
        self.first = int(count == 2)  # of two classes one is ranked
        if count <= _MOST_CLASSES_FOR_AUROC:
            self.auroc = _Areas(count - self.first)

    def update(self, outputs: Tensor, targets: Tensor, rows: Tensor | None = None) -> None:
        answers = outputs.argmax(-1)
        count = len(self.classes)
        self.counts.update(answers, targets)
        # A row adds to four sums. Of 3 classes, one of class 1 that was answered as class 2 adds:
        #
        #     0 to the right answers of class 1    place 1
        #     1 to the targets of class 1          place 3 + 1
        #     1 to the answers of class 2          place 6 + 2
        #     1 to the rows                        place 9
        if rows is not None:
            place_of_rows = torch.full_like(targets, 3 * count)
            places = torch.stack([targets, targets + count, answers + 2 * count, place_of_rows], 1)
            added = torch.ones_like(places)
            added[:, 0] = answers == targets
            self.sums.add(rows, added, places)
        if self.auroc is not None:
            ranked_classes = torch.arange(self.first, count, device=targets.device)
            is_theirs = targets.unsqueeze(1) == ranked_classes
            self._rank(_log_odds(outputs)[:, self.first :], is_theirs, rows)

    def _totals(self) -> Tensor:
        counts = self.counts.compute().cpu().double()
        correct = counts.diag()
        targets = counts.sum(1)
        answers = counts.sum(0)
        return torch.cat([correct, targets, answers, counts.sum().unsqueeze(0)])

    def values_of(self, sums: Tensor) -> dict[str, Tensor]:
        correct, targets, answers = sums[..., :-1].unflatten(-1, (3, -1)).unbind(-2)
        f1 = _f1(correct, targets, answers)
        accuracy = correct.sum(-1) / sums[..., -1].clamp(min=1)
        values = {
            "accuracy": accuracy,
            "macro_f1": mean_where(f1, targets + answers > 0),
            "micro_f1": accuracy,
            "macro_recall": mean_where(correct / targets.clamp(min=1), targets > 0),
        }
        return values | ({"f1": f1[..., 1]} if len(self.classes) == 2 else {})

    def per_class(self) -> list[dict[str, Any]]:
        """Scores of each class, and as what its rows were answered: `{"air": 5, "sea": 2}`."""
        counts = self.counts.compute().tolist()
        answered_of = dict(zip(self.classes, counts, strict=True))
        rows = super().per_class()
        for row in rows:
            answered = zip(self.classes, answered_of[row["class"]], strict=True)
            row["answered"] = {name: count for name, count in answered if count}
        return rows

    def counted(self) -> Counted:
        binned = self._binned()
        if binned is not None and self.first:
            # The other of two is answered where this one is not.
            binned = np.concatenate([np.flip(binned, (0, 2, 3)), binned], 1)
        return Counted(self.classes, self.counts.compute().cpu().numpy(), binned)


class MultiMetrics(TaskMetrics):
    """Several classes a row; a class is answered from its threshold on, at first one half."""

    thresholds: Tensor

    def __init__(self, classes: list[str]) -> None:
        super().__init__(classes)
        count = len(classes)
        self.counts = of_classes.MultilabelStatScores(count, average="none", validate_args=False)
        self.sums = RowSums(3 * count + 2)
        if count <= _MOST_CLASSES_FOR_AUROC:
            self.auroc = _Areas(count)
        self.exact = of_classes.MultilabelExactMatch(count, validate_args=False)
        self.register_buffer("thresholds", torch.full((count,), 0.5), persistent=False)

    def update(self, outputs: Tensor, targets: Tensor, rows: Tensor | None = None) -> None:
        probabilities = outputs.sigmoid()
        whole = targets.long()
        answered = (probabilities >= self.thresholds).long()
        self.counts.update(answered, whole)
        self.exact.update(answered, whole)
        if self.auroc is not None:
            self._rank(outputs.double(), whole > 0, rows)
        if rows is not None:
            correct = answered * whole
            is_exact = (answered == whole).all(1, keepdim=True)
            ones = torch.ones_like(is_exact)
            self.sums.add(rows, torch.cat([correct, whole, answered, is_exact, ones], 1))

    def _totals(self) -> Tensor:
        counts_C5 = self.counts.compute().double().cpu()
        correct, false_positives, _, _, targets = counts_C5.unbind(1)
        rows = counts_C5[:1, :4].sum(1)  # each row is one of the first four, for any class
        exact = self.exact.compute().double().cpu() * rows
        return torch.cat([correct, targets, correct + false_positives, exact, rows])

    def values_of(self, sums: Tensor) -> dict[str, Tensor]:
        correct, targets, answers = sums[..., :-2].unflatten(-1, (3, -1)).unbind(-2)
        return {
            "micro_f1": _f1(correct.sum(-1), targets.sum(-1), answers.sum(-1)),
            "macro_f1": _f1(correct, targets, answers).mean(-1),
            "macro_recall": (correct / targets.clamp(min=1)).mean(-1),
            "subset_accuracy": sums[..., -2] / sums[..., -1].clamp(min=1),
        }

    def counted(self) -> Counted:
        return Counted(self.classes, None, self._binned())


class NumberMetrics(TaskMetrics):
    """Errors of numbers, and how well they follow the truths."""

    def __init__(self, classes: list[str]) -> None:
        super().__init__(classes)
        self.mae = MeanAbsoluteError()
        self.mse = MeanSquaredError()
        self.r2 = _R2()
        self.pearson = PearsonCorrCoef()
        # sums of squares in fp32 lose a spread that is small against the mean
        for metric in self._metrics():
            metric.set_dtype(torch.float64)
        self.sums = RowSums(8)

    def update(self, outputs: Tensor, targets: Tensor, rows: Tensor | None = None) -> None:
        answers = outputs.flatten().double()
        truths = targets.flatten().double()
        for metric in self._metrics():
            metric.update(answers, truths)
        if rows is not None:
            errors = answers - truths
            terms = [errors.abs(), errors**2]
            terms += [truths, truths**2, answers, answers**2, answers * truths]
            terms.append(torch.ones_like(errors))
            self.sums.add(rows, torch.stack(terms, 1))

    def compute(self) -> dict[str, float]:
        # numbers that are all alike have no correlation: nan says so
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="The variance of predictions or target is close to zero"
            )
            pearson = float(self.pearson.compute())
        mae = float(self.mae.compute())
        rmse = float(self.mse.compute()) ** 0.5
        return {"mae": mae, "rmse": rmse, "r2": float(self.r2.compute()), "pearson": pearson}

    def per_class(self) -> list[dict[str, Any]]:
        return []

    def values_of(self, sums: Tensor) -> dict[str, Tensor]:
        means = sums[..., :-1] / sums[..., -1:]
        absolute, squares, truth, truth_2, answer, answer_2, both = means.unbind(-1)
        # With means over rows, a variance is the mean of squares less the squared mean.
        variance_of_truth = truth_2 - truth**2
        variance_of_answer = answer_2 - answer**2
        covariance = both - truth * answer
        return {
            "mae": absolute,
            "rmse": squares.sqrt(),
            "r2": 1 - squares / variance_of_truth,
            "pearson": covariance / (variance_of_truth * variance_of_answer).sqrt(),
        }


class _R2(R2Score):
    """R² that is NaN below two rows, where torchmetrics raises an error.

    Rows are counted after those of all ranks were added up, so that all ranks agree.
    """

    def compute(self) -> Tensor:
        return super().compute() if int(self.total) > 1 else self.residual.new_tensor(float("nan"))


def _f1(correct: Tensor, targets: Tensor, answers: Tensor) -> Tensor:
    return 2 * correct / (targets + answers).clamp(min=1)


def mean_where(values: Tensor, is_counted: Tensor) -> Tensor:
    """Mean over the last dimension of what counts; 0 where nothing does."""
    return (values * is_counted).sum(-1) / is_counted.sum(-1).clamp(min=1)


def class_rows(
    classes: list[str], correct: Tensor, targets: Tensor, answers: Tensor
) -> list[dict[str, Any]]:
    """Precision, recall and F1 of each class, the commonest first."""
    columns = {
        "precision": correct / answers.clamp(min=1),
        "recall": correct / targets.clamp(min=1),
    }
    columns["f1"] = _f1(correct, targets, answers)
    rows = list[dict[str, Any]]()
    for number, name in enumerate(classes):
        row: dict[str, Any] = {"class": name}
        for metric, values in columns.items():
            row[metric] = float(values[number])
        row["support"] = int(targets[number])
        rows.append(row)
    return sorted(rows, key=lambda row: -row["support"])
