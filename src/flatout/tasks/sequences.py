"""Recordings to numbers: an estimate at each time, or a forecast; loss, metrics and baselines.

The loss is that of scaled values, so targets of any unit weigh alike; metrics and answers are in
the targets' own units. Chunks that continue each other carry the network's hidden state from batch
to batch. Training samples may get noise, offsets and smoothing: drawn for each batch, on the
device, by the run's random numbers. Sizes are in the unit of each feature. Targets stay as they
are; of a forecast only the window is changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.data.batches.feed import Feeds
from flatout.data.batches.flat_batch import FlatBatch, rows_on_device
from flatout.data.batches.kept_tensors import count_up
from flatout.data.info import DataInfo
from flatout.data.sequences.info import SequenceInfo
from flatout.errors import UserError, check_settings, require, setting
from flatout.models.contract import ModelConfig
from flatout.models.rnn import smooth
from flatout.models.series import answers_of, flatten, rectangle
from flatout.run_log import RunLog
from flatout.tasks.classification import Classifier
from flatout.tasks.error_intervals import ErrorCollector
from flatout.tasks.score_intervals import Interval
from flatout.tasks.sequence_baselines import Baseline, build_baselines, judge_label_ridge
from flatout.tasks.sequence_scores import SequenceScores, names_of
from flatout.tasks.task import SPLITS, Forward, Task, real_rows, real_tokens

_SHOWN = ("rmse", "mae", "max_error", "r2")
SequenceLoss = StrEnum("SequenceLoss", "mse mae huber")
_LOSSES: dict[str, Any] = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": F.huber_loss}


@dataclass(kw_only=True, slots=True)
class SequenceRegressionConfig:
    """The loss of a network on recordings."""

    loss: SequenceLoss = setting(
        SequenceLoss.mse, "mse, mae, or huber: squared up to one scaled unit, absolute above."
    )
    baselines: bool = setting(
        True, "Whether ridge regression and the last value are computed beside."
    )

    def __post_init__(self) -> None:
        check_settings(self, "task")


class SequenceRegressor(Task[None]):
    """Trains a network on recordings."""

    settings = SequenceRegressionConfig
    smaller_rows = "Shorten rows with data.lookback or data.chunk."
    needs_info = True
    labels_are_of_tokens = True  # a batch's targets say of each sample which columns were measured
    _augment: Augment
    _log: RunLog | None = None
    _split = "train"
    _collects_errors = False
    _errors: ErrorCollector | None = None  # of the validation that is under way
    _mark: Any = None

    def take_info(self, info: DataInfo) -> None:
        if not isinstance(info, SequenceInfo) or info.shape.labels:
            raise UserError(
                "SequenceRegressor",
                f"{type(info).__name__} has no recordings",
                hint="Use SequenceData.",
            )
        self.info = info
        self.shape = info.shape
        self.reads_rows = info.shape.is_stateful
        self.shift_K, self.factor_K = map(torch.tensor, info.scaler.of_targets(self.shape.targets))
        self.scores = SequenceScores(
            len(info.recording_names), info.targets, self.factor_K.tolist()
        )
        self.baselines: list[Baseline] = []
        # answers of a row of each split on average, by which the loss is divided
        self._steps_a_row = {"train": self._count_steps("train")}
        for split in SPLITS.values():
            if split in info.store.splits:
                self._steps_a_row[split] = self._count_steps(split)
        for split in self._steps_a_row:
            share = info.measured_share(split)
            require(
                share > 0,
                "data.target",
                f"no target of the {split} split was measured",
                hint="Give it recordings with targets of their own.",
            )
            self._steps_a_row[split] *= share
        self._augment = Augment(info)
        self._continued: dict[tuple[str, torch.device], Tensor] = {}

    def _count_steps(self, split: str) -> float:
        """How many answers a row of a split has on average."""
        if self.shape.is_each_step:
            lengths = self.info.rows_of(split).lengths
            if len(lengths):
                return float(np.mean(lengths))
        return float(max(1, self.shape.horizon))

    def build_model(self, config: ModelConfig, info: DataInfo) -> nn.Module:
        return config.build(shape=self.shape)

    def prepare_training(self, feeds: Feeds, log: RunLog, seed: int) -> dict[str, Any]:
        """Solve the baselines; a network that learns what the ridge leaves gets it here."""
        self._log = log
        residual = self.network.residual_of()
        if not self.config.baselines and residual is None:
            return {}
        self.baselines = build_baselines(self.info)
        ridge, *others = self.baselines
        if residual is not None:
            residual.set(ridge.ridge.weight, ridge.ridge.bias)
        facts = dict[str, float]()
        for split, metrics in ridge.metrics.items():
            for name, value in metrics.items():
                facts[f"{split}/{name}"] = value
        for other in others:
            for split, metrics in other.metrics.items():
                facts[f"{split}/rmse of the {other.name}"] = metrics["rmse"]
        return {"baseline": {"name": ridge.name, "metrics": facts}}

    @property
    def usual_metric(self) -> str:
        return "rmse" if len(self.scores.targets) == 1 else "mse_scaled"

    @property
    def metric_names(self) -> list[str]:
        return names_of(self.scores.targets)

    def training_loss(self, batch: FlatBatch, model: Forward | None = None) -> Tensor:
        self._begin(batch, "train")
        return super().training_loss(self._augment(batch), model)

    def loss(self, outputs: Tensor, batch: FlatBatch) -> Tensor:
        return self._sum_of_losses(*self._real(outputs.float(), batch), rows=batch.step_rows)

    def judge(self, batch: FlatBatch) -> Tensor:
        answers, truths = self.answers_and_truths(batch)
        rows = batch.rows[: batch.num_real].numpy()
        recordings = self.info.recording_of_rows(self._split)[rows]
        recording = torch.from_numpy(recordings.astype(np.int64))
        counts = torch.full_like(recording, max(1, self.shape.horizon))  # answers of each row
        if self.shape.is_each_step:
            counts = batch.lengths[: batch.num_real]
        places = recording.repeat_interleave(counts).to(answers.device, non_blocking=True)
        self.scores.add(answers.flatten(0, -2), truths.flatten(0, -2), places)
        if self._errors is not None:
            distances = (answers - truths).abs() * self.factor_K.to(answers.device)
            answers_of_rows = counts.numpy() if self.shape.is_each_step else 1
            self._errors.add(distances.flatten(1), np.repeat(rows, answers_of_rows))
        if self.own_metrics:
            values_NK = self.in_units(answers).flatten(0, -2)
            truths_NK = self.in_units(truths).flatten(0, -2)
            is_measured = ~truths_NK.isnan().any(-1)
            self.add_answers(values_NK[is_measured], truths_NK[is_measured])
        return self._sum_of_losses(answers, truths, split=self._split)

    def answer(self, batch: FlatBatch) -> dict[str, Tensor]:
        """Answers in the targets' own units: `[T, K]`, `[B, K]`, or `[B, H, K]` of a forecast."""
        return {"values": self.in_units(self.answers_and_truths(batch)[0])}

    def answers_and_truths(self, batch: FlatBatch) -> tuple[Tensor, Tensor]:
        """Scaled answers to the rows that count, and what they should be."""

        def answer(part: FlatBatch) -> Tensor:
            self._begin(part, self._split)
            return self.model(part)

        return self._real(self.answer_in_pieces(batch, answer).float(), batch)

    def in_units(self, scaled: Tensor) -> Tensor:
        return scaled * self.factor_K.to(scaled.device) + self.shift_K.to(scaled.device)

    def tune_answers(self, feeds: Feeds, log: RunLog) -> dict[str, Any]:
        """Let the next validation, of the best weights, keep how far its answers are off."""
        # of several ranks each has a part of the rows
        self._collects_errors = feeds.validation.plan.world == 1
        return {}

    def count_answers(self) -> None:
        super().count_answers()
        if self._errors is None:
            return
        recordings = self.info.recording_of_rows("validation")
        span = self.shape.horizon or self.shape.lookback or 1
        self.held_out_errors = self._errors.held_out(recordings, span)
        self._collects_errors = False
        self._errors = None

    def start_judging(self, split: str) -> None:
        self._start_pass(SPLITS[split])
        self.scores.reset()
        self._errors = None
        if self._collects_errors and self._split == "validation":
            self._errors = ErrorCollector()

    def judged(self) -> dict[str, float]:
        return self.scores.values()

    def intervals(self) -> dict[str, Interval]:
        return self.scores.intervals()

    def on_predict_start(self) -> None:
        self._start_pass("test" if "test" in self.info.segments else "validation")

    def _start_pass(self, split: str) -> None:
        self._split = split
        if (carried := self.network.carried_of_others) is not None:
            carried.reset()

    def on_test_epoch_end(self) -> None:
        super().on_test_epoch_end()
        if self._log is not None and self.baselines and self.trainer.is_global_zero:
            for line in self.compare("test"):
                self._log.say(line)

    def compare(self, split: str) -> list[str]:
        """A table of the network, its baselines and the known floor: a line for each."""
        rows = [(type(self.model).__name__, self.results)]
        if self.shape.targets > 1:
            for name, values in self.scores.of_targets.items():
                rows.append((f"  {name}", values))
        for baseline in self.baselines:
            rows.append((baseline.name, baseline.metrics[split]))
        lines = [f"{split:<26}" + "".join(f"{name:>12}" for name in _SHOWN)]
        for name, values in rows:
            figures = "".join(f"{values[metric]:>12.5g}" for metric in _SHOWN)
            lines.append(f"{name:<26}{figures}")
        for name, floor in self.info.floors.items():
            lines.append(f"{'known floor of ' + name:<26}{floor:>12.5g}")
        return lines

    # Chunks: what goes from one batch to the next.

    def begin_step(self) -> None:
        self._mark = None if self.network.carried is None else self.network.carried.mark()

    def reset_step(self) -> None:
        """Go back to the states that the step began with, as its passes are repeated."""
        if self.network.carried is not None:
            self.network.carried.go_back(self._mark)

    def step_tensors(self) -> list[Tensor]:
        carried = self.network.carried
        return [] if carried is None else carried.tensors()

    def position_state(self) -> dict[str, Any]:
        carried = self.network.carried
        return {} if carried is None else {"carried": carried.state_dict()}

    def load_position_state(self, of_ranks: list[dict[str, Any]], rank: int) -> None:
        carried = self.network.carried
        if carried is None:
            return
        # On another number of ranks than before, a row may continue a row of any rank.
        if len(of_ranks) == self.trainer.world_size:
            of_ranks = of_ranks[rank : rank + 1]
        carried.load_state_dict([position.get("carried", {}) for position in of_ranks])

    def _begin(self, batch: FlatBatch, split: str) -> None:
        """Say to the states that are carried on which rows the rows of the batch continue."""
        carried = self.network.carried if self.model.training else self.network.carried_of_others
        if carried is not None:
            rows_B = rows_on_device(batch)
            carried.begin(batch, rows_B, self._continued_rows(split, rows_B.device)[rows_B])

    def _continued_rows(self, split: str, device: torch.device) -> Tensor:
        """For each row of a split the one that it continues, -2 for none; copied to a device once.

        Recordings of 3 and 2 rows: -2 0 1 -2 3.
        """
        key = (split, device)
        if key not in self._continued:
            recording = self.info.recording_of_rows(split)
            rows = np.arange(-1, len(recording) - 1)
            rows[np.append(True, recording[1:] != recording[:-1])[: len(rows)]] = -2
            # A validation may be the first that asks, in inference mode.
            with torch.inference_mode(False):
                self._continued[key] = torch.from_numpy(rows).to(device)
        return self._continued[key]

    def _real(self, outputs: Tensor, batch: FlatBatch) -> tuple[Tensor, Tensor]:
        """Answers to the rows that count, and the truths: NaN where no target was measured."""
        real = real_tokens if self.shape.is_each_step else real_rows
        answers = real(outputs, batch)
        truths = real(answers_of(batch, self.shape), batch)
        if batch.targets is not None:
            measured = answers_of(replace(batch, tokens=batch.targets), self.shape)
            truths = truths.masked_fill(real(measured, batch) == 0, torch.nan)
        if self.shape.is_each_step and batch.is_buffer:
            is_behind_T = count_up(batch.num_tokens, truths.device) >= batch.offsets[-1]
            truths = truths.masked_fill(is_behind_T.unsqueeze(1), torch.nan)
        return answers, truths

    def sum_losses(self, answers: Tensor, truths: Tensor) -> Tensor:
        """Sum of the losses of some scaled answers; override it for another loss."""
        return _LOSSES[self.config.loss](answers, truths, reduction="sum")

    def _sum_of_losses(
        self, answers: Tensor, truths: Tensor, *, rows: int | Tensor = 1, split: str = "train"
    ) -> Tensor:
        """The losses of all answers, divided by the answers of an average row and by `rows`."""
        # An answer to what was not measured costs nothing, nor one behind the rows of a buffer.
        has_more = self.shape.is_each_step and isinstance(rows, Tensor)
        if has_more or self.info.measured(split) is not None:
            truths = torch.where(truths.isnan(), answers.detach(), truths)
        total = self.sum_losses(answers, truths)
        return total / (self._steps_a_row[split] * self.shape.targets * rows)


