"""The predictor of a run on texts: it answers classes, several labels, or numbers.

It reads the `model/` folder of the run: the tokenizer, the weights, the class names and the
settings that rebuild the model. Rows are sorted by length inside a block, so prediction pads as
little as training does. Answers come in the order of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from flatout.data.batches.flat_batch import multi_hot
from flatout.data.checks.characters import decode_escapes
from flatout.data.checks.cleaning import BlockRules, Escapes, clean_block, read_texts
from flatout.data.checks.findings import Findings
from flatout.data.checks.labels import normalise_labels, simplify_label
from flatout.data.info import Labels
from flatout.data.problem import Problem
from flatout.data.ragged import row_bounds
from flatout.data.tables.roles import Roles
from flatout.data.tables.table import Table, as_texts, decoded, require_columns
from flatout.data.tokens.long_texts import CUT, LongTexts
from flatout.data.tokens.subwords import Encoder, encode_texts
from flatout.engine.precision import answering
from flatout.errors import UserError, require
from flatout.inference.export import export_encoder
from flatout.inference.model_folder import ModelFolder, RowSettings
from flatout.inference.run_predictor import (
    Advance,
    Answered,
    FileOptions,
    RunPredictor,
    Scored,
    in_order,
    texts_in_memory,
)
from flatout.inference.words_onnx import export_words
from flatout.models import model_class
from flatout.models.contract import ModelConfig
from flatout.models.encoder.transformer import Outputs
from flatout.models.lean import even_sigmoid
from flatout.models.words import WordsConfig
from flatout.tasks.abstention import HeldOutAnswers, sureness_of
from flatout.tasks.calibration import Sureness
from flatout.tasks.classification import Classifier
from flatout.tasks.metrics import MultiMetrics, TaskMetrics
from flatout.tasks.mixture import ALONE, Mixture, log_shares
from flatout.tasks.score_intervals import describe_drawn_groups

if TYPE_CHECKING:
    from flatout.baselines.linear_text import QuickModel

_MOST = 1 << 31  # no number of a model's settings is as large


_ROWS_A_BATCH = 512


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a model says of one text."""

    label: str | list[str] | float | None
    """The class, the classes, or the number; None where the answer is left out (`at_error`)."""
    probability: float | list[float] | None  # its probability, or theirs; None for a number
    # with `at_error`: the classes that a left-out answer may be, or the ends of a number's interval
    possible: list[str] | list[float] | None = None


