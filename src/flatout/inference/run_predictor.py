"""The base class of all predictors: a network with everything it needs to answer rows.

The commands predict, evaluate and export ask the predictor of a run, and so does `Result`. A file
is read by the block, answered on every device, and given back in its order, so memory stays flat.
Open this file to change what all kinds of runs share when they answer.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.plan import BatchLayout, PlanSettings
from flatout.data.ragged import row_bounds
from flatout.data.store.store import Array, Ragged, StoreSplit
from flatout.data.tables.output import FORMATS
from flatout.data.tables.reading import ReadingConfig
from flatout.data.tables.roles import Roles
from flatout.data.tables.sources import open_table
from flatout.data.tables.table import Table
from flatout.data.tokens.long_texts import CUT
from flatout.data.tokens.subwords import PAIR
from flatout.engine.precision import Precision
from flatout.errors import UserError, require
from flatout.inference.export import export_encoder
from flatout.inference.fingerprint import Fingerprint
from flatout.models import model_class
from flatout.models.contract import ModelConfig
from flatout.models.encoder.transformer import TransformerConfig
from flatout.tasks.abstention import CALIBRATE, Abstention, HeldOutAnswers
from flatout.tasks.error_intervals import HeldOutErrors
from flatout.tasks.score_intervals import Interval

if TYPE_CHECKING:
    from flatout.inference.model_folder import ModelFolder

PARTS = ("rival", "network")  # what may answer alone
_ROWS_PER_BLOCK = 16_384
_EXACT_ROWS = {BatchLayout.flat: 16, BatchLayout.padded: 32}
_EXACT_ENCODINGS = 128
"""Rows of a batch of exact answers: multiples of the rows that products take at once, and of a
vector's numbers."""
Piece = TypeVar("Piece")
Answer = TypeVar("Answer")
Advance = Callable[[int], None]  # is called with each number of rows done


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """Options of a command about its file; each kind of run understands some of them."""

    text: str | None = None
    label: str | None = None
    bits: str | None = None
    top_k: int = 0
    at_error: str | None = None
    rebuild: bool = False

    def roles(self, trained: Roles) -> Roles:
        """The columns that are read: those that were named, else those of training."""
        texts = trained.texts if self.text is None else (self.text,)
        return replace(trained, texts=texts, label=self.label or trained.label)


@dataclass(frozen=True, slots=True)
class Answered:
    """A block of a file with the run's answers as further columns."""

    block: pa.RecordBatch
    # columns of the file that gave way to answers of the same name
    replaced: list[str] = field(default_factory=list)
    done: int = 0  # rows of the file that these answers finish
    num_given: int = 0  # answers that are sure enough for the error that was asked for
    num_answers: int = 0  # all of them
    # of a tagger: words and tags alone, for a file of CoNLL
    sentences: pa.RecordBatch | None = None
    unlike: NDArray[Any] | None = None  # how unlike each row is to the training texts

    @classmethod
    def beside(
        cls,
        block: pa.RecordBatch,
        added: dict[str, pa.Array],
        num_given: int = 0,
        num_answers: int = 0,
        unlike: NDArray[Any] | None = None,
    ) -> Answered:
        """A block with its answers, in place of columns of the same names."""
        file_columns = block.schema.names
        # by number, as two columns of a file may have one name
        columns = block.select(
            [number for number, name in enumerate(file_columns) if name not in added]
        )
        beside = pa.RecordBatch.from_arrays(
            [*columns.columns, *added.values()], names=[*columns.schema.names, *added]
        )
        replaced = [name for name in file_columns if name in added]
        return cls(beside, replaced, block.num_rows, num_given, num_answers, unlike=unlike)


