"""Write a run as files that other programs open: an encoder for transformers, networks as ONNX.

An encoder's weights are put into the library's own class, so that nothing of flatout is needed to
use them. The folder is then opened by that library, and its padded logits on made-up rows must
equal the run's own.

A network on recordings becomes one that a device calls sample by sample, in the sensors' units:

    answer 1, state 1 = file(sample 1, zeros)
    answer 2, state 2 = file(sample 2, state 1)

If it labels recordings, its answer is that of the samples so far. A network on windows takes a
window and has no state. Scales are part of the file; `signature.json` lists names and shapes. Its
answers must equal the run's own.

Shapes: B rows, L longest row, C outputs, F columns.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flatout.data.batches.flat_batch import flat_batch
from flatout.data.tokens.long_texts import Long, LongTexts
from flatout.data.tokens.subwords import Subwords
from flatout.errors import UserError, first_line, require
from flatout.models.contract import contract
from flatout.models.encoder.lora import merge_lora
from flatout.models.encoder.transformer import Outputs, Transformer, quiet_library

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

ONNX = "model.onnx"
SIGNATURE = "signature.json"
# most that logits may differ; another runtime sums in another order
MOST_APART = 1e-5
_ONNX_APART = 1e-4
_ROWS = 8
_LONGEST = 200
_SAMPLES = 200
_JOINED = {
    "mean": "a text has the mean of its windows' logits",
    "max": "a text has the max of its windows' logits",
    "attention": (
        "a text has the mean of its windows' logits, weighted by an attention that stays in the run"
    ),
    "tags": "a word has the tag of the window with most words around it",
}  # what is answered to several windows
_TRACED = 2  # rows while a file is written; torch takes an axis of one for one that never changes
# bytes of weights; more lie beside the ONNX file, which may have twice that at most
_MOST_IN_ONE_FILE = 1 << 30
DEFECT = "Nothing was written; please report this with the settings of the model."


class EncoderRun(Protocol):
    """What an export asks of the predictor of an encoder."""

    @property
    def model(self) -> Transformer: ...

    @property
    def vocabulary(self) -> Subwords: ...

    @property
    def max_length(self) -> int: ...

    @property
    def long_texts(self) -> LongTexts: ...

    def logit_scale(self) -> tuple[float, float]: ...


class RecordingsRun(Protocol):
    """What an export asks of the predictor of a network on recordings."""

    model: nn.Module
    shape: Any  # a SequenceShape and a Scaler, which belong to a module further up
    scaler: Any
    names: list[str]
    step_s: float | None
    label_scale: tuple[float, float]
    has_classes: bool

    @property
    def columns(self) -> list[str]: ...

    def answer(self, values: NDArray[np.float64]) -> NDArray[Any]: ...


def export_encoder(load: Callable[[], Any], folder: Path, name: Path, *, onnx: bool) -> list[str]:
    """Write a run's encoder into a folder; return lines to print.

    `name`: the name that the folder will get.
    """
    with quiet_library():
        predictor: EncoderRun = load()
        found = export(predictor, folder)
        rows = made_up_rows(predictor)
        checked = f"on {len(rows)} made-up rows of {len(rows[0])} to {len(rows[-1])} tokens"
        kind = outputs_of(predictor.model).auto_class.__name__
        lines = [f"open it with {kind}.from_pretrained({str(name)!r}), and with AutoTokenizer"]
        if window := predictor.model.window:
            joined = _JOINED["tags" if predictor.model.is_tagging else predictor.model.joins.value]
            lines += [f"it answers one window of {window} tokens; {joined}"]
        if predictor.long_texts.kind is Long.head_tail:
            lines += [
                "texts that are too long: its tokenizer cuts their end off, the run cuts out their"
                " middle"
            ]
        lines += [f"largest difference from the run's own logits: {found:.1e} {checked}"]
        if onnx:
            apart = export_onnx(predictor, folder)
            lines += [
                f"{ONNX}: largest difference from transformers: {apart:.1e} on batches of two"
                " shapes"
            ]
    return lines


def export(predictor: EncoderRun, folder: Path) -> float:
    """Write the model and its tokenizer into a folder that exists.

    Return the largest difference of its logits from the run's own.
    """
    rows = made_up_rows(predictor)
    mean, spread = predictor.logit_scale()
    with torch.inference_mode():
        expected = predictor.model.eval()(flat_batch(rows)) * spread + mean
    plain_model(predictor.model, *predictor.logit_scale()).save_pretrained(folder)
    _save_tokenizer(predictor, folder)
    with torch.inference_mode():
        found = _opened(predictor.model, folder)(**_pad_rows(predictor.model, rows)).logits
    if predictor.model.answers_tokens:
        found = found[_mask(rows)]
    return require_close(found, expected, "the exported model", MOST_APART)


def export_onnx(predictor: EncoderRun, folder: Path) -> float:
    """Write the model of an exported folder as ONNX too.

    Return the largest difference of its logits from those of transformers.
    """
    rows = made_up_rows(predictor)
    model = _OnlyLogits(_opened(predictor.model, folder), _input_names(predictor.model)).eval()
    inputs = _pad_rows(predictor.model, rows[:3])
    axes = {0: "rows", 1: "length"}
    save_onnx(model, inputs, ["logits"], (tuple(axes for _ in inputs),), folder / ONNX)
    session = open_onnx(folder / ONNX)
    apart = 0.0
    for batch in (rows, rows[2:3]):
        inputs = _pad_rows(predictor.model, batch)
        with torch.inference_mode():
            expected = model(*inputs.values())
        (found,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        apart = max(apart, require_close(torch.from_numpy(found), expected, ONNX, _ONNX_APART))
    return apart


def plain_model(model: Transformer, mean: float = 0.0, spread: float = 1.0) -> Any:
    """The library's own model with the trained weights.

    Its head multiplies what it answers by `spread`, and then adds `mean`.
    """
    net = model.net
    if any("lora_" in name for name, _ in net.named_parameters()):
        merge_lora(net)
    plain = outputs_of(model).auto_class.from_config(
        type(net.config).from_dict(net.config.to_dict())
    )
    plain.load_state_dict(net.state_dict())
    if (mean, spread) != (0.0, 1.0):
        _scale_outputs(plain, net.config.num_labels, mean, spread)
    return plain.eval()


def outputs_of(model: Transformer) -> Outputs:
    """The kind of an encoder's outputs, without their names."""
    if model.predicts_words:
        return Outputs([], "words")
    return Outputs([], "tags" if model.is_tagging else "single")


