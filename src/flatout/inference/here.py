"""Measure the forms of a text classifier on this machine, and write the best one into a folder.

Speed, size and score of each form are measured in the way that it is used, by transformers or
onnxruntime. Rows are sorted and padded in batches, and then asked alone. The folder needs nothing
of flatout. It has the weights, the tokenizer, `predict.py`, a model card, and the measurements.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.data.problem import Problem
from flatout.data.tables.table import Table
from flatout.data.tokens.long_texts import Long
from flatout.data.tokens.subwords import PAIR
from flatout.distributed.limits import processor_name
from flatout.engine.precision import bf16_is_native_on_cpu
from flatout.errors import UserError, require
from flatout.inference.folder_predictors import FolderPredictor, predictors_of_folder
from flatout.inference.forms import Form, forms_of_run, together
from flatout.inference.linear_part import LINEAR
from flatout.inference.model_folder import WEIGHTS
from flatout.inference.onnx_file import ONNX, errors_alone, keep_onnxruntime_silent
from flatout.inference.open_folder import has_weights, is_transformers_folder
from flatout.inference.run_predictor import FileOptions, RunPredictor, Scored
from flatout.inference.text import Predictor
from flatout.inference.verify import SplitAnswer, Verified, verify, write_certificate
from flatout.inference.words_onnx import encode_padded, open_tokenizer, write_program
from flatout.models.encoder.transformer import Transformer, quiet_library
from flatout.perf.measure.intervals import take_turns
from flatout.report.page import render_text
from flatout.report.run_report import interval_text
from flatout.run_log import Say
from flatout.tasks.metrics import monitored_metric

if TYPE_CHECKING:
    from onnx import GraphProto

INT8 = "model_int8.onnx"
STATIC = "model_static_int8.onnx"
BF16 = "bf16"
HEAD = (
    f"{'form':<23} {'rows/s':>8} {'p50 ms':>7} {'p99 ms':>7} {'MB':>7}  {'same answers':<16} score"
)
_ALONE = 100
_ROUNDS = 3
_SEEN = 128
_PAYS = 1.05  # of the speed of fp32, below which another form is not worth its trouble


@dataclass(frozen=True, slots=True)
class FormMeasurement:
    """Speed, size and score of one form on this machine."""

    name: str
    file: str  # its weights in the folder; empty: the run itself
    throughput: float  # rows a second
    latency: float  # median milliseconds of one row alone
    slowest: float  # the same of 99 of 100 rows
    size: float  # megabytes
    score: float
    interval: str
    verified: Verified

    def line(self) -> str:
        figures = (
            f"{self.throughput:>8,.0f} {self.latency:>7.1f} {self.slowest:>7.1f} {self.size:>7.1f}"
        )
        return f"{self.name:<23} {figures}  {self.same():<16} {self.scored()}"

    def same(self) -> str:
        return f"{self.verified.same:,} of {self.verified.rows:,}"

    def scored(self) -> str:
        return f"{self.score:.4f}{self.interval}"


BEST: dict[str, Callable[[FormMeasurement], float]] = {
    "throughput": lambda form: form.throughput,
    "latency": lambda form: 1 / form.latency,
    "size": lambda form: 1 / form.size,
}  # what a form can be best for; the larger value is the better one


def as_measurable(predictor: RunPredictor, where: str) -> Predictor:
    """The predictor of a run whose folder answers as the run does; other runs are refused."""
    if not isinstance(predictor, Predictor) or type(predictor) is not Predictor:
        raise UserError(
            where,
            "--for here chooses among forms of text classifiers, and this run answers"
            f" {predictor.answers_to}",
        )
    require(
        predictor.roles.join != PAIR,
        where,
        "--for here does not read pairs of texts",
        hint="Leave it out.",
    )
    require(
        predictor.long_texts.kind is Long.cut,
        where,
        f"--for here cuts the texts that the run reads with data.long={predictor.long_texts.kind}",
        hint="Leave it out.",
    )
    return predictor


def quantise(folder: Path, texts: Iterable[str]) -> list[str]:
    """Write two ONNX files with weights of 8 bits; return a line about what stays in fp32.

    Numbers between layers are rounded by their range: in INT8 by that of each batch, in STATIC by
    that of some of the `texts`.
    """
    keep_onnxruntime_silent()
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic, quantize_static

    model = onnx.load(folder / ONNX)
    # sizes that torch's exporter notes, and that contradict onnx's own
    del model.graph.value_info[:]
    names = [each.name for each in model.graph.input]
    encode = _encoder_of(folder)

    def encode_each() -> Iterator[dict[str, NDArray[np.int64]]]:
        for text in islice(texts, _SEEN):
            batch = encode([text])
            yield {name: batch[name].numpy() for name in names}

    inputs = encode_each()
    # what onnxruntime reads ranges of numbers from
    seen = SimpleNamespace(get_next=lambda: next(inputs, None))
    both = {"weight_type": QuantType.QInt8, "per_channel": True}
    static = {
        "op_types_to_quantize": ["MatMul", "Gemm", "Gather"],
        "activation_type": QuantType.QUInt8,
    }
    # TextCNN with convolutions in 8 bits took 2.4 times as long as in fp32.
    convolutions = [node.name for node in model.graph.node if node.op_type == "Conv"]
    with errors_alone():  # it asks for a preparation that is for other networks
        quantize_dynamic(copy.deepcopy(model), folder / INT8, **both, nodes_to_exclude=convolutions)
        quantize_static(model, folder / STATIC, seen, **both, **static)
    left = {name: _in_fp32(onnx.load(folder / name).graph) for name in (INT8, STATIC)}
    return [f"{name}: left in fp32: {each}" for name, each in left.items() if each]


def _encoder_of(folder: Path) -> Callable[[list[str]], Mapping[str, Tensor]]:
    """A function from texts to inputs, by the tokenizer of a folder; long texts are cut."""
    if not is_transformers_folder(folder):
        return partial(encode_padded, open_tokenizer(folder))
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return partial(tokenizer, return_tensors="pt", truncation=True)


def _in_fp32(graph: GraphProto) -> str:
    """The operators that read matrices of fp32."""
    from onnx import TensorProto

    weights = {
        each.name
        for each in graph.initializer
        if each.data_type == TensorProto.FLOAT and len(each.dims) > 1
    }
    # The weights of an LSTM's inputs and states come second and third; then its biases, `[1, n]`.
    counts = Counter(node.op_type for node in graph.node if weights & set(node.input[:3]))
    return ", ".join(f"{kind} ({count}×)" for kind, count in counts.items())


def measure_forms(
    predictor: Predictor, scored_run: Scored, folder: Path, table: Table, say: Say
) -> list[FormMeasurement]:
    """Measure each form of an exported run on labelled rows.

    The first one is the run's own `predict`, whose score `scored_run` is known.
    """
    rows = list(predictor.rows(table, FileOptions()))
    predictor.require_rows(len(rows), table)
    expected = [
        SplitAnswer.of(answer) for answer in forms_of_run(predictor, [], {})[0].answers(rows)
    ]
    forms = _forms(predictor, folder)
    weights = WEIGHTS if has_weights(folder) else ONNX
    seconds = _in_turn(forms, sorted(rows, key=len))
    measured = []
    for name, (file, asked) in forms.items():
        alone = np.array([1e3 / _passes_per_s(asked, [row]) for row in rows[:_ALONE]])
        scored = (
            scored_run
            if asked is predictor
            else asked.score_table(table, FileOptions(), [asked], lambda rows: None)
        )
        metric = monitored_metric(predictor.labels.problem)
        interval = interval_text(scored.intervals.get(metric))
        parts = folder.glob(f"{file or weights}*")  # large ones of ONNX lie beside their file
        size = sum(part.stat().st_size for part in parts) / (2e6 if name.endswith(BF16) else 1e6)
        if predictor.linear is not None:
            size += (folder / LINEAR).stat().st_size / 1e6
        p50, p99 = np.quantile(alone, [0.5, 0.99]).tolist()
        form = Form(name, asked, together, is_exact=name == "predict" or name.endswith("fp32"))
        times = (len(rows) / seconds[name], p50, p99)
        same = verify(form, rows, expected)
        measured.append(
            FormMeasurement(name, file, *times, size, scored.values[metric], interval, same)
        )
        say(measured[-1].line())
    return measured


def _forms(predictor: Predictor, folder: Path) -> dict[str, tuple[str, Any]]:
    predictors: dict[str, tuple[str, Any]] = {"predict": ("", predictor)}
    names = {ONNX: "onnxruntime fp32", INT8: "onnxruntime int8", STATIC: "onnxruntime static int8"}
    for place, form in predictors_of_folder(predictor, folder).items():
        file = Path(place).name
        if file in names:
            predictors[names[file]] = (file, form)
            continue
        predictors["transformers fp32"] = (WEIGHTS, form)
        if bf16_is_native_on_cpu():
            predictors["transformers bf16"] = (WEIGHTS, _in_bf16(form))
    return predictors


def _in_bf16(plain: RunPredictor) -> FolderPredictor:
    assert isinstance(plain, FolderPredictor)
    kind: Any = type(plain.model)
    folder = plain.model.name_or_path
    with quiet_library():
        net = kind.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=False).eval()
    return replace(plain, model=net, logits_of=lambda given: net(**given).logits)


def _in_turn(forms: dict[str, tuple[str, Any]], rows: list[str]) -> dict[str, float]:
    """Median seconds that each form takes for all rows."""
    for _, predictor in forms.values():
        predictor.predict(rows[:32])  # warms up
    sides = [partial(_passes_per_s, predictor, rows) for _, predictor in forms.values()]
    rates = take_turns(sides, least=_ROUNDS)
    medians = [1 / statistics.median(of_form) for of_form in rates]
    return dict(zip(forms, medians, strict=True))


def _passes_per_s(predictor: RunPredictor, rows: list[str]) -> float:
    """How often a second all rows are answered."""
    began = time.perf_counter()
    predictor.predict(rows)
    return 1 / (time.perf_counter() - began)


def choose(
    measured: Sequence[FormMeasurement], best: str, points: float, problem: Problem
) -> FormMeasurement:
    """The best form that other programs open, of those that lose at most so many points.

    Of an error `points` are per cent: with 0.5, an rmse of 2.0 may become 2.01.
    """
    of_run, *others = measured
    if problem is Problem.regression:
        fits = [each for each in others if each.score <= of_run.score * (1 + points / 100)]
    else:
        fits = [each for each in others if each.score >= of_run.score - points / 100]
    require(
        bool(fits),
        "--allow-points",
        f"no form loses as little as {points:g} points",
        hint="Allow more.",
    )
    return max(fits, key=BEST[best])


def remarks(measured: Sequence[FormMeasurement], chosen: FormMeasurement, best: str) -> list[str]:
    """Lines about the chosen form, and about forms that bring nothing on this machine."""
    gain = BEST[best]
    fp32 = measured[1]  # of transformers, or of onnxruntime for a network from scratch
    poor = [
        each
        for each in measured
        if each.file and each is not fp32 and gain(each) < _PAYS * gain(fp32)
    ]
    ratio = gain(chosen) / gain(measured[0])
    of_fp32 = f"of {fp32.name} for {best}"
    lines = [
        f"{each.name} does not pay here: {gain(each) / gain(fp32):.2f}× {of_fp32}" for each in poor
    ]
    faster = ", which is faster but needs flatout" if ratio < 1 else ""
    return [*lines, f"best for {best}: {chosen.name}, {ratio:.2f}× of this run's predict{faster}"]


def write_best(
    folder: Path,
    predictor: Predictor,
    measurements: Sequence[FormMeasurement],
    chosen: FormMeasurement,
    about: dict[str, Any],
) -> None:
    """Leave one form in the folder, with its certificate, a program and a model card."""
    for file in {WEIGHTS, ONNX, INT8, STATIC} - {chosen.file}:
        for path in folder.glob(f"{file}*"):
            path.unlink()
    if chosen.name.endswith(BF16):
        cast(Any, _in_bf16(FolderPredictor.of_folder(folder)).model).save_pretrained(folder)
    problem = predictor.labels.problem
    model = predictor.model
    is_encoder = isinstance(model, Transformer)
    network = type(model).__name__
    if isinstance(model, Transformer):
        network = f"fine-tuned {model.described.model_type}"
    about = {**about, "processor": processor_name(), "threads": torch.get_num_threads()}
    measured = {"form": chosen.name, "measured": [asdict(each) for each in measurements]}
    changed = chosen.verified.rows - chosen.verified.same
    write_certificate(folder / "verify.json", {**about, **measured}, [chosen.verified], changed)
    write_program(folder, chosen.file, predictor, encoder=is_encoder)
    card = render_text(
        "card.md",
        **about,
        problem=problem.value,
        network=network,
        max_length=predictor.max_length,
        classes=[] if problem is Problem.regression else predictor.labels.classes,
        metric=monitored_metric(problem),
        found=measurements,
        chosen=chosen,
    )
    (folder / "README.md").write_text(f"{card}\n", encoding="utf-8")