@dataclass(slots=True)
class Predictor(RunPredictor):
    """Answers for texts; made by `Predictor.load(RUN)` or from a run's Result."""

    problems = ("single", "multi", "regression")
    answers_to = "texts"
    options = ("text", "top_k", "at_error")

    model: nn.Module
    vocabulary: Encoder
    labels: Labels
    max_length: int
    roles: Roles  # columns of the texts and the labels in the tables it was trained on
    escapes: Escapes = Escapes.keep
    label_delimiter: str | None = None
    group: str | None = None  # the column of `data.group`, whose rows intervals draw together
    long_texts: LongTexts = CUT
    # what logits are divided by, so that probabilities are as often right as they say
    temperature: float = 1.0
    thresholds: list[float] = field(default_factory=list)
    """Least probability of each label where there are several a row; empty: one half."""
    linear: QuickModel | None = None
    """A linear model on words and n-grams that answers with the network."""
    mixture: Mixture = ALONE

    @classmethod
    def of(cls, task: Classifier) -> Predictor:
        """The predictor of a trained task."""
        info = task.info
        return cls(
            model=task.model.eval(),
            vocabulary=info.vocabulary,
            labels=task.labels,
            max_length=info.max_length,
            roles=info.roles,
            escapes=info.escapes,
            label_delimiter=info.label_delimiter,
            group=info.group,
            long_texts=info.long_texts,
            temperature=task.temperature,
            thresholds=task.thresholds,
            linear=None if task.beside is None else task.beside.model,
            mixture=ALONE if task.beside is None else task.beside.mixture,
        )

    @classmethod
    def read_folder(cls, folder: ModelFolder, settings: dict[str, Any]) -> Predictor:
        vocabulary = folder.vocabulary()
        classes = folder.labels()
        roles = folder.roles()
        scale = folder.record(_Scale, settings["scale"], "scale")
        labels = Labels(Problem(settings["problem"]), classes, [], 0, scale.mean, scale.spread)
        data = folder.record(RowSettings, settings["data"], "data")
        answers = folder.record(_AnswerSettings, settings, "settings")
        folder.require_rows(data)
        _require_plain(folder, answers, labels)
        model: nn.Module
        if settings["model"]["kind"] == "transformer":
            outputs = Outputs(classes, settings["problem"])
            model, vocabulary = folder.encoder(outputs, roles, data.long_texts.window)
            folder.require_short(data, model)
        else:
            model = folder.network(num_outputs=len(classes), vocabulary_size=vocabulary.size)
        linear = None
        mixture = ALONE
        if answers.mixture is not None:
            mixture = answers.mixture
            linear = folder.linear_model(labels)
        return cls(
            model=model,
            vocabulary=vocabulary,
            labels=labels,
            max_length=data.max_length,
            roles=roles,
            escapes=Escapes(data.escapes),
            label_delimiter=data.label_delimiter,
            group=data.group,
            long_texts=data.long_texts,
            temperature=answers.temperature,
            thresholds=answers.thresholds,
            linear=linear,
            mixture=mixture,
        )

    def answer_with(self, part: str, folder: ModelFolder) -> None:
        if part == "network":
            # its best temperature without the linear model
            self.temperature = 1 / self.mixture.alone if self.linear else self.temperature
            self.linear = None
            self.mixture = ALONE
        elif part == "rival":
            self._answer_with_rival(folder)
        else:
            RunPredictor.answer_with(self, part, folder)
        self.part = part

    def _answer_with_rival(self, folder: ModelFolder) -> None:
        """Answer with the kept rival, or with the linear model that answers with the network."""
        rival = folder.rival(self.labels)
        if rival is None and self.linear is not None:
            rival = (self.linear, self.thresholds)
        if rival is None:
            raise UserError(
                "--with",
                "this run has kept no rival: it was left out, or did not win by more than the"
                " interval of the score",
                hint="Train with monitor.rival=always, or leave --with out.",
            )
        self.linear, self.thresholds = rival
        self.mixture = Mixture(0.0, 1.0)
        self.temperature = 1.0

    def save(self, folder: Path, model_config: ModelConfig) -> None:
        settings = {
            "problem": self.labels.problem.value,
            "scale": {"mean": self.labels.mean, "spread": self.labels.spread},
            "temperature": self.temperature,
            "thresholds": self.thresholds,
            "data": {
                "max_length": self.max_length,
                "columns": asdict(self.roles),
                "escapes": self.escapes.value,
                "label_delimiter": self.label_delimiter,
                "group": self.group,
                "long_texts": asdict(self.long_texts),
            },
        }
        if self.linear is not None:
            settings["mixture"] = asdict(self.mixture)
        ModelFolder(folder).write(
            self.model, model_config, self.labels.classes, settings, self.vocabulary
        )
        if self.linear is not None:
            ModelFolder(folder).write_linear_model(self.linear)

    def predict(self, texts: Sequence[str | tuple[str, str]] | str) -> list[Prediction]:
        """The answer to each text, or to each pair of texts, in their order."""
        rows = texts_in_memory(texts, self.roles)
        return self.read(self.outputs(pa.array(rows, pa.string()))) if rows else []

    @torch.inference_mode()
    def outputs(self, texts: pa.Array) -> Tensor:
        """`[N, C]` logits, or values of a regression, on the host and in the order of the texts."""
        self.model.eval()
        if self.escapes is Escapes.decode:
            texts = decode_escapes(texts)[0]
        outputs = torch.empty(len(texts), self.labels.num_outputs)
        if self.part == "rival":
            assert self.linear is not None
            answers = self.linear.predict(texts.to_pylist()) if len(texts) else np.empty(0)
            return log_shares(answers, self.labels.problem).reshape(outputs.shape)
        encoded = encode_texts(self.vocabulary, texts, self.max_length, self.long_texts)
        with answering(self.precision, self.device):
            for batch in self.batches((encoded.tokens, encoded.lengths), len(texts), _ROWS_A_BATCH):
                outputs[batch.rows] = self.model(batch).float().cpu()
        if self.linear is not None and len(texts):
            shares = self.linear.predict(texts.to_pylist())
            outputs = self.mixture.mix(outputs, log_shares(shares, self.labels.problem))
        if self.labels.problem is Problem.regression:
            outputs = outputs * self.labels.spread + self.labels.mean
        return outputs

    def read(self, outputs: Tensor) -> list[Prediction]:
        columns = answer_columns(self, outputs)
        missing = pa.nulls(len(outputs))
        names = ("prediction", "probability", "possible")
        found = (columns.get(name, missing).to_pylist() for name in names)
        return list(map(Prediction, *found))

    def shares(self, outputs: Tensor) -> Tensor:
        """Logits as probabilities."""
        outputs = outputs / self.temperature
        if self.labels.problem is Problem.single:
            return outputs.softmax(-1)
        return even_sigmoid(outputs)

    def logit_scale(self) -> tuple[float, float]:
        if self.labels.problem is Problem.regression:
            return self.labels.mean, self.labels.spread
        return 0.0, 1 / self.temperature

    def least_shares(self) -> Tensor:
        """`[C]` the probability from which on each label is answered, with several labels a row."""
        if self.thresholds:
            return torch.tensor(self.thresholds)
        return torch.full((self.labels.num_outputs,), 0.5)

    def least_if_several(self) -> Tensor | None:
        """`least_shares` where a row may have several labels; None where each has one class."""
        return None if self.labels.problem is Problem.single else self.least_shares()

    @classmethod
    def require_exportable(cls, where: str, model: str, *, onnx: bool) -> None:
        if not issubclass(model_class(model, where), WordsConfig):
            RunPredictor.require_exportable(where, model, onnx=onnx)
            return
        require(onnx, where, f"a run of model={model} is exported as ONNX", hint="Add --onnx.")

    @classmethod
    def export_run(cls, run: Path, folder: Path, name: Path, *, onnx: bool) -> list[str]:
        kind = ModelFolder.find(run).settings()["model"]["kind"]
        if issubclass(model_class(kind, str(run)), WordsConfig):
            return export_words(cls.load(run), folder)
        return export_encoder(partial(cls.load, run), folder, name, onnx=onnx)

    def answer_table(
        self, table: Table, options: FileOptions, others: Sequence[Predictor]
    ) -> Iterator[Answered]:
        if self.labels.problem is Problem.regression:
            require(not options.top_k, "--top-k", "this run answers numbers", hint="Leave it out.")

        def answer(predictor: Predictor, piece: tuple[Any, pa.RecordBatch]) -> Answered:
            texts, block = piece
            columns = answer_columns(predictor, predictor.outputs(texts), options.top_k)
            given = len(texts) - columns["prediction"].null_count
            return Answered.beside(block, columns, given, len(texts), predictor.unlike)

        return in_order(answer, others, self._texts(table, options))

    def _texts(
        self, table: Table, options: FileOptions
    ) -> Iterator[tuple[pa.Array, pa.RecordBatch]]:
        roles = options.roles(self.roles)
        findings = Findings(table.name)
        require_text_columns(table, roles.texts)
        for rows, block in self.blocks(table):
            texts, _ = read_texts(block, roles, np.arange(len(rows)), findings)
            yield pc.fill_null(texts, ""), block

    def rows(self, table: Table, options: FileOptions) -> Iterator[str]:
        return (text for texts, _ in self._texts(table, options) for text in texts.to_pylist())

    def score_table(
        self, table: Table, options: FileOptions, others: Sequence[Predictor], advance: Advance
    ) -> Scored:
        """Over all rows that have a label, and of each class."""
        roles = options.roles(self.roles)
        require_text_columns(table, roles.texts, label=roles.label)
        problem = self.labels.problem
        findings = Findings(table.name)
        metrics = TaskMetrics.build(problem, self.labels.classes)
        sureness = Sureness()
        group = self.group if self.group in table.columns else None
        numbers = RowNumbers()
        held_out = list[HeldOutAnswers]()
        if isinstance(metrics, MultiMetrics):
            metrics.thresholds.copy_(self.least_shares())
        labelled = self._labelled(table, roles, findings, group)
        for outputs, targets, names in in_order(
            lambda one, piece: (one.outputs(piece[0]), *piece[1:]), others, labelled
        ):
            # Thresholds are of calibrated probabilities.
            judged = outputs / self.temperature if problem is Problem.multi else outputs
            metrics.update(judged, targets, numbers.of(names))
            held_out.append(self._judge(outputs, targets))
            if problem is Problem.single:
                sureness.add(self.shares(outputs), targets)
            advance(len(targets))
        require(
            findings.rows_kept > 0,
            "FILE",
            f"{table.name}: no row has a label",
            hint="Name the column of labels with --label, or another file.",
        )
        values = metrics.compute()
        if problem is Problem.single:
            values |= {"calibration_error": sureness.error(), "temperature": self.temperature}
        remarks = [f"{remark.source}: {remark.what}" for remark in findings.remarks()]
        if group is not None:
            remarks.append(describe_drawn_groups(numbers.count, group))
        return Scored(
            {"rows": findings.rows_kept},
            values,
            metrics.per_class(),
            remarks,
            intervals=metrics.intervals(),
            held_out=HeldOutAnswers.joined(held_out),
        )

    def _judge(self, outputs: Tensor, targets: Tensor) -> HeldOutAnswers:
        if self.labels.problem is Problem.regression:
            return HeldOutAnswers.of_numbers(outputs.squeeze(-1), targets)
        return HeldOutAnswers.of_classes(self.shares(outputs), targets, self.least_if_several())

    def _labelled(
        self, table: Table, roles: Roles, findings: Findings, group: str | None
    ) -> Iterator[tuple[pa.Array, Tensor, list[str | None]]]:
        """Block by block the labelled texts, their labels as the run numbers them, their groups.

        A text without a group has None.
        """
        # as answers are written
        problem = self.labels.problem
        delimiter = self.label_delimiter or "|"
        rules = BlockRules(roles, problem, is_train=False)
        columns = dict.fromkeys(filter(None, [*roles.columns, group]))
        for rows, block in self.blocks(table, list(columns)):
            clean = clean_block(block, rows, rules, findings)
            labels = normalise_labels(
                clean.labels, clean.rows, findings, problem=problem, delimiter=delimiter
            )
            if len(clean.rows):
                names: list[str | None] = [None] * len(clean.rows)
                if group is not None:
                    of_block = as_texts(decoded(block.column(group)))
                    names = of_block.take(pa.array(clean.rows - rows[0])).to_pylist()
                yield clean.texts, _targets(self, labels, table.name), names


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """The mean and the spread of the numbers that a regression answers."""

    mean: float
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnswerSettings:
    """What `config.json` of a model folder says of answers; runs of older versions say less."""

    temperature: float = 1.0
    thresholds: list[float] = field(default_factory=list)
    mixture: Mixture | None = None
    # read elsewhere
    schema: int
    model: dict[str, Any]
    problem: str
    scale: dict[str, Any]
    data: dict[str, Any]