@dataclass(frozen=True, slots=True)
class Scored:
    """Metrics of a run's answers to a file."""

    counts: dict[str, int]  # the rows, first of all
    values: dict[str, float]
    per_class: list[dict[str, Any]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    # the 95 % interval of each metric that has one
    intervals: dict[str, Interval] = field(default_factory=dict)
    # how sure the answers were, and which were right: what `--at-error` goes by
    held_out: HeldOutAnswers | None = None
    held_out_errors: HeldOutErrors | None = None  # the same of estimates and forecasts
    # of estimates and forecasts: which share lies outside of the intervals that the run keeps
    answer_intervals: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class RunPredictor(ABC):
    """A network with everything it needs to answer rows.

    `load` makes one from a run's folder, and a Result has that of its run.
    """

    problems: ClassVar[tuple[str, ...]]  # what `config.json` of its runs names
    answers_to: ClassVar[str]  # what it answers, for messages
    options: ClassVar[tuple[str, ...]] = ()  # the options of predict that it understands
    model: nn.Module
    _: KW_ONLY
    # arithmetic of answers; auto: fp32 on a CPU, sixteen bits on a GPU
    precision: Precision = Precision.auto
    exact: bool = False  # whether an answer is the same bit for bit beside any rows, on this device
    held_out: HeldOutAnswers | None = None  # to rows that were not trained on
    held_out_errors: HeldOutErrors | None = None  # of estimates and forecasts
    half_widths: NDArray[Any] | None = None  # of their intervals, once an error is asked for
    abstention: Abstention | None = None  # which answers are left out; None: none are
    fingerprint: Fingerprint | None = None  # of the training texts
    part: str = ""  # which part of the run answers alone; empty: the run as it was judged
    # answers in place of the model, for `verify`: of runs on recordings and on bit strings
    onnx_file: Path | None = None
    unlike: NDArray[Any] | None = None  # how unlike them each row is that was answered last
    # how texts longer than the network's rows are read; other rows are read whole
    long_texts = CUT
    why_inexact = ""  # why last bits of exact answers may differ; empty where they do not
    # rows of exact answers, and rows that were computed for them
    asked = 0
    computed = 0

    # What variants define.

    @classmethod
    @abstractmethod
    def of(cls, task: Any) -> Self:
        """The predictor of a trained task."""

    @classmethod
    @abstractmethod
    def read_folder(cls, folder: ModelFolder, settings: dict[str, Any]) -> Self:
        """The predictor that `save` has written into a folder, on the CPU."""

    @abstractmethod
    def save(self, folder: Path, model_config: ModelConfig) -> None:
        """Write the `model` folder; `model_config` must be of a class in MODELS."""

    @abstractmethod
    def predict(self, rows: Any) -> list[Any]:
        """Answers to rows in memory, in their order."""

    @abstractmethod
    def rows(self, table: Table, options: FileOptions) -> Iterator[Any]:
        """The rows of a table, each as `predict` takes it."""

    @abstractmethod
    def answer_table(
        self, table: Table, options: FileOptions, others: Sequence[Self]
    ) -> Iterator[Answered]:
        """The rows of a table with the run's answers, block by block.

        `others`: the same run on every device, this one included.
        """

    @abstractmethod
    def score_table(
        self, table: Table, options: FileOptions, others: Sequence[Self], advance: Advance
    ) -> Scored:
        """Metrics of the answers to a table that holds the truth as well."""

    @property
    def numbers_an_answer(self) -> int:
        """Numbers of an answer that can have an interval each: targets, or those of all steps."""
        return 0

    @property
    def formats(self) -> Sequence[str]:
        """Endings of files that hold its answers."""
        return FORMATS

    def open(self, file: str, verb: str, reading: ReadingConfig | None = None) -> Table:
        return open_table(file, where="FILE", reading=reading)

    def notes(self) -> list[str]:
        """Lines for the user about the files that were read and answered."""
        more = (
            f"{self.computed:,} rows computed for {self.asked:,}, as each length fills whole"
            " batches"
        )
        lines = [self.why_inexact, more] if self.asked else []
        return [f"exact: {line}" for line in lines if line]

    @classmethod
    def require_exportable(cls, where: str, model: str, *, onnx: bool) -> None:
        """Refuse a run whose model no other program knows; `model`: its name among MODELS."""
        require(
            model_class(model, where) is TransformerConfig,
            where,
            f"a run of model={model}, which transformers does not know",
            hint="Name a run of model=transformer.",
        )

    @classmethod
    def export_run(cls, run: Path, folder: Path, name: Path, *, onnx: bool) -> list[str]:
        """Write files that other programs open into a folder; return lines to print.

        `name`: the name that the folder will get.
        """
        return export_encoder(partial(cls.load, run), folder, name, onnx=onnx)

    def through_onnx(self, file: Path) -> Self:
        """The same run, answering by its exported ONNX file."""
        return replace(self, onnx_file=file)

    # What they share.

    @classmethod
    def load(cls, run: str | Path, device: str | torch.device = "cpu") -> Self:
        """The best model of a run, from the run's folder or its `model` folder."""
        # here, as the folder knows every model
        from flatout.inference.model_folder import ModelFolder

        folder = ModelFolder.find(run)
        with folder.read():
            settings = folder.settings()
            require(
                settings.get("problem") in cls.problems,
                str(folder.path),
                f"no run on {cls.answers_to}",
                hint="Open it with flatout.load_predictor(RUN).",
            )
            predictor = cls.read_folder(folder, settings)
            predictor.held_out = HeldOutAnswers.read(folder.path)
            predictor.held_out_errors = HeldOutErrors.read(folder.path)
            if predictor.held_out_errors is not None:
                width = predictor.held_out_errors.distances.shape[1]
                require(
                    width == predictor.numbers_an_answer,
                    str(folder.path / HeldOutErrors.FILE),
                    "is of other targets than the network has",
                    hint="Remove it: then no intervals are promised.",
                )
            predictor.fingerprint = Fingerprint.read(folder.path)
            predictor.model.to(torch.device(device)).eval()
            return predictor

    def answer_with(self, part: str, folder: ModelFolder) -> None:
        """From now on, answer with one part of the run alone: a name of `PARTS`."""
        require(part in PARTS, "--with", repr(part), allowed=", ".join(PARTS))
        raise UserError(
            "--with",
            f"this run on {self.answers_to} has no other way to answer",
            hint="Leave it out.",
        )

    def leave_out_unsure(self, at_error: float | str) -> None:
        """From now on, give only answers of which at most this share is wrong: 0.05, or 5%."""
        text = str(at_error)
        try:
            error = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            error = 0.0
        require(0 < error < 1, "--at-error", text, allowed="above 0 and below 1, as 5% or 0.05")
        require(
            not self.part,
            "--at-error",
            f"is promised without --with {self.part}",
            hint="Leave one of them out.",
        )
        if self.held_out_errors is not None:
            self.half_widths = self.held_out_errors.choose(error)
            self.abstention = Abstention.of_intervals(error)
            return
        if self.held_out is None:
            raise UserError(
                "--at-error",
                f"this run on {self.answers_to} has kept no answers to validation rows",
                hint=CALIBRATE,
            )
        self.abstention = self.held_out.choose(error)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def logit_scale(self) -> tuple[float, float]:
        """The mean and the spread that turn logits into answers: `logits * spread + mean`.

        An exported head does this itself.
        """
        return 0.0, 1.0

    def batches(
        self,
        tokens: Array | Ragged | tuple[Array, NDArray[np.int32]],
        count: int,
        rows_per_batch: int,
    ) -> Iterator[FlatBatch]:
        """So many rows in batches as the network reads them; `batch.rows` numbers them.

        `tokens`: a store's column, or the values of rows one after the other and their lengths.
        """
        if isinstance(tokens, tuple):
            if self.fingerprint is not None:
                self.unlike = self.fingerprint.compare(*tokens)
            tokens = Ragged.of(*tokens)
        layout = BatchLayout.of(self.model)
        order = np.arange(count)
        # For exact answers rows are repeated until each length fills its batches, and the repeated
        # ones are answered twice. `batch.rows` names the row that each of them is.
        if self.exact:
            if isinstance(tokens, Ragged):
                rows_per_batch = _EXACT_ROWS[layout]
                order = fill_batches(tokens.lengths, rows_per_batch)
                tokens = Ragged(tokens.values, tokens.offsets[order], tokens.lengths[order])
            else:
                rows_per_batch = _EXACT_ENCODINGS
                order = fill_batches(np.zeros(count), rows_per_batch)
                tokens = tokens[order]
            self.asked += count
            self.computed += len(order)
        plan = PlanSettings(rows_per_batch=rows_per_batch, layout=layout, shuffle=False)
        rows = StoreSplit("rows", len(order), {"tokens": tokens})
        for batch in Feed(rows, plan, device=self.device):
            yield replace(batch, rows=torch.from_numpy(order)[batch.rows])

    @staticmethod
    def rows_in_memory(source: Any, columns: Sequence[str]) -> list[Any]:
        """Rows in their order, from one row, a list, or a table with the columns of training."""
        if isinstance(source, str | bytes):
            return [source]
        is_list = hasattr(source, "__iter__")
        require(
            is_list,
            "predict",
            f"{source!r} is neither a row nor a list of rows",
            hint="Pass a list, or a table.",
        )
        if not (isinstance(source, Mapping) or hasattr(source, "columns")):
            return list(source)
        values_of_columns = []
        for name in columns:
            require(
                name in source,
                "predict",
                f"no column {name!r}",
                hint="Pass a list, or a table as in training.",
            )
            column = source[name]
            values = [column] if isinstance(column, str | bytes) else column  # one row
            values_of_columns.append(pa.array(values).to_pylist())
        if len(values_of_columns) == 1:
            return values_of_columns[0]
        return list(zip(*values_of_columns, strict=True))

    @staticmethod
    def blocks(
        table: Table, columns: Sequence[str] = ()
    ) -> Iterator[tuple[NDArray[np.int64], pa.RecordBatch]]:
        """Some columns of a table, or all, block by block, each with the numbers of its rows."""
        return table.numbered(list(columns or table.columns), _ROWS_PER_BLOCK)

    @staticmethod
    def require_rows(count: int, table: Table) -> None:
        """Refuse a table in which there was nothing to score."""
        require(count > 0, "FILE", f"{table.name}: no rows", hint="Name a file that holds some.")

    @staticmethod
    def chosen(
        classes: pa.Array, probabilities: Tensor, threshold: float | Tensor
    ) -> dict[str, pa.Array]:
        """The classes of each row at or above the threshold, and their probabilities, as lists."""
        scores = probabilities.numpy()
        row, column = np.nonzero((probabilities >= threshold).numpy())
        counts = np.bincount(row, minlength=len(scores))
        offsets = pa.array(row_bounds(counts).astype(np.int32))
        names = classes.take(pa.array(column))
        values = pa.array(scores[row, column])
        return {
            "prediction": pa.ListArray.from_arrays(offsets, names),
            "probability": pa.ListArray.from_arrays(offsets, values),
        }


def texts_in_memory(source: object, roles: Roles) -> list[str]:
    """Texts in their order; each row is a text, or a pair of texts."""
    rows = RunPredictor.rows_in_memory(source, roles.texts)
    texts = []
    for number, row in enumerate(rows):
        parts = row if isinstance(row, list | tuple) and row else [row]
        require(
            all(map(_is_whole_text, parts)),
            "predict",
            f"row {number} is {row!r}",
            allowed="a text, or a pair of texts, of whole characters",
        )
        texts.append(row if isinstance(row, str) else PAIR.join(row))
    return texts


def _is_whole_text(value: object) -> bool:
    """Whether a value is a text without halves of surrogate pairs, which UTF-8 cannot hold."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def fill_batches(lengths: NDArray[Any], size: int) -> NDArray[np.int64]:
    """Rows by length, those of each length repeated until they fill batches of this size.

    Lengths [3, 2, 3, 3] in batches of 2: row 1 twice, then the rows 0 2 3 0.
    """
    # In such a batch a row gets the same sums in each place, beside any rows. Products of other
    # shapes sum in another order. Products of a few rows give each place a way of its own, and so
    # do the last few numbers of a tensor.
    of_length = [np.flatnonzero(lengths == length) for length in np.unique(lengths)]
    filled = [np.resize(rows, -(-len(rows) // size) * size) for rows in of_length]
    return np.concatenate([*filled, np.empty(0, np.int64)])


def in_order(
    answer: Callable[[Any, Piece], Answer], predictors: Sequence[Any], pieces: Iterable[Piece]
) -> Iterator[Answer]:
    """The answers to all pieces, in their order; each predictor answers in a thread of its own."""
    # This thread reads pieces ahead, one more than there are predictors: each of them then finds
    # the next piece ready, and memory holds few.
    free = iter(predictors)
    thread = threading.local()

    def begin() -> None:
        thread.predictor = next(free)  # each thread has one

    waiting: deque[Future[Answer]] = deque()
    with ThreadPoolExecutor(len(predictors), "answer", begin) as pool:
        for piece in pieces:
            waiting.append(pool.submit(lambda piece: answer(thread.predictor, piece), piece))
            if len(waiting) > len(predictors):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
