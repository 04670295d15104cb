"""A trained network on recordings, with its columns, scales and sampling: tables in, answers in the targets' units out.

Recordings are read, filled, cut and resampled as in training. A network that answers each sample streams: blocks of
samples go through with the hidden state carried on, so memory is that of one file. Windows are an index into the
samples here as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flatout.data.batches.feed import Feed
from flatout.data.batches.plan import Layout, PlanSettings
from flatout.data.sequences.choices import Missing
from flatout.data.sequences.info import SequenceInfo
from flatout.data.sequences.recordings import ReadingNotes, Recording, RecordingRules, read_recordings
from flatout.data.sequences.shape import Scaler, SequenceShape
from flatout.data.sequences.windows import Rows, Segments, estimate_windows, forecast_windows
from flatout.data.store.store import Ragged, StoreSplit
from flatout.data.tables.table import Table
from flatout.engine.precision import Precision, answering
from flatout.errors import UserError, require
from flatout.inference.folder import ModelFolder
from flatout.models import kind_of, model_class
from flatout.tasks.task import Task

Floats = NDArray[np.float64]
_SAMPLES_A_BLOCK, _ROWS_A_BATCH = 4096, 1024
_OTHER_RATE = 0.05
"""Share by which the median time between samples may differ from training."""


@dataclass(slots=True)
class SequencePredictor:
    """Answers for recordings; made by `SequencePredictor.load(RUN)` or from a run's Result."""

    problem: ClassVar[str] = "sequence"

    model: nn.Module
    shape: SequenceShape
    rules: RecordingRules
    """How tables become recordings; integrals and `rules.columns` are what the network reads."""
    scaler: Scaler
    """Of the columns that are read, then of the targets that are not."""
    names: list[str]
    """Of the targets, or of the classes."""
    step_s: float | None
    """Median seconds between two samples of the training recordings."""
    label: str | None = None
    """The column of labels, for `evaluate`."""
    label_scale: tuple[float, float] = (0.0, 1.0)
    has_classes: bool = False
    precision: Precision = Precision.fp32
    notes: ReadingNotes = field(default_factory=ReadingNotes)

    @classmethod
    def of(cls, task: Task, info: SequenceInfo) -> SequencePredictor:
        """The predictor of a trained task."""
        shape, labels = info.shape, info.labels if info.shape.labels else None
        columns = info.columns[len(info.rules.cumulate) : shape.inputs]
        rules = replace(info.rules, columns=columns, label=None)
        names = info.targets if labels is None else labels.classes
        scale = (0.0, 1.0) if labels is None else (labels.mean, labels.spread)
        step = info.facts["step"]
        settings: dict[str, Any] = {"label_scale": scale, "has_classes": bool(info.facts["classes"])}
        settings["label"] = info.rules.label
        return cls(task.model.eval(), shape, rules, info.scaler, names, step, **settings)

    @classmethod
    def load(cls, run: str | Path, device: str | torch.device = "cpu") -> SequencePredictor:
        """The best model of a run, from the run's folder or its `model` folder."""
        folder = ModelFolder.find(run)
        with folder.read():
            settings = folder.settings()
            data, described = settings["data"], settings["model"]
            shape, rules = SequenceShape(**data["shape"]), data["rules"]
            config: Any = model_class(described["kind"], folder.settings_file)(**described["config"])
            model: nn.Module = config.build(shape=shape)
            model.load_state_dict(folder.weights())
            return cls(
                model=model.to(torch.device(device)).eval(),
                shape=shape,
                rules=RecordingRules(**{**rules, "missing": Missing(rules["missing"])}),
                scaler=Scaler(**data["scaler"]),
                names=folder.labels(),
                step_s=data["step_s"],
                label=data.get("label"),
                label_scale=tuple(data["label_scale"]),
                has_classes=data["has_classes"],
            )

    def save(self, folder: Path, model_config: Any) -> None:
        """Write the `model` folder; `model_config` must be of a class in MODELS."""
        data = {
            "shape": asdict(self.shape),
            "rules": {**asdict(self.rules), "missing": self.rules.missing.value},
            "scaler": asdict(self.scaler),
            "step_s": self.step_s,
            "label": self.label,
            "label_scale": list(self.label_scale),
            "has_classes": self.has_classes,
        }
        ModelFolder(folder).write(
            self.model, kind_of(model_config), model_config, self.names, {"problem": self.problem, "data": data}
        )

    @property
    def columns(self) -> list[str]:
        """What the network reads, in this order."""
        return [*(f"{name} cumulated" for name in self.rules.cumulate), *self.rules.columns]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def predict(self, rows: Sequence[Any]) -> list[NDArray[Any]]:
        """Answers to recordings given as arrays `[samples, columns]` in their own units."""
        return [self.answer(np.asarray(each, dtype=np.float64)) for each in rows]

    def read(self, table: Table, rules: RecordingRules | None = None) -> Iterator[Recording]:
        """The recordings of a table, as in training; another sampling is refused. `rules` may read more columns."""
        for recording in read_recordings(table, rules or self.rules, self.notes):
            self._require_same_rate(recording)
            yield recording

    def answer(self, values: Floats) -> NDArray[Any]:
        """Of one recording: `[samples, K]` estimates, `[H, K]` the next samples, or `[labels]` scores or the number."""
        require(len(values) > 0, "predict", "a recording without a sample", hint="Leave it out.")
        return np.concatenate(list(self.stream(values)))

    @torch.inference_mode()
    def stream(self, values: Floats) -> Iterator[NDArray[Any]]:
        """The same in blocks, one after the other."""
        self.model.eval()
        scaled = self._scale(values)
        with answering(self.precision, self.device):
            if self.shape.labels:
                yield self._label(scaled)
            elif self.shape.horizon:
                yield self._forecast(scaled)
            elif self.shape.lookback is not None:
                yield self._in_units(self._of_rows(scaled, _windows(len(scaled), self.shape.lookback)))
            else:
                yield from map(self._in_units, self._of_steps(scaled))

    @torch.inference_mode()
    def compare(self, values: Floats) -> Iterator[tuple[Tensor, Tensor]]:
        """`[N, K]` scaled answers and what they should be, block after block; `values` hold the targets too."""
        self.model.eval()
        scaled, shape, start = self.scaler.scale(values), self.shape, 0
        truths = torch.from_numpy(scaled[:, -shape.targets :])
        with answering(self.precision, self.device):
            if shape.horizon:
                yield from self._compare_windows(scaled)
                return
            whole = shape.lookback is not None
            blocks = (
                [self._of_rows(scaled, _windows(len(scaled), shape.lookback or 1))] if whole else self._of_steps(scaled)
            )
            for answers in blocks:
                yield answers, truths[start : start + len(answers)]
                start += len(answers)

    def _compare_windows(self, scaled: NDArray[np.float32]) -> Iterator[tuple[Tensor, Tensor]]:
        """The forecasts of every window, and the samples behind it."""
        lookback, horizon, targets = self.shape.lookback or 1, self.shape.horizon, self.shape.targets
        zero = np.zeros(1, np.int64)
        rows = forecast_windows(Segments(zero, zero, np.array([len(scaled)]), zero), lookback, horizon)
        behind = np.lib.stride_tricks.sliding_window_view(scaled[lookback:, -targets:], horizon, axis=0)
        for start in range(0, len(rows.start), _SAMPLES_A_BLOCK):
            block = slice(start, start + _SAMPLES_A_BLOCK)
            answers = self._of_rows(scaled, Rows(rows.start[block], rows.length[block], rows.recording[block]))
            truths = torch.from_numpy(np.ascontiguousarray(behind[block].transpose(0, 2, 1)))
            yield answers.flatten(0, 1), truths.flatten(0, 1)

    def _of_steps(self, scaled: NDArray[np.float32]) -> Iterator[Tensor]:
        """Block after block, with the hidden state carried on."""
        model: Any = self.model
        if not hasattr(model, "run"):  # a network of the user's own sees the whole recording
            yield self._of_rows(scaled, Rows(np.array([0]), np.array([len(scaled)], np.int32), np.array([0])))
            return
        state = model.make_state(1, self.device)
        for start in range(0, len(scaled), _SAMPLES_A_BLOCK):
            block = torch.from_numpy(scaled[start : start + _SAMPLES_A_BLOCK, : self.shape.inputs])
            answers, state = model.run(block.unsqueeze(0).to(self.device), state)
            yield answers[0].float().cpu()

    def _forecast(self, scaled: NDArray[np.float32]) -> NDArray[Any]:
        """The samples after the last one."""
        lookback, horizon = self.shape.lookback or 1, self.shape.horizon
        what = f"data.lookback={lookback}, but the recording has {len(scaled)} samples"
        require(len(scaled) >= lookback, "predict", what, hint="Name a longer recording.")
        window = np.concatenate([scaled[-lookback:], np.zeros((horizon, scaled.shape[1]), np.float32)])
        rows = Rows(np.array([0]), np.array([lookback + horizon], np.int32), np.array([0]))
        return self._in_units(self._of_rows(window, rows)[0])

    def _label(self, scaled: NDArray[np.float32]) -> NDArray[Any]:
        rows = Rows(np.array([0]), np.array([len(scaled)], np.int32), np.array([0]))
        outputs = self._of_rows(scaled, rows)[0]
        if self.has_classes:
            return outputs.softmax(-1).numpy()
        mean, spread = self.label_scale
        return (outputs * spread + mean).numpy()

    def _of_rows(self, scaled: NDArray[np.float32], rows: Rows) -> Tensor:
        """What the network answers to each row, in their order."""
        column = Ragged(scaled, rows.start, rows.length)
        split = StoreSplit("rows", len(rows.start), {"tokens": column})
        layout = Layout(getattr(self.model, "layout", Layout.flat))
        plan = PlanSettings(rows_per_batch=_ROWS_A_BATCH, shuffle=False, layout=layout)
        found, order = [], []
        for batch in Feed(split, plan, device=self.device):
            found.append(self.model(batch).float().cpu())
            order.append(batch.rows)
        answers = torch.cat(found)
        return answers if self.shape.is_each_step else answers[torch.cat(order).argsort()]

    def _scale(self, values: Floats) -> NDArray[np.float32]:
        """Columns that are read, scaled; zeros for targets that are not."""
        what = f"{values.shape[1]} columns"
        require(values.shape[1] == self.shape.inputs, "predict", what, allowed=", ".join(self.columns))
        others = self.shape.targets if not (self.shape.horizon or self.shape.labels) else 0
        inputs = Scaler(self.scaler.shift[: self.shape.inputs], self.scaler.factor[: self.shape.inputs]).scale(values)
        return np.concatenate([inputs, np.zeros((len(inputs), others), np.float32)], axis=1)

    def _in_units(self, scaled: Tensor) -> NDArray[Any]:
        shift, factor = self.scaler.of_targets(self.shape.targets)
        return scaled.numpy() * np.array(factor) + np.array(shift)

    def _require_same_rate(self, recording: Recording) -> None:
        if self.rules.step is not None or self.step_s is None or self.rules.time is None:
            return
        step = float(np.median(np.diff(recording.times)))
        if abs(step / self.step_s - 1) > _OTHER_RATE:
            what = f"{recording.name} has a sample every {step:g} s, the training recordings every {self.step_s:g} s"
            raise UserError("data.time", what, hint=f"Resample it, or train with data.step={self.step_s:g}.")


def _windows(samples: int, lookback: int) -> Rows:
    zero = np.zeros(1, np.int64)
    return estimate_windows(Segments(zero, zero, np.array([samples]), zero), lookback)