def _require_plain(folder: ModelFolder, answers: _AnswerSettings, labels: Labels) -> None:
    """Refuse settings that would break the answers: the folder may come from others."""
    numbers = [answers.temperature, *answers.thresholds, labels.mean, labels.spread]
    if (mixture := answers.mixture) is not None:
        numbers += [mixture.network, mixture.linear, mixture.alone]
        folder.require(mixture.alone > 0, "mixture")
    folder.require(all(abs(number) < _MOST for number in numbers), "temperature or thresholds")
    folder.require(answers.temperature > 0, "temperature")
    folder.require(len(answers.thresholds) in (0, labels.num_outputs), "thresholds")
    is_number = labels.problem is Problem.regression
    folder.require(not is_number or labels.num_outputs == 1, "problem")


class RowNumbers:
    """Numbers rows, those of one group alike: names [a, None, a, b] → 0, 1, 0, 2."""

    def __init__(self) -> None:
        self.count = 0
        self._of_groups = dict[str, int]()

    def of(self, names: Sequence[str | None]) -> Tensor:
        """The number of each row, by the name of its group; None: it has none."""
        numbers = list[int]()
        for name in names:
            number = self.count if name is None else self._of_groups.setdefault(name, self.count)
            numbers.append(number)
            if number == self.count:
                self.count += 1
        return torch.tensor(numbers)