class SequenceLabeller(Classifier):
    """Trains a network that answers one class or number for each recording."""

    needs_info = True

    def take_info(self, info: DataInfo) -> None:
        if not isinstance(info, SequenceInfo) or not info.shape.labels:
            raise UserError(
                "SequenceLabeller",
                f"{type(info).__name__} has no labels",
                hint="Use data.problem=label.",
            )
        self.shape = info.shape
        self._augment = Augment(info)
        self.take_labels(info.labels)

    def build_model(self, config: ModelConfig, info: DataInfo) -> nn.Module:
        return config.build(shape=self.shape)

    def prepare_training(self, feeds: Feeds, log: RunLog, seed: int) -> dict[str, Any]:
        return {"baseline": judge_label_ridge(self.info)}

    def training_loss(self, batch: FlatBatch, model: Forward | None = None) -> Tensor:
        return super().training_loss(self._augment(batch), model)


class Augment:
    """Changes the inputs of a training batch at random: smooths, shifts, and adds noise."""

    def __init__(self, info: SequenceInfo) -> None:
        self.shape = info.shape
        config = info.config
        ones = dict.fromkeys(info.columns, 1.0)
        factor = dict(zip(info.columns, info.scaler.factor, strict=True))
        # sizes of smoothing, offsets and noise; None where the settings ask for none
        self._sizes = [
            _scale_sizes(config.low_pass, ones),
            _scale_sizes(config.offset, factor),
            _scale_sizes(config.noise, factor),
        ]

    def __call__(self, batch: FlatBatch) -> FlatBatch:
        if all(size_C is None for size_C in self._sizes):
            return batch
        values_BLC = rectangle(batch)
        low_pass_C, offset_C, noise_C = self._sizes_on(values_BLC.device)
        lookback = self.shape.lookback if self.shape.horizon else values_BLC.shape[1]
        inputs_BLC = values_BLC[:, :lookback]
        rest_BLC = values_BLC[:, lookback:]
        if low_pass_C is not None:
            # An exponential mean over each row, whose memory is drawn between 0 and the size set.
            memory_B1C = torch.rand_like(inputs_BLC[:, :1]) * low_pass_C
            nothing_before = inputs_BLC.new_zeros(1, len(inputs_BLC), inputs_BLC.shape[2] + 1)
            smoothed_BLC, _ = smooth(inputs_BLC, memory_B1C, nothing_before)
            inputs_BLC = torch.where(low_pass_C > 0, smoothed_BLC, inputs_BLC)
        if offset_C is not None:
            inputs_BLC = inputs_BLC + torch.randn_like(inputs_BLC[:, :1]) * offset_C
        if noise_C is not None:
            inputs_BLC = inputs_BLC + torch.randn_like(inputs_BLC) * noise_C
        return replace(batch, tokens=flatten(torch.cat([inputs_BLC, rest_BLC], 1), batch))

    def _sizes_on(self, device: torch.device) -> list[Tensor | None]:
        """The sizes on the device of a batch; copied there once."""
        for number, size_C in enumerate(self._sizes):
            if size_C is not None:
                self._sizes[number] = size_C.to(device)
        return self._sizes


def _scale_sizes(sizes: dict[str, float], factors: dict[str, float]) -> Tensor | None:
    """`[C]` sizes in scaled units, zero for columns that are not named; None if none is named."""
    if not sizes:
        return None
    return torch.tensor([sizes.get(name, 0.0) / factor for name, factor in factors.items()])
