"""The predictor of a run on bit strings: it reads 2-grams with probabilities off encodings.

It can also rebuild the texts that the 2-grams may come from (`reconstruct.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flatout.bits.bits_onnx import ask_bits, export_bits
from flatout.bits.columns import BitColumn, Form, known_numbers
from flatout.bits.encodings import Packed, Sets
from flatout.bits.grams import FIELD_END, LABEL_INDEX, join_fields, strip_punctuation
from flatout.bits.info import GramLabels
from flatout.bits.reconstruct import LetterOrder, Reconstructor
from flatout.bits.ridge import finished_answers
from flatout.bits.scores import GramMetrics
from flatout.bits.task import GramDecoder
from flatout.data.batches.flat_batch import FlatBatch, multi_hot
from flatout.data.ragged import row_bounds
from flatout.data.tables.table import Table, require_columns
from flatout.engine.precision import answering
from flatout.errors import UserError, require
from flatout.inference.model_folder import ModelFolder
from flatout.inference.run_predictor import (
    Advance,
    Answered,
    FileOptions,
    RunPredictor,
    Scored,
    in_order,
)
from flatout.models.bit_mlp import BitMLP
from flatout.models.contract import ModelConfig
from flatout.models.lean import even_sigmoid

_ROWS_A_BATCH = 1024
_TEXTS_READ = 131_072
_MOST_INPUTS = 1 << 31
_LETTERS_OF_GRAM = 2
HASHED = "hashed.json"
NUMBERS = "numbers.json"
ORDER = "letters.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class _EncodingSettings:
    """What `config.json` of a model folder says of the encodings."""

    is_set: bool
    num_inputs: int
    bits_column: str
    text_columns: list[str]
    form: Form


def _is_gram(value: object) -> bool:
    """Whether a value is two letters, as far as a model folder of others can say."""
    return isinstance(value, str) and len(value) == _LETTERS_OF_GRAM


@dataclass(frozen=True, slots=True)
class GramPrediction:
    """What a model reads off one encoding."""

    grams: list[str]  # the grams that are there, surest first
    probabilities: list[float]  # of each of them


@dataclass(slots=True)
class GramPredictor(RunPredictor):
    """Answers for encodings; made by `GramPredictor.load(RUN)` or from a run's Result."""

    problems = ("grams",)
    answers_to = "encodings"
    options = ("bits", "rebuild")

    model: nn.Module  # a BitMLP, or a user's own network that answers `[B, C]` logits
    labels: GramLabels
    num_inputs: int  # bits of an encoding, or numbers that have an input each
    threshold: float  # least probability of a gram that is answered
    # the numbers of a two-step hash that have an input each; None for bits
    numbers: NDArray[np.int64] | None
    bits_column: str
    text_columns: list[str]
    form: Form  # how the bits of the training records were written
    order: LetterOrder  # what the training texts look like; for rebuilding texts

    @classmethod
    def require_exportable(cls, where: str, model: str, *, onnx: bool) -> None:
        require(onnx, where, "a run on bit strings is exported as ONNX", hint="Add --onnx.")

    @classmethod
    def export_run(cls, run: Path, folder: Path, name: Path, *, onnx: bool) -> list[str]:
        predictor = cls.load(run)
        require(
            predictor.numbers is None,
            str(run),
            "a run on sets of numbers has no export",
            hint=(
                "Answer files by python -m flatout predict RUN rows.csv, or rows in Python by"
                " flatout.load_predictor(RUN)."
            ),
        )
        return export_bits(predictor, folder)

    @classmethod
    def of(cls, task: GramDecoder) -> GramPredictor:
        """The predictor of a trained task."""
        info = task.info
        texts = pc.replace_substring(info.texts("train").slice(0, _TEXTS_READ), FIELD_END, "")
        return cls(
            model=task.model.eval(),
            labels=task.labels,
            num_inputs=info.num_inputs,
            threshold=task.threshold,
            numbers=info.numbers,
            bits_column=info.facts["bits_column"],
            text_columns=info.text_columns,
            form=Form(info.facts["form"]),
            order=LetterOrder.learn(texts, task.labels.hashed),
        )

    @classmethod
    def read_folder(cls, folder: ModelFolder, settings: dict[str, Any]) -> GramPredictor:
        data = folder.record(_EncodingSettings, settings["data"], "data")
        hashed = folder.read_json(HASHED)
        labels = GramLabels(tuple(folder.labels()), hashed, [], 0)
        are_grams = isinstance(hashed, list) and all(map(_is_gram, (*hashed, *labels.names)))
        folder.require(are_grams, HASHED)
        folder.require(0 < data.num_inputs < _MOST_INPUTS, "data.num_inputs")
        threshold = settings["threshold"]
        folder.require(type(threshold) in (int, float) and 0 <= threshold <= 1, "threshold")
        numbers = None
        if data.is_set:
            numbers = np.array(folder.read_json(NUMBERS))
            are_numbers = numbers.dtype == np.int64 and numbers.shape == (data.num_inputs,)
            folder.require(are_numbers, NUMBERS)
        sizes = labels.network_sizes()
        return cls(
            model=folder.network(num_inputs=data.num_inputs, is_set=data.is_set, **sizes),
            labels=labels,
            num_inputs=data.num_inputs,
            threshold=threshold,
            numbers=numbers,
            bits_column=data.bits_column,
            text_columns=data.text_columns,
            form=data.form,
            order=LetterOrder.load(folder.path / ORDER, labels.hashed),
        )

    def save(self, folder: Path, model_config: ModelConfig) -> None:
        data = {
            "is_set": self.numbers is not None,
            "num_inputs": self.num_inputs,
            "bits_column": self.bits_column,
            "text_columns": self.text_columns,
            "form": self.form.value,
        }
        settings = {"problem": self.problems[0], "threshold": self.threshold, "data": data}
        written = ModelFolder(folder)
        written.write(self.model, model_config, list(self.labels.names), settings)
        written.write_json(HASHED, self.labels.hashed)
        self.order.save(folder / ORDER)
        if self.numbers is not None:
            written.write_json(NUMBERS, self.numbers.tolist())

    def predict(self, rows: Sequence[Any]) -> list[GramPrediction]:
        """The 2-grams of each encoding.

        An encoding is a text of bits (0 and 1, hex, base64), bytes, or a set of numbers.
        """
        encodings_given = self.rows_in_memory(rows, [self.bits_column])
        if not encodings_given:
            return []
        encodings = self.encodings(
            pa.array(encodings_given), np.arange(len(encodings_given)), "rows"
        )
        return self.read(self.outputs(encodings))

    def encodings(
        self, column: pa.Array, rows: NDArray[np.int64], source: str, name: str = ""
    ) -> Packed | Sets:
        """A column of encodings as the model reads them; what does not fit is named by row."""
        reader = BitColumn(name or self.bits_column, source, Form.numbers)
        if self.numbers is None:
            reader.form = self.form
            reader.num_bits = self.num_inputs
        reader.is_of_run = True
        return reader.read(column, rows)

    def outputs(self, encodings: Packed | Sets) -> Tensor:
        """`[N, C]` probabilities of the answers, on the host and in the order of the encodings."""
        if self.onnx_file is not None and not isinstance(encodings, tuple):
            return ask_bits(self.onnx_file, encodings)
        return self._each(
            encodings, lambda batch: finished_answers(self.model, self.labels.num_outputs, batch)
        )

    def detected(self, encodings: Packed | Sets) -> Tensor:
        """`[N, H]` probabilities of the grams that were hashed."""
        model = self.model
        if not isinstance(model, BitMLP) or model.detectors is None:
            raise UserError(
                "--rebuild",
                "this model has no detectors, which texts are rebuilt from",
                hint="Train with model=bitmlp model.detectors=true.",
            )
        return self._each(encodings, model.detect)

    def read(self, probabilities: Tensor) -> list[GramPrediction]:
        """Probabilities as the grams that are there."""
        predictions = []
        for row in probabilities:
            answered = torch.nonzero(row >= self.threshold).squeeze(1)
            surest_first = answered[row[answered].argsort(descending=True, stable=True)]
            grams = [self.labels.names[number] for number in surest_first.tolist()]
            predictions.append(GramPrediction(grams, row[surest_first].tolist()))
        return predictions

    @torch.inference_mode()
    def _each(self, encodings: Packed | Sets, logits: Callable[[FlatBatch], Tensor]) -> Tensor:
        self.model.eval()
        tokens: Any
        if isinstance(encodings, tuple):
            count = len(encodings[1])
            tokens = known_numbers(encodings, self.numbers)
        else:
            count = len(encodings)
            tokens = np.ascontiguousarray(encodings)
        all_answers: Tensor | None = None
        with answering(self.precision, self.device):
            for batch in self.batches(tokens, count, _ROWS_A_BATCH):
                answers = even_sigmoid(logits(batch).float().cpu())
                all_answers = (
                    answers.new_empty(count, answers.shape[1])
                    if all_answers is None
                    else all_answers
                )
                all_answers[batch.rows] = answers
        return torch.empty(0, self.labels.num_outputs) if all_answers is None else all_answers

    def rows(self, table: Table, options: FileOptions) -> Iterator[Any]:
        column = options.bits or self.bits_column
        require_columns(table, {"--bits": column})
        return (
            row for _, block in self.blocks(table, [column]) for row in block.column(0).to_pylist()
        )

    def answer_table(
        self, table: Table, options: FileOptions, others: Sequence[GramPredictor]
    ) -> Iterator[Answered]:
        """Grams and their probabilities, and rebuilt texts where they are asked for."""
        column = options.bits or self.bits_column
        require_columns(table, {"--bits": column})
        reconstructor = Reconstructor(self.labels.hashed, self.order) if options.rebuild else None

        def answer(
            predictor: GramPredictor, piece: tuple[NDArray[np.int64], pa.RecordBatch]
        ) -> Answered:
            rows, block = piece
            encodings = predictor.encodings(block.column(column), rows, table.name, column)
            columns = self.chosen(
                pa.array(predictor.labels.names), predictor.outputs(encodings), predictor.threshold
            )
            if reconstructor is not None:
                detected = predictor.detected(encodings).numpy()
                candidates = [list(texts) for texts in reconstructor.candidates(detected)]
                # the likeliest text comes first
                likeliest = [next(iter(texts), None) for texts in candidates]
                columns["rebuilt"] = pa.array(likeliest, pa.string())
                columns["candidates"] = pa.array(candidates, pa.list_(pa.string()))
            return Answered.beside(block, columns)

        return in_order(answer, others, self.blocks(table))

    def score_table(
        self, table: Table, options: FileOptions, others: Sequence[GramPredictor], advance: Advance
    ) -> Scored:
        """Over all records of encodings and plain texts."""
        bits = options.bits or self.bits_column
        require_columns(table, {"--bits": bits})
        for name in self.text_columns:
            require_columns(table, {"plain text of the records": name})
        metrics = GramMetrics(self.threshold)
        total = 0
        labelled = self._labelled(table, bits)
        for probabilities, targets in in_order(
            lambda one, piece: (one.outputs(piece[0]), piece[1]), others, labelled
        ):
            metrics.update(probabilities, targets, torch.arange(total, total + len(targets)))
            total += len(targets)
            advance(len(targets))
        self.require_rows(total, table)
        return Scored({"rows": total}, metrics.compute(), intervals=metrics.intervals())

    def _labelled(self, table: Table, bits: str) -> Iterator[tuple[Any, Tensor]]:
        for rows, block in self.blocks(table, [bits, *self.text_columns]):
            raw = join_fields([block.column(name) for name in self.text_columns])
            ids, lengths = LABEL_INDEX.rows(strip_punctuation(raw))
            offsets = torch.from_numpy(row_bounds(lengths))
            targets = multi_hot(torch.from_numpy(ids), offsets, self.labels.num_outputs)
            yield self.encodings(block.column(bits), rows, table.name, bits), targets