def require_text_columns(table: Table, texts: Sequence[str], **others: str) -> None:
    """Check that the columns of the texts are there, and `others` by the options that name them."""
    columns = {}
    for number, name in enumerate(texts):
        option = "--text" if number == 0 else f"--text[{number}]"
        columns[option] = name
    for option, name in others.items():
        columns[f"--{option}"] = name
    require_columns(table, columns)


def answer_columns(predictor: Predictor, outputs: Tensor, top_k: int = 0) -> dict[str, pa.Array]:
    """Logits as the columns that are written; whole blocks at once."""
    classes = pa.array(predictor.labels.classes)
    abstention = predictor.abstention
    if predictor.labels.problem is Problem.regression:
        numbers = {"prediction": pa.array(outputs.squeeze(-1).numpy())}
        if abstention is not None:
            distances = abstention.possible_from * torch.tensor([1, -1])
            ends = (outputs + distances).flatten()
            numbers["possible"] = pa.FixedSizeListArray.from_arrays(pa.array(ends.numpy()), 2)
        return numbers
    shares = predictor.shares(outputs)
    if predictor.labels.problem is Problem.single:
        probabilities, ids = shares.max(-1)
        answered = {
            "prediction": classes.take(pa.array(ids.numpy())),
            "probability": pa.array(probabilities.numpy()),
        }
    else:
        answered = predictor.chosen(classes, shares, predictor.least_shares())
    if abstention is not None:
        sureness = sureness_of(shares, predictor.least_if_several())
        is_given = pa.array((sureness > abstention.above).numpy())
        possible = predictor.chosen(classes, shares, abstention.least_possible(shares))
        answered["prediction"] = pc.if_else(is_given, answered["prediction"], None)
        answered["possible"] = pc.if_else(is_given, None, possible["prediction"])
    if top_k:  # the likeliest classes of each row, the best first
        most = min(top_k, shares.shape[1])
        values, ids = shares.topk(most, dim=-1)
        offsets = pa.array(np.arange(len(ids) + 1, dtype=np.int32) * most)
        tops = {
            "top_labels": classes.take(pa.array(ids.flatten().numpy())),
            "top_probabilities": pa.array(values.flatten().numpy()),
        }
        for name, top in tops.items():
            answered[name] = pa.ListArray.from_arrays(offsets, top)
    return answered


