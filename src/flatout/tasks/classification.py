"""Rows to classes (one or several) or to a number: loss, metrics, their settings, and what cutting
rows costs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.data.batches.feed import Feed, Feeds
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.gather import TOKENS
from flatout.data.info import DataInfo, Labels, TextInfo
from flatout.data.problem import Problem
from flatout.data.store.store import StoreSplit
from flatout.errors import UserError, require
from flatout.models.contract import ModelConfig
from flatout.models.encoder.transformer import Outputs
from flatout.run_log import RunLog
from flatout.tasks.abstention import HeldOutAnswers
from flatout.tasks.calibration import as_two_classes, best_thresholds, calibrated
from flatout.tasks.class_weights import ClassWeights, NamedClassesConfig, balanced, named
from flatout.tasks.metrics import MultiMetrics, TaskMetrics, monitored_metric
from flatout.tasks.mixture import Mixture
from flatout.tasks.networks import build_text_network, require_no_windows
from flatout.tasks.score_intervals import OverRanks
from flatout.tasks.task import SPLITS, Task, real_rows

if TYPE_CHECKING:
    from flatout.baselines.linear_text import QuickModel

_MOST_ROWS = 20_000  # to find temperature and thresholds by
_LEAST_ROWS = 30  # rows that were cut, and whole ones, below which a score says little
_LEAST_SHARE = 0.9  # of the rows as long as the cut, so many must have been cut


@dataclass(kw_only=True, slots=True)
class ClassificationConfig(NamedClassesConfig):
    """The loss of a classifier."""


@dataclass(frozen=True, slots=True)
class LinearBeside:
    """A linear model that answers with a network, and what it says of the rows of a store."""

    model: QuickModel
    mixture: Mixture
    answers: Mapping[str, Tensor]  # by split, `[N, C]`, as logits
    plain: QuickModel | None  # the one that the run is compared with, where it was fitted
    rival: Mapping[str, Tensor]  # what that one says


class Classifier(Task[Labels]):
    """Trains a classifier or a regression on flat batches."""

    settings = ClassificationConfig
    # what outputs are divided by before they are judged, where a row has several labels
    temperature = 1.0
    weights_C: Tensor | None
    # What answers with the network after training, where that helps.
    beside: LinearBeside | None = None
    _judged_split = "validation"
    # scores of the last test by whether a row was cut, where rows were
    cut_scores: CutScores | None = None

    def answer_beside(self, beside: LinearBeside) -> None:
        """Answer together with a linear model from now on."""
        self.beside = beside

    def take_labels(self, labels: Labels) -> None:
        if labels.problem is Problem.regression:
            problem = "targets are numbers"
            hint = "Leave it out."
            smoothing = self.config.label_smoothing
            require(not smoothing, "task.label_smoothing", f"{smoothing}, but {problem}", hint=hint)
            is_even = self.config.class_weights is ClassWeights.none
            require(is_even, "task.class_weights", f"is set, but {problem}", hint=hint)
            require(not self.config.weights, "task.weights", f"is set, but {problem}", hint=hint)
        self.labels = labels
        self.metrics = TaskMetrics.build(labels.problem, labels.classes)
        self.thresholds: list[float] = []
        """From which probability on each label is answered, where a row has several labels."""
        is_auto = self.config.class_weights is ClassWeights.auto
        weights = class_weights(labels) if is_auto else named(self.config.weights, labels.classes)
        self.register_buffer("weights_C", weights, persistent=False)

    def take_info(self, info: DataInfo) -> None:
        if not isinstance(info, TextInfo):
            raise UserError(
                "Classifier",
                f"{type(info).__name__} has no classes",
                hint="Use Tagger for tags and GramDecoder for bit strings.",
            )
        require(
            info.problem is not Problem.none,
            "Classifier",
            "data.problem=none has no classes",
            hint="Use MaskedLanguageModel for texts without labels.",
        )
        if self.is_built:
            require_no_windows(info)
        self.take_labels(info.labels)

    def build_model(self, config: ModelConfig, info: DataInfo) -> nn.Module:
        outputs = Outputs(self.labels.classes, self.labels.problem.value)
        return build_text_network(config, info, outputs)

    @property
    def metric_names(self) -> list[str]:
        return self.metrics.names()

    @property
    def usual_metric(self) -> str:
        return monitored_metric(self.labels.problem)

    def per_class(self) -> list[dict[str, Any]]:
        return self.metrics.per_class()

    def loss(self, outputs: Tensor, batch: FlatBatch) -> Tensor:
        loss_sum = self.sum_losses(real_rows(outputs, batch).float(), self._targets(batch))
        return loss_sum / batch.step_rows

    def judge(self, batch: FlatBatch) -> Tensor:
        outputs = self._answers_of(batch, self._judged_split)
        targets = self._targets(batch)
        answers = self.unscaled(outputs)
        self.metrics.update(answers, targets, self.kept_rows(batch))
        is_number = self.labels.problem is Problem.regression
        self.add_answers(answers, targets if is_number else targets.long())
        if self.cut_scores is not None:
            self.cut_scores.add(answers, targets, real_rows(batch.rows, batch))
        return self.sum_losses(outputs, targets)

    def start_judging(self, split: str) -> None:
        super().start_judging(split)
        self._judged_split = SPLITS[split]
        self.cut_scores = None
        feed = None if self._trainer is None else self._trainer.test_dataloaders
        if split != "test" or not isinstance(feed, Feed) or not isinstance(self.info, TextInfo):
            return
        # a loader of other rows says nothing of those of the store
        if feed.split is self.info.store.splits.get(split):
            cut_rows = self.info.facts["splits"][split]["truncated_rows"]
            self.cut_scores = CutScores.of(feed.split, cut_rows, self.metrics)

    def truncation(self, metric: str | None = None) -> dict[str, Any]:
        if self.cut_scores is None:
            return {}
        return self.cut_scores.report(metric, self.usual_metric, self.over_ranks)

    def answer(self, batch: FlatBatch) -> dict[str, Tensor]:
        """Probabilities of the classes, or the values of a regression."""
        outputs = real_rows(self.outputs(batch), batch).float()
        if self.labels.problem is Problem.regression:
            return {"values": self.unscaled(outputs)}
        scaled = outputs / self.temperature
        is_single = self.labels.problem is Problem.single
        return {"probabilities": scaled.softmax(-1) if is_single else scaled.sigmoid()}

    def prepare_training(self, feeds: Feeds, log: RunLog, seed: int) -> dict[str, Any]:
        short = {"validation": "val"}
        ceilings = self.info.ceilings if isinstance(self.info, TextInfo) else {}
        if not ceilings:
            return {}
        metrics = {f"{short.get(split, split)}/accuracy": best for split, best in ceilings.items()}
        return {"baseline": {"name": "known ceiling", "metrics": metrics}}

    def tune_answers(self, feeds: Feeds, log: RunLog) -> dict[str, Any]:
        """Temperature, thresholds and sureness, found on the validation rows."""
        problem = self.labels.problem
        outputs, targets, rows = self.answers(feeds.validation)
        if problem is Problem.regression:
            self.held_out = HeldOutAnswers.of_numbers(self.unscaled(outputs), targets)
            return {}
        choices = outputs, targets, rows
        if problem is Problem.multi:
            choices = as_two_classes(outputs, targets, rows)
        calibration = calibrated(*choices)
        self.temperature = calibration.temperature
        facts = calibration.report(log)
        scaled = outputs / self.temperature
        if problem is Problem.single:
            self.held_out = HeldOutAnswers.of_classes(scaled.softmax(-1), targets)
            return facts
        shares = scaled.sigmoid()
        self.thresholds = best_thresholds(shares, targets)
        least = torch.tensor(self.thresholds)
        self.held_out = HeldOutAnswers.of_classes(shares, targets, least)
        assert isinstance(self.metrics, MultiMetrics)
        self.metrics.thresholds.copy_(least)
        span = f"{min(self.thresholds):.2f} to {max(self.thresholds):.2f}"
        evidence = "on the validation rows; 0.50 where fewer than 20 of them have it"
        log.decision("thresholds", span, "best F1 of each label", evidence)
        return facts

    def count_answers(self) -> None:
        self.counted = self.metrics.counted()

    def answers(self, feed: Feed) -> list[Tensor]:
        """Outputs, targets and numbers of a feed's first rows, on the host."""
        split = ""
        if self.beside is not None:
            splits = self.info.store.splits
            split = next((name for name in splits if splits[name] is feed.split), "")

        def answer_rows(batch: FlatBatch) -> tuple[Tensor, ...]:
            return (
                self._answers_of(batch, split),
                self._targets(batch),
                real_rows(batch.rows, batch),
            )

        return self.gathered(feed, answer_rows, most=_MOST_ROWS)

    def unscaled(self, outputs: Tensor) -> Tensor:
        """Outputs as they are judged: a regression learns standardised ones; thresholds are of
        calibrated ones.
        """
        if self.labels.problem is Problem.multi:
            return outputs / self.temperature
        if self.labels.problem is Problem.single:
            return outputs
        return outputs.squeeze(-1) * self.labels.spread + self.labels.mean

    def _answers_of(self, batch: FlatBatch, split: str) -> Tensor:
        """The network's answers to the real rows of a batch, with those of a linear model.

        The network answers alone for rows that are of no split of the store.
        """
        outputs_BC = real_rows(self.outputs(batch), batch).float()
        if self.beside is None or split not in self.beside.answers:
            return outputs_BC
        rows_B = real_rows(batch.rows, batch).cpu()
        linear_BC = self.beside.answers[split][rows_B].to(outputs_BC)
        return self.beside.mixture.mix(outputs_BC, linear_BC)

    def _targets(self, batch: FlatBatch) -> Tensor:
        if self.labels.problem is Problem.multi:
            return real_rows(batch.multi_hot(self.labels.num_outputs), batch)
        assert batch.targets is not None
        return real_rows(batch.targets, batch)

    def sum_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum of the losses of some rows, from `[B, C]` outputs; override it for another loss."""
        problem = self.labels.problem
        weights_C = self.weights_C
        smoothing = self.config.label_smoothing
        if problem is Problem.single:
            return F.cross_entropy(
                outputs, targets, weight=weights_C, reduction="sum", label_smoothing=smoothing
            )
        if problem is Problem.multi:
            targets = targets * (1 - smoothing) + smoothing / 2 if smoothing else targets
            losses = F.binary_cross_entropy_with_logits(
                outputs, targets, pos_weight=weights_C, reduction="sum"
            )
            return losses / self.labels.num_outputs
        return F.mse_loss(
            outputs.squeeze(-1), (targets - self.labels.mean) / self.labels.spread, reduction="sum"
        )


def class_weights(labels: Labels) -> Tensor:
    """Weight of each class, from its share of the training rows."""
    # One class a row: rows / (classes x rows of the class), which is one on average over the
    # training rows. Several: the weight of a present label against an absent one, absent / present,
    # held within 1/20 and 20.
    if labels.problem is Problem.single:
        return balanced(labels.counts)
    counts_C = torch.tensor(labels.counts, dtype=torch.float32).clamp(min=1)
    return ((labels.num_rows - counts_C) / counts_C).clamp(0.05, 20)


class CutScores:
    """What cutting costs: the metrics of rows that were cut and of rows that were not, over one
    pass of a split.
    """

    # A store has tokens after the cut, and how many rows were cut. All of these have the same
    # length. The few whole rows of just that length count with them.

    def __init__(self, metrics: TaskMetrics, is_cut: Tensor, cut_rows: int) -> None:
        self.metrics = metrics
        self.is_cut = is_cut
        self.cut_rows = cut_rows
        metrics.auroc = None  # no sum over rows

    @classmethod
    def of(cls, split: StoreSplit, cut: int, metrics: TaskMetrics) -> CutScores | None:
        """Scores of a split, counted in a copy of `metrics`.

        None where too few rows were cut, or too few are whole.
        """
        lengths = torch.from_numpy(split.lengths(TOKENS).copy())
        is_full = lengths == lengths.max()
        filled = int(is_full.sum())
        whole = len(lengths) - filled
        if cut < max(_LEAST_ROWS, _LEAST_SHARE * filled) or whole < _LEAST_ROWS:
            return None
        return cls(copy.deepcopy(metrics), is_full, cut)

    def add(self, outputs: Tensor, targets: Tensor, rows: Tensor) -> None:
        """Count answers; `rows`: the numbers of their rows in the split."""
        self.metrics.update(outputs, targets, self.is_cut[rows.cpu()].long())

    def report(self, named: str | None, usual: str, over_ranks: OverRanks) -> dict[str, Any]:
        """The metric of cut rows and of whole rows, and how many there are of each.

        Where the `named` metric is no sum over rows, it is the usual one. Every rank must call it.
        """
        sums_2S = self.metrics.sums.gathered(over_ranks)[:2]
        whole_rows, full_rows = sums_2S[:, -1].tolist()
        if whole_rows + full_rows != len(self.is_cut):
            return {}
        values = self.metrics.values_of(sums_2S)
        name = named if named in values else usual
        whole, cut = values[name].tolist()
        rows = {
            "cut_rows": self.cut_rows,
            "equal_rows": int(full_rows) - self.cut_rows,
            "whole_rows": int(whole_rows),
        }
        return {"metric": f"test/{name}", "cut": cut, "whole": whole, **rows}
