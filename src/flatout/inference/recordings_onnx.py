"""A network on recordings as ONNX: a file that a device calls sample by sample, in sensors' units.

    answer 1, state 1 = file(sample 1, zeros)
    answer 2, state 2 = file(sample 2, state 1)

If the network labels recordings, its answer is that of the samples so far. A network on windows
takes a window and has no state. Scales are part of the file; `signature.json` lists names and
shapes. The file's answers must equal the run's own.

Shapes: B rows, L samples of a window, K targets, F columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flatout.data.sequences.info import Scaler, SequenceShape
from flatout.errors import require
from flatout.inference.onnx_file import (
    DEFECT,
    MOST_APART,
    ONNX,
    open_onnx,
    read_by,
    save_onnx,
    write_signature,
)
from flatout.models.contract import contract

_SAMPLES = 200
_TRACED = 2  # rows while a file is written; torch takes an axis of one for one that never changes


class RecordingsRun(Protocol):
    """What an export asks of the predictor of a network on recordings."""

    model: nn.Module
    shape: SequenceShape
    scaler: Scaler
    names: list[str]
    step_s: float | None
    label_scale: tuple[float, float]
    has_classes: bool

    @property
    def columns(self) -> list[str]: ...

    def answer(self, values: NDArray[np.float64]) -> NDArray[Any]: ...


def export_recordings(predictor: RecordingsRun, folder: Path) -> list[str]:
    """Write the ONNX file of a run into a folder that exists; return lines to print."""
    require(
        not contract(predictor.model).is_both,
        "export",
        "a bidirectional network reads a recording from its end too, which a device does not have",
        hint="Train with model.bidirectional=false.",
    )
    module: _Window | _Sample
    module = _Window(predictor) if predictor.shape.lookback else _Sample(predictor)
    first, *of_states = [{axis: torch.export.Dim.DYNAMIC} for axis in module.row_axes.values()]
    # states come as one argument
    free_axes = (first, tuple(of_states)) if of_states else (first,)
    save_onnx(module.eval(), module.inputs, module.outputs, free_axes, folder / ONNX)
    write_signature(folder, _signature(predictor, module))
    apart = _compare(predictor, folder / ONNX)
    require(apart <= MOST_APART, "export", f"{ONNX} answers otherwise, by {apart:.1e}", hint=DEFECT)
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
        of_one_row, of_two_rows = (contract(self.model).make_state(rows) for rows in (1, _TRACED))
        require(
            of_two_rows is not None,
            "export",
            "a network of your own has no state that is known to us",
            hint="Export it with torch.onnx.",
        )
        self.inputs = {"sample": torch.zeros(_TRACED, predictor.shape.inputs)}
        self.outputs = ["answer"]
        self.row_axes = {"sample": 0}
        states = zip(of_one_row or (), of_two_rows or (), strict=True)
        for number, (alone, state) in enumerate(states):
            name = f"state_{number}"
            self.inputs[name] = state.clone()
            self.outputs.append(f"next_{name}")
            self.row_axes[name] = _differing_axis(alone.shape, state.shape)

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
    shape = predictor.shape
    scaler = predictor.scaler
    num_samples = max(_SAMPLES, shape.lookback or 0)
    walk = random.standard_normal((num_samples, shape.inputs)).cumsum(0) / 10
    factor = np.array(scaler.factor[: shape.inputs])
    shift = np.array(scaler.shift[: shape.inputs])
    values = (walk * factor + shift).astype(np.float32).astype(np.float64)
    expected = predictor.answer(values)
    answers = stream_onnx(path, values)
    if shape.labels:
        scale = 1.0 if predictor.has_classes else predictor.label_scale[1]
        return float(np.abs((answers[-1] - expected) / scale).max())
    _, factors = scaler.of_targets(shape.targets)
    expected = expected[-len(answers) :]
    rounding = 2 * np.spacing(np.abs(expected).astype(np.float32))
    difference = np.maximum(0, np.abs(answers - expected) - rounding)
    return float((difference / np.array(factors)).max())


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