def made_up_rows(predictor: EncoderRun) -> list[list[int]]:
    """Rows of random ids in the frame of the tokenizer, shortest first."""
    frame = predictor.vocabulary.frame
    apart = {
        *frame.opening,
        *frame.closing,
        *frame.parting,
        frame.padding,
        predictor.model.padding_id,
    }
    size = min(predictor.vocabulary.size, predictor.model.described.vocab_size)
    ids = [number for number in range(size) if number not in apart]
    longest = (
        min(_LONGEST, predictor.model.longest_row(), predictor.model.window or _LONGEST)
        - frame.size
    )
    random = torch.Generator().manual_seed(0)
    rows = []
    for length in torch.linspace(1, max(1, longest), _ROWS).long().tolist():
        chosen = torch.randint(len(ids), (length,), generator=random).tolist()
        rows.append([*frame.opening, *(ids[number] for number in chosen), *frame.closing])
    return rows


def _pad_rows(model: Transformer, rows: list[list[int]]) -> dict[str, Tensor]:
    """The inputs of transformers for these rows, each of one text.

    Rows [5 6] and [7] become ids [[5, 6], [7, padding]] with the mask [[1, 1], [1, 0]].
    """
    mask_BL = _mask(rows)
    tokens_BL = torch.full(mask_BL.shape, model.padding_id)
    tokens_BL[mask_BL] = torch.tensor([token for row in rows for token in row])
    found = {
        "input_ids": tokens_BL,
        "attention_mask": mask_BL.long(),
        "token_type_ids": torch.zeros_like(tokens_BL),
    }
    return {name: found[name] for name in _input_names(model)}


def _mask(rows: list[list[int]]) -> Tensor:
    """`[B, L]` whether a place is a token."""
    lengths_B = torch.tensor([len(row) for row in rows])
    return torch.arange(int(lengths_B.max())) < lengths_B.unsqueeze(1)


