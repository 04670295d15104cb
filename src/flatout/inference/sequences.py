"""The predictor of a run on recordings: it answers tables in the units of the targets.

It has the columns, scales and sampling of the training: recordings are read, filled, cut and
resampled in the same way. A network that answers each sample streams: blocks of samples go through
it, and the hidden state is carried on. So a large file that is one recording is never in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flatout.data.checks.findings import counted
from flatout.data.problem import Problem
from flatout.data.sequences.columns import RecordingRules, dates_of
from flatout.data.sequences.info import Scaler, SequenceInfo, SequenceShape
from flatout.data.sequences.recording import Recording, measured_targets
from flatout.data.sequences.recordings import OTHER_RATE, ReadingNotes, read_recordings
from flatout.data.sequences.scratch import Scratch, ScratchValues, blocks_of
from flatout.data.sequences.views import Cut, RowPlaces, Segments
from flatout.data.store.store import Ragged
from flatout.data.tables.reading import ReadingConfig
from flatout.data.tables.sources import open_source
from flatout.data.tables.table import Table
from flatout.engine.precision import Precision, answering
from flatout.errors import UserError, require
from flatout.inference.model_folder import ModelFolder
from flatout.inference.recording_settings import RecordingSettings
from flatout.inference.recordings_onnx import export_recordings, stream_onnx
from flatout.inference.run_predictor import Advance, Answered, FileOptions, RunPredictor, Scored
from flatout.inference.unit_check import UnitCheck
from flatout.models.contract import ModelConfig, contract
from flatout.tasks.abstention import HeldOutAnswers
from flatout.tasks.metrics import TaskMetrics
from flatout.tasks.target_errors import TargetErrors
from flatout.tasks.task import Task

Floats = NDArray[np.float64]
Values = NDArray[Any] | ScratchValues  # `[samples, columns]`, of which a file may hold the rows
_SAMPLES_A_BLOCK = 4096
_ROWS_A_BATCH = 1024


@dataclass(slots=True)
class SequencePredictor(RunPredictor):
    """Answers for recordings; made by `SequencePredictor.load(RUN)` or from a run's Result."""

    problems = ("sequence",)
    answers_to = "recordings"
    options = ("at_error",)

    model: nn.Module
    shape: SequenceShape
    # how tables become recordings; integrals and `rules.columns` are what the network reads
    rules: RecordingRules
    scaler: Scaler  # of the columns that are read, then of the targets that are not
    names: list[str]  # of the targets, or of the classes
    step_s: float | None  # median seconds between two samples of the training recordings
    units: UnitCheck  # compares what is read with the training samples
    label: str | None = None
    label_scale: tuple[float, float] = (0.0, 1.0)
    has_classes: bool = False
    precision: Precision = field(default=Precision.fp32, kw_only=True)
    reading_notes: ReadingNotes = field(default_factory=ReadingNotes)
    _group: list[str] | None = None  # the group's columns in the files that were trained on

    @classmethod
    def of(cls, task: Task) -> SequencePredictor:
        info: SequenceInfo = task.info
        shape = info.shape
        inputs = info.columns[: shape.inputs]
        rules = RecordingRules.of(info.config)
        columns_read = [name for name in rules.columns if name in inputs]
        names = info.targets
        label_scale = (0.0, 1.0)
        sizes = info.facts.get("sizes", [])
        has_classes = bool(info.facts["classes"])
        if shape.labels:
            labels = info.labels
            names = labels.classes
            label_scale = (labels.mean, labels.spread)
            if has_classes:
                label_scale = (0.0, 1 / cast(Any, task).temperature)
        return cls(
            model=task.model.eval(),
            shape=shape,
            rules=replace(rules, columns=columns_read, label=None),
            scaler=info.scaler,
            names=names,
            step_s=info.facts["step"],
            units=UnitCheck(inputs, sizes[: shape.inputs], info.read_ranges()),
            label=rules.label,
            label_scale=label_scale,
            has_classes=has_classes,
        )

    @classmethod
    def read_folder(cls, folder: ModelFolder, settings: dict[str, Any]) -> SequencePredictor:
        data = folder.record(RecordingSettings, settings["data"], "data")
        names = folder.labels()
        data.require_fitting(folder, names)
        return cls(
            model=folder.network(shape=data.shape),
            shape=data.shape,
            rules=data.rules,
            scaler=data.scaler,
            names=names,
            step_s=data.step_s,
            units=UnitCheck(data.rules.names, data.sizes, data.ranges),
            label=data.label,
            label_scale=data.label_scale,
            has_classes=data.has_classes,
        )

    @property
    def numbers_an_answer(self) -> int:
        return 0 if self.shape.labels else (self.shape.horizon or 1) * self.shape.targets

    def save(self, folder: Path, model_config: ModelConfig) -> None:
        data: dict[str, Any] = {
            "shape": asdict(self.shape),
            "rules": {**asdict(self.rules), "missing": self.rules.missing.value},
            "scaler": asdict(self.scaler),
            "step_s": self.step_s,
            "label": self.label,
            "sizes": self.units.sizes,
        }
        if self.units.ranges is not None:
            data["ranges"] = asdict(self.units.ranges)
        data |= {"label_scale": list(self.label_scale), "has_classes": self.has_classes}
        settings = {"problem": self.problems[0], "data": data}
        ModelFolder(folder).write(self.model, model_config, self.names, settings)

    @property
    def columns(self) -> list[str]:
        """What the network reads, in this order."""
        return self.rules.names

    def predict(self, rows: Sequence[Any]) -> list[NDArray[Any]]:
        """Answers to recordings given as arrays `[samples, columns]` in their own units."""
        return [self.answer(np.asarray(each, dtype=np.float64)) for each in rows]

    def read(self, table: Table, rules: RecordingRules | None = None) -> Iterator[Recording]:
        """The recordings of a table, as in training; another sampling is refused.

        `rules` may read more columns.
        """
        with _naming_training():
            for recording in read_recordings(table, rules or self.rules, self.reading_notes):
                self._require_same_rate(recording)
                yield recording

    def read_long(self, table: Table) -> Iterator[Recording]:
        """The recordings of a table; a large file that is one recording stays out of memory."""
        with _naming_training(), TemporaryDirectory(prefix="flatout-") as folder:
            scratch = Scratch(Path(folder), self.rules, keeps_times=True)
            for file in table.tables or [table]:
                long = None if self.shape.labels else scratch.read(file, self.reading_notes)
                if long is None:
                    yield from self.read(file)
                    continue
                self._require_same_rate(long)
                yield long
                long.values.path.unlink()

    def answer(self, values: Floats, name: str = "a recording") -> NDArray[Any]:
        """The answer to one recording.

        It is `[samples, K]` estimates, `[H, K]` the next samples, or `[labels]` scores of classes
        or the number.
        """
        require(len(values) > 0, "predict", "a recording without a sample", hint="Leave it out.")
        shape = self.shape
        is_short = len(values) < (shape.lookback or 0) and not shape.horizon
        if self.onnx_file is None or is_short:
            return np.concatenate(list(self.stream(values, name)))
        by_file = stream_onnx(self.onnx_file, values, is_each=not shape.horizon)
        if shape.labels:
            return by_file[-1]
        # The first samples of a recording have shorter windows, which the file does not read. Of 10
        # samples and windows of 3, the file answers 8: the first 2 answers are the network's.
        num_first = 0 if shape.horizon else len(values) - len(by_file)
        if not num_first:
            return by_file
        by_network = replace(self, onnx_file=None).answer(values, name)
        return np.concatenate([by_network[:num_first], by_file])

    @torch.inference_mode()
    def stream(self, values: Values, name: str = "a recording") -> Iterator[NDArray[Any]]:
        """The answer to one recording in blocks, one after the other.

        `values` may lie in a file: a block at a time is read.
        """
        self.model.eval()
        count = values.shape[1]
        require(
            count == self.shape.inputs,
            "predict",
            f"{count} columns",
            allowed=", ".join(self.columns),
        )
        self._note_units(values, name)
        with answering(self.precision, self.device):
            if self.shape.labels:
                yield self._label(self._scale(values[:]))
            elif self.shape.horizon:
                yield self._forecast(values)
            else:
                yield from map(self._in_units, self._estimates(values, self._scale))

    def _note_units(self, values: Values, name: str) -> None:
        """Compare the units of a recording with those of the training."""
        self.units.add(blocks_of(values, _SAMPLES_A_BLOCK), name)

    @torch.inference_mode()
    def compare(self, recording: Recording) -> Iterator[tuple[Tensor, Tensor]]:
        """`[N, K]` scaled answers and truths, block after block; a truth not measured is NaN."""
        self.model.eval()
        scaled = self.scaler.scale(recording.values)
        shape = self.shape
        start = 0
        truths = torch.from_numpy(scaled[:, -shape.targets :])
        if recording.measured is not None:
            measured = torch.from_numpy(measured_targets(recording, shape.targets))
            truths = truths.masked_fill(~measured, torch.nan)
        with answering(self.precision, self.device):
            if shape.horizon:
                rows = Cut(shape.lookback, shape.horizon).rows(Segments.of_one(len(scaled)))
                # Of each window the samples behind it: with a lookback of 2 and a horizon of 2,
                # samples 0 to 4 have the windows 0 1 and 1 2, and behind them 2 3 and 3 4.
                behind = truths[shape.lookback :].unfold(0, shape.horizon, 1).transpose(1, 2)
                for first in range(0, len(rows.start), _SAMPLES_A_BLOCK):
                    block = slice(first, first + _SAMPLES_A_BLOCK)
                    answers = self._of_rows(scaled, rows, block)
                    yield answers.flatten(0, 1), behind[block].flatten(0, 1)
                return
            for answers in self._estimates(scaled, lambda block: block):
                yield answers, truths[start : start + len(answers)]
                start += len(answers)

    def _estimates(
        self, values: Values, scale: Callable[[NDArray[Any]], NDArray[np.float32]]
    ) -> Iterator[Tensor]:
        """`[N, K]` scaled answers, block after block."""
        # With windows of 3 samples and blocks of 4, the second block answers the samples 4 to 7. It
        # reads from sample 2 on, as the window of sample 4 begins there.
        lookback = self.shape.lookback
        model = contract(self.model)
        state = model.make_state(1, self.device)
        # a network of the user's own sees the whole recording
        if lookback is None and state is None:
            scaled = scale(values[:])
            yield self._of_rows(scaled, _whole(scaled))
            return
        for start in range(0, len(values), _SAMPLES_A_BLOCK):
            begin = start if lookback is None else max(0, start - lookback + 1)
            scaled = scale(values[begin : start + _SAMPLES_A_BLOCK])
            if lookback is not None:
                rows = Cut(lookback).rows(Segments.of_one(len(scaled)))
                yield self._of_rows(scaled, rows, slice(start - begin, None))
            elif state is not None:
                block = torch.from_numpy(scaled[:, : self.shape.inputs])
                answers, state = model.run(block.unsqueeze(0).to(self.device), state)
                yield answers[0].float().cpu()

    def _forecast(self, values: Values) -> NDArray[Any]:
        lookback = self.shape.lookback or 1
        horizon = self.shape.horizon
        require(
            len(values) >= lookback,
            "predict",
            f"data.lookback={lookback}, but the recording has {len(values)} samples",
            hint="Name a longer recording.",
        )
        scaled = self._scale(values[-lookback:])
        unknown = np.zeros((horizon, scaled.shape[1]), np.float32)
        window = np.concatenate([scaled, unknown])
        return self._in_units(self._of_rows(window, _whole(window))[0])

    def _label(self, scaled: NDArray[np.float32]) -> NDArray[Any]:
        mean, spread = self.label_scale
        outputs = self._of_rows(scaled, _whole(scaled))[0] * spread + mean
        return (outputs.softmax(-1) if self.has_classes else outputs).numpy()

    def _of_rows(
        self, scaled: NDArray[np.float32], rows: RowPlaces, chosen: slice = slice(None)
    ) -> Tensor:
        """The network's answers to some rows of scaled samples, in the order of the rows."""
        answers_of_batches = []
        rows_of_batches = []
        tokens = Ragged(scaled, rows.start[chosen], rows.length[chosen])
        for batch in self.batches(tokens, len(tokens.lengths), _ROWS_A_BATCH):
            answers_of_batches.append(self.model(batch).float().cpu())
            rows_of_batches.append(batch.rows)
        answers = torch.cat(answers_of_batches)
        if self.shape.is_each_step:  # one recording, whose samples are in order
            return answers
        return answers[torch.cat(rows_of_batches).argsort()]

    def _scale(self, values: Floats) -> NDArray[np.float32]:
        """Columns that are read, scaled; zeros for targets that are not."""
        shape = self.shape
        of_inputs = Scaler(self.scaler.shift[: shape.inputs], self.scaler.factor[: shape.inputs])
        inputs = of_inputs.scale(values)
        num_unread = 0 if shape.horizon or shape.labels else shape.targets
        unread = np.zeros((len(inputs), num_unread), np.float32)
        return np.concatenate([inputs, unread], axis=1)

    def _in_units(self, scaled: Tensor) -> NDArray[Any]:
        shift, factor = self.scaler.of_targets(self.shape.targets)
        return scaled.numpy() * np.array(factor) + np.array(shift)

    # Files.

    def open(self, file: str, verb: str, reading: ReadingConfig | None = None) -> Table:
        table = open_source(file, where="FILE", reading=reading)
        if self._group is None:
            self._group = self.rules.group
        # Without it the file is one recording of a run whose files held several.
        has_group = bool(set(self._group) & set(table.columns))
        self.rules = replace(self.rules, group=self._group if has_group else [])
        return table

    def rows(self, table: Table, options: FileOptions) -> Iterator[Floats]:
        return (recording.values for recording in self.read(table))

    def answer_table(
        self, table: Table, options: FileOptions, others: Sequence[Any]
    ) -> Iterator[Answered]:
        """A row for each sample that is answered, recording after recording, block by block."""
        needed = (self.shape.lookback or 1) if self.shape.horizon else 0
        for recording in self._long_enough(self.read_long(table), needed, "predict"):
            yield from self._answer_recording(recording)

    def _long_enough(
        self, recordings: Iterator[Recording], needed: int, verb: str
    ) -> Iterator[Recording]:
        """The recordings that are long enough; the notes name the others.

        It is a mistake if all are too short.
        """
        count = 0
        short = list[str]()
        for recording in recordings:
            if len(recording.times) >= needed:
                count += 1
                yield recording
            else:
                count_of = counted(len(recording.times), "sample")
                short.append(f"{recording.name} ({count_of}; {needed:,} are needed)")
        self.reading_notes.brief += short
        require(
            count > 0 or not short,
            verb,
            f"no recording is long enough: {', '.join(short[:3])}",
            hint=f"Name one of {needed:,} samples or more.",
        )
        require(
            count > 0, verb, "no recording has two samples or more", hint="Name longer recordings."
        )

    def _answer_recording(self, recording: Recording) -> Iterator[Answered]:
        time = self.rules.time or "step"
        samples = len(recording.times)
        if self.shape.labels:
            answer = self.answer(recording.values[:], recording.name)
            columns = self._columns_of_label(answer)
            answered = _block(recording, columns, samples)
            num_given = 1 - columns["prediction"].null_count
            yield replace(answered, num_given=num_given, num_answers=1)
            return
        start = 0
        horizon = self.shape.horizon
        for answers in self.stream(recording.values, recording.name):
            times = recording.times[start : start + len(answers)]
            if horizon:  # all of it is one block of answers, after the last sample
                times = recording.times[-1:] + (self.step_s or 1.0) * np.arange(1, horizon + 1)
            columns = {name: answers[:, number] for number, name in enumerate(self.names)}
            columns |= self._ends_of_intervals(answers)
            if recording.dates is not None:
                times = dates_of(times, recording.dates)
            done = samples if horizon else len(answers)
            block = _block(recording, {time: times, **columns}, done)
            yield replace(block, num_given=len(answers), num_answers=len(answers))
            start += len(answers)

    def _ends_of_intervals(self, answers: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Both ends of each answer's interval, `soc_low` and `soc_high`; none without an error."""
        if self.half_widths is None:
            return {}
        # one for each target, or for each step ahead and target
        widths = self.half_widths.reshape(-1, len(self.names))
        ends = {}
        for number, name in enumerate(self.names):
            ends[f"{name}_low"] = answers[:, number] - widths[:, number]
            ends[f"{name}_high"] = answers[:, number] + widths[:, number]
        return ends

    def _columns_of_label(self, answer: NDArray[Any]) -> dict[str, pa.Array]:
        """The class or the number of one recording as columns; with `at_error` what is possible."""
        abstention = self.abstention
        if not self.has_classes:
            columns = {"prediction": pa.array(answer)}
            if abstention is not None:
                # minus the distance to the ends of the interval
                ends = [float(answer[0]) + abstention.possible_from * sign for sign in (1, -1)]
                columns["possible"] = pa.array([ends], pa.list_(pa.float64()))
            return columns
        best = int(answer.argmax())
        is_given = abstention is None or float(answer[best]) > abstention.above
        columns = {
            "prediction": pa.array([self.names[best] if is_given else None], pa.string()),
            "probability": pa.array([float(answer[best])]),
        }
        if abstention is not None:
            possible = abstention.choose_possible(self.names, answer.tolist())
            left_out = [None if is_given else possible]
            columns["possible"] = pa.array(left_out, pa.list_(pa.string()))
        return columns

    def score_table(
        self, table: Table, options: FileOptions, others: Sequence[Any], advance: Advance
    ) -> Scored:
        """Scores over all answers to recordings that hold the targets too.

        A forecast is judged on every window.
        """
        if self.shape.labels:
            return self._score_labels(table, options.label, advance)
        shape = self.shape
        columns = self.rules.columns
        needed = 0
        if shape.horizon:
            needed = (shape.lookback or 1) + shape.horizon
        else:  # a forecast reads its targets anyhow
            columns = [*columns, *self.names]
        recordings = self.read(table, replace(self.rules, columns=columns))
        _, factor = self.scaler.of_targets(shape.targets)
        steps_ahead = max(1, shape.horizon)
        errors = TargetErrors(self.names, factor, steps_ahead, self.held_out_errors)
        for recording in self._long_enough(recordings, needed, "evaluate"):
            self._note_units(recording.values, recording.name)
            errors.add_recording(self.compare(recording))
            advance(len(recording.times))
        self.require_rows(errors.rows, table)
        return Scored(
            {"rows": errors.rows},
            errors.scores.values(),
            remarks=[*self.notes(), *errors.coverage.lines(self.names)],
            intervals=errors.scores.intervals(),
            held_out_errors=errors.held_out(shape.horizon or shape.lookback or 0),
            answer_intervals=errors.coverage.facts(self.names),
        )

    def _score_labels(self, table: Table, label: str | None, advance: Advance) -> Scored:
        column = label or self.label
        require(
            column is not None,
            "evaluate",
            "this run does not know its column of labels",
            hint="Name the column of labels with --label.",
        )
        metrics = TaskMetrics.build(
            Problem.single if self.has_classes else Problem.regression, self.names
        )
        total = 0
        held_out = list[HeldOutAnswers]()
        for recording in self.read(table, replace(self.rules, label=column)):
            answer, target = self._labelled(recording)
            metrics.update(answer, target, torch.tensor([total]))
            if self.has_classes:
                held_out.append(HeldOutAnswers.of_classes(answer.exp(), target))
            else:
                held_out.append(HeldOutAnswers.of_numbers(answer, target))
            total += 1
            advance(len(recording.times))
        self.require_rows(total, table)
        return Scored(
            {"rows": total},
            metrics.compute(),
            metrics.per_class(),
            remarks=self.notes(),
            intervals=metrics.intervals(),
            held_out=HeldOutAnswers.joined(held_out),
        )

    def _labelled(self, recording: Recording) -> tuple[Tensor, Tensor]:
        answer = torch.from_numpy(self.answer(recording.values, recording.name))
        written = str(recording.label)
        if self.has_classes:
            require(
                written in self.names,
                "--label",
                f"{recording.name} is {written!r}",
                allowed=", ".join(self.names),
            )
            return answer.log().unsqueeze(0), torch.tensor([self.names.index(written)])
        try:
            return answer, torch.tensor([float(written)])
        except ValueError:
            raise UserError(
                "--label", f"{recording.name} is {written!r}", allowed="numbers"
            ) from None

    @classmethod
    def require_exportable(cls, where: str, model: str, *, onnx: bool) -> None:
        require(onnx, "export", "a run on recordings is exported as ONNX", hint="Add --onnx.")

    @classmethod
    def export_run(cls, run: Path, folder: Path, name: Path, *, onnx: bool) -> list[str]:
        return export_recordings(cls.load(run), folder)

    def notes(self) -> list[str]:
        return self.reading_notes.lines() + self.units.lines()

    def _require_same_rate(self, recording: Recording) -> None:
        if self.rules.step is not None or self.step_s is None or self.rules.time is None:
            return
        step = recording.step
        require(
            abs(step / self.step_s - 1) <= OTHER_RATE,
            "data.time",
            (
                f"{recording.name} has a sample every {step:g} s, the training recordings every"
                f" {self.step_s:g} s"
            ),
            hint=f"Resample it, or train with data.step={self.step_s:g}.",
        )


def _block(recording: Recording, columns: dict[str, Any], done: int) -> Answered:
    """Rows of answers behind the recording's name and its values in the columns of groups."""
    count = len(next(iter(columns.values())))
    arrays = {"recording": pa.array([recording.name] * count, pa.string())}
    for name, value in recording.group.items():
        arrays.setdefault(name, pa.array([value] * count))
    for name, values in columns.items():
        arrays[name] = values if isinstance(values, pa.Array) else pa.array(values)
    return Answered(pa.RecordBatch.from_pydict(arrays), done=done)


@contextmanager
def _naming_training() -> Iterator[None]:
    """Give mistakes in a file other hints than in training.

    A hint to set `data.missing` would not help: the settings of the data belong to the run.
    """
    try:
        yield
    except UserError as error:
        if error.where == "data.missing":
            hint = "Write the values, or train with data.missing=fill or data.missing=drop."
        elif "data.group=" in error.hint:
            hint = "Sort the rows by time, and write a file for each recording."
        else:
            raise
        raise UserError("predict", error.what, hint=hint) from None


def _whole(samples: NDArray[Any]) -> RowPlaces:
    return Cut().rows(Segments.of_one(len(samples)))