def _targets(predictor: Predictor, labels: pa.Array, source: str) -> Tensor:
    classes = predictor.labels.classes
    if predictor.labels.problem is Problem.regression:
        return torch.from_numpy(labels.to_numpy(zero_copy_only=False).astype(np.float32))
    is_multi = predictor.labels.problem is Problem.multi
    values = pc.list_flatten(labels) if is_multi else labels
    ids = pc.index_in(values, pa.array(classes, pa.large_string()))
    plain = list(map(simplify_label, classes))
    # A label may be written in another way than the run's: `Sport ` for `sport`. Training made one
    # class of such spellings, unless two classes of the run differ in nothing else.
    if ids.null_count and len({*plain}) == len(plain):
        given = pa.array([simplify_label(each) for each in values.to_pylist()], pa.large_string())
        ids = pc.index_in(given, pa.array(plain, pa.large_string()))
    if ids.null_count:
        unknown = pc.unique(values.filter(pc.is_null(ids))).to_pylist()
        raise UserError(
            "--label",
            f"{source}: labels that the run does not know: {', '.join(map(repr, unknown[:5]))}",
            allowed=", ".join(classes[:20]),
        )
    numbers = torch.from_numpy(ids.to_numpy(zero_copy_only=False).astype(np.int64))
    if not is_multi:
        return numbers
    bounds = row_bounds(pc.list_value_length(labels))
    return multi_hot(numbers, torch.from_numpy(bounds), len(classes))