def _input_names(model: Transformer) -> list[str]:
    """The inputs of the model; a pair has type numbers only if it had them in training."""
    return ["input_ids", "attention_mask", *(["token_type_ids"] if model._numbers_pairs else [])]


@torch.no_grad()
def _scale_outputs(net: nn.Module, num_labels: int, mean: float, spread: float) -> None:
    """Let the last layer do what came after it: its values times a spread, plus a mean."""
    linear = [each for each in net.modules() if isinstance(each, nn.Linear)]
    layers = [each for each in linear if each.out_features == num_labels]
    require(
        bool(layers) and (not mean or layers[-1].bias is not None),
        "export",
        "the head of this family has no bias, which the mean of the labels would be added to",
        hint="Train one of another model.family.",
    )
    layers[-1].weight.mul_(spread)
    if layers[-1].bias is not None:
        layers[-1].bias.mul_(spread).add_(mean)


def _save_tokenizer(predictor: EncoderRun, folder: Path) -> None:
    predictor.vocabulary.save(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    longest = predictor.model.window or predictor.model.longest_row()
    settings["model_max_length"] = min(longest, predictor.max_length)
    settings["model_input_names"] = _input_names(predictor.model)
    path.write_text(json.dumps(settings, ensure_ascii=False, indent=2), encoding="utf-8")
    from transformers import AutoTokenizer

    text = "A short text, of 12 words or so: naïve, ÉCOLE & more."
    expected = predictor.vocabulary.encode(pa.array([text]), max_length=1_000).tokens.tolist()
    found = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)(text)["input_ids"]
    require(
        found == expected,
        "export",
        "the saved tokenizer makes other tokens than the run's",
        hint=DEFECT,
    )


def require_close(
    found: Tensor, expected: Tensor, who: str, most: float, what: str = "logits"
) -> float:
    """The largest difference, which must not be above `most`.

    It is a share of the largest value where that is above 1: numbers of a regression may be large.
    """
    apart = float((found - expected).abs().max() / expected.abs().max().clamp_min(1))
    require(
        apart <= most,
        "export",
        f"{who} answers otherwise: {what} differ by {apart:.1e}",
        hint=DEFECT,
    )
    return apart


def _opened(model: Transformer, folder: Path) -> Any:
    kind = outputs_of(model).auto_class
    return kind.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()


class _OnlyLogits(nn.Module):
    def __init__(self, net: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.net = net
        self.names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.net(**dict(zip(self.names, inputs, strict=True))).logits


def save_onnx(
    model: nn.Module,
    inputs: dict[str, Tensor],
    outputs: list[str],
    free_axes: tuple[object, ...],
    file: Path,
) -> None:
    """Write a model as an ONNX file; `free_axes`: the axes of the inputs that may have any size."""
    program = _trace(model, inputs, outputs, free_axes)
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # paths of this machine, of use to the exporter alone
    weights = sum(weight.nbytes for weight in model.parameters())
    program.save(file, external_data=weights > _MOST_IN_ONE_FILE)


def write_signature(folder: Path, signature: dict[str, Any]) -> None:
    """Write the names and shapes of an ONNX file, and what its numbers mean, beside it."""
    text = json.dumps(signature, ensure_ascii=False, indent=1)
    (folder / SIGNATURE).write_text(text, encoding="utf-8")


def _trace(
    model: nn.Module,
    inputs: dict[str, Tensor],
    outputs: list[str],
    free_axes: tuple[object, ...],
) -> Any:
    with errors_alone("torch.onnx"), warnings.catch_warnings():
        # The exporter warns of torch's own code and of packages that are not needed.
        warnings.filterwarnings("ignore", module=r"(torch|copyreg|onnxscript|transformers)\b")
        # And of a list that torch's own recurrent layers keep, and of what its own generated code
        # calls.
        warnings.filterwarnings(
            "ignore", message="The tensor attributes .*_flat_weights|_check_is_size will be"
        )
        return torch.onnx.export(
            model,
            tuple(inputs.values()),
            input_names=list(inputs),
            output_names=outputs,
            dynamic_shapes=free_axes,
            dynamo=True,
            verbose=False,
        )


@contextmanager
def errors_alone(name: str | None = None) -> Iterator[None]:
    """Inside it a logger writes errors only; None: all loggers."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def export_recordings(predictor: RecordingsRun, folder: Path) -> list[str]:
    """Write the ONNX file of a run into a folder that exists; return lines to print."""
    require(
        not contract(predictor.model).is_both,
        "export",
        "a bidirectional network reads a recording from its end too, which a device does not have",
        hint="Train with model.bidirectional=false.",
    )
    module: _Window | _Sample = (
        _Window(predictor) if predictor.shape.lookback else _Sample(predictor)
    )
    free_axes: list[object] = []
    first, *others = module.row_axes.values()
    free_axes.append({first: torch.export.Dim.DYNAMIC})
    if others:  # states come as one argument
        free_axes.append(tuple({axis: torch.export.Dim.DYNAMIC} for axis in others))
    save_onnx(module.eval(), module.inputs, module.outputs, tuple(free_axes), folder / ONNX)
    write_signature(folder, _signature(predictor, module))
    apart = _compare(predictor, folder / ONNX)
    require(
        apart <= MOST_APART,
        "export",
        f"{ONNX} answers otherwise, by {apart:.1e}",
        hint=DEFECT,
    )
    return [
        (
            f"inputs {', '.join(module.inputs)} ({', '.join(predictor.columns)}); outputs"
            f" {', '.join(module.outputs)}"
        ),
        (
            f"{ONNX}: largest difference from the run's own answers: {apart:.1e} of their range on"
            f" {_SAMPLES} samples"
        ),
    ]


class _Scaled(nn.Module):
    """A network that takes columns in their units, and answers in the units of its targets."""

    def __init__(self, predictor: RecordingsRun) -> None:
        super().__init__()
        self.model: Any = predictor.model.cpu()
        shape, scaler = predictor.shape, predictor.scaler
        shift, factor = predictor.label_scale if shape.labels else scaler.of_targets(shape.targets)
        # A shift such as 1,700,000,000 has no place for its last digits in fp32. It is subtracted
        # in two parts: what fp32 holds of it, then the rest.
        shifts = torch.tensor(scaler.shift[: shape.inputs], dtype=torch.float64)
        self.shift = nn.Buffer(shifts.float())
        self.rest_of_shift = nn.Buffer((shifts - shifts.float()).float())
        self.factor = nn.Buffer(torch.tensor(scaler.factor[: shape.inputs]))
        self.answer_shift = nn.Buffer(torch.tensor(shift))
        self.answer_factor = nn.Buffer(torch.tensor(factor))
        self.has_classes = predictor.has_classes

    def scale(self, values: Tensor) -> Tensor:
        """Columns in their units as the network reads them."""
        return ((values - self.shift) - self.rest_of_shift) / self.factor

    def in_units(self, answers: Tensor) -> Tensor:
        answers = answers * self.answer_factor + self.answer_shift
        return answers.softmax(-1) if self.has_classes else answers


class _Sample(_Scaled):
    """A sample of each row and the states before them; the answers and the states after them."""

    def __init__(self, predictor: RecordingsRun) -> None:
        super().__init__(predictor)
        what = "a network of your own has no state that is known to us"
        alone, states = (contract(self.model).make_state(rows) for rows in (1, _TRACED))
        require(states is not None, "export", what, hint="Export it with torch.onnx.")
        state = {f"state_{number}": each.clone() for number, each in enumerate(states or ())}
        self.inputs = {"sample": torch.zeros(_TRACED, predictor.shape.inputs), **state}
        self.outputs = ["answer", *(f"next_{name}" for name in state)]
        row_axes = [0]
        for of_one_row, of_two_rows in zip(alone or (), states or (), strict=True):
            row_axes.append(_differing_axis(of_one_row.shape, of_two_rows.shape))
        self.row_axes = dict(zip(self.inputs, row_axes, strict=True))

    def forward(self, sample_BF: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        answers_BLK, after = self.model.run(self.scale(sample_BF).unsqueeze(1), state)
        return self.in_units(answers_BLK[:, 0]), *after


def _differing_axis(one: Sequence[int], other: Sequence[int]) -> int:
    """The first axis in which two shapes differ: that of the rows."""
    return next(axis for axis, size in enumerate(one) if size != other[axis])


class _Window(_Scaled):
    """One window; the answer at its end, or the samples after it."""

    def __init__(self, predictor: RecordingsRun) -> None:
        super().__init__(predictor)
        self.inputs = {
            "window": torch.zeros(_TRACED, predictor.shape.lookback or 1, predictor.shape.inputs)
        }
        self.outputs = ["answer"]
        self.row_axes = {"window": 0}

    def forward(self, windows_BLF: Tensor) -> Tensor:
        return self.in_units(self.model.answer(self.scale(windows_BLF)))


def _signature(predictor: RecordingsRun, module: _Sample | _Window) -> dict[str, Any]:
    shapes: dict[str, list[int | str]] = {
        name: list(each.shape) for name, each in module.inputs.items()
    }
    for name, axis in module.row_axes.items():
        shapes[name][axis] = "rows"
    signature: dict[str, Any] = {
        "inputs": shapes,
        "outputs": module.outputs,
        "columns": predictor.columns,
        "targets": predictor.names,
        "step_s": predictor.step_s,
    }
    if len(shapes) > 1:
        signature["state"] = (
            "zeros begin a recording; give each next_state back as state with the next sample"
        )
    return signature


def _compare(predictor: RecordingsRun, path: Path) -> float:
    """The largest difference of the file's answers from the run's own, in units of the scale."""
    # A random walk looks like a recording of a sensor. A device gives its samples in fp32, so both
    # read such samples, and a difference of one rounding of the answer is none.
    random = np.random.default_rng(0)
    shape, scaler = predictor.shape, predictor.scaler
    values = (
        random.standard_normal((max(_SAMPLES, shape.lookback or 0), shape.inputs)).cumsum(0) / 10
    )
    values = values * np.array(scaler.factor[: shape.inputs]) + np.array(
        scaler.shift[: shape.inputs]
    )
    values = values.astype(np.float32).astype(np.float64)
    expected = predictor.answer(values)
    found = stream_onnx(path, values)
    if shape.labels:
        scale = 1.0 if predictor.has_classes else predictor.label_scale[1]
        return float(np.abs((found[-1] - expected) / scale).max())
    factor = np.array(scaler.of_targets(shape.targets)[1])
    expected = expected[-len(found) :]
    rounding = 2 * np.spacing(np.abs(expected).astype(np.float32))
    return float((np.maximum(0, np.abs(found - expected) - rounding) / factor).max())


@contextmanager
def read_by(library: str, place: Path, hint: str = "Export the run again.") -> Iterator[None]:
    """Say of a file that a library cannot read what is wrong with it."""
    try:
        yield
    except Exception as error:
        # no narrower class: each library raises whatever a damaged file makes it
        raise UserError(
            str(place), f"{library} cannot read it ({first_line(error)})", hint=hint
        ) from None


def open_onnx(path: Path) -> InferenceSession:
    from onnxruntime import InferenceSession

    return InferenceSession(path, providers=["CPUExecutionProvider"])


def stream_onnx(path: Path, values: NDArray[np.float64], *, is_each: bool = False) -> Any:
    """The answers of an exported file, called sample by sample, or for the last window.

    `is_each`: for each window.
    """
    with read_by("onnxruntime", path):
        return _stream(path, values, is_each=is_each)


def _stream(path: Path, values: NDArray[np.float64], *, is_each: bool) -> Any:
    session = open_onnx(path)
    shapes = {}
    for entry in session.get_inputs():
        shape = list(entry.shape)
        # An axis of any size has a name in place of a number: it is that of the rows, of which
        # there is one.
        for axis, size in enumerate(shape):
            shape[axis] = size if isinstance(size, int) else 1
        shapes[entry.name] = shape
    samples = np.asarray(values, dtype=np.float32)
    if "window" in shapes:
        size = shapes["window"][1]
        read = samples if is_each else samples[-size:]
        windows = np.lib.stride_tricks.sliding_window_view(read, size, axis=0)
        (answer,) = session.run(None, {"window": np.ascontiguousarray(windows.swapaxes(1, 2))})
        return answer.reshape(-1, answer.shape[-1])
    del shapes["sample"]  # all others are states, which begin at zero
    state = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    answers = []
    for sample in samples:
        answer, *next_state = session.run(None, {"sample": sample[None], **state})
        state = dict(zip(state, next_state, strict=True))
        answers.append(answer[0])
    return np.stack(answers)
