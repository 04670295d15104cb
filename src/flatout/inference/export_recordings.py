"""`export RUN --onnx` of a run on recordings: a network that a device calls sample by sample, in the sensors' units.

A network that answers each sample takes a sample and its hidden state, and gives the answer and the next state; zeros
begin a recording. One that labels recordings does the same: its answer is that of the samples so far. A network on
windows takes a window. Scales are part of the file, and `signature.json` lists names, shapes, columns and the sampling
step. Before the folder gets its name, the file's answers must equal the run's own.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flatout.errors import require
from flatout.inference.export_encoder import quiet_exporter
from flatout.models.contract import contract

ONNX, SIGNATURE = "model.onnx", "signature.json"
_MOST_APART, _SAMPLES = 1e-5, 200


def export_recordings(predictor: Any, folder: Path) -> list[str]:
    """Write the ONNX file of a run into a folder that is there; lines to print."""
    what = "a bidirectional network reads a recording from its end too, which a device does not have"
    require(not contract(predictor.model).is_both, "export", what, hint="Train with model.bidirectional=false.")
    module: _Window | _Sample = _Window(predictor) if predictor.shape.lookback else _Sample(predictor)
    module = module.eval()
    with (
        quiet_exporter(),
        warnings.catch_warnings(),
    ):  # the exporter warns of a list that torch's own recurrent layers keep
        warnings.filterwarnings("ignore", message="The tensor attributes .*_flat_weights")
        program: Any = torch.onnx.export(
            module,
            tuple(module.inputs.values()),
            dynamo=True,
            verbose=False,
            input_names=list(module.inputs),
            output_names=module.outputs,
        )
    program.save(folder / ONNX, external_data=False)
    (folder / SIGNATURE).write_text(json.dumps(_signature(predictor, module), indent=1), encoding="utf-8")
    apart = _compare(predictor, folder / ONNX)
    hint = "Nothing was written; please report this with the settings of the model."
    require(apart <= _MOST_APART, "export", f"{ONNX} answers otherwise, by {apart:.1e}", hint=hint)
    names = ", ".join(predictor.columns)
    return [
        f"inputs {', '.join(module.inputs)} ({names}); outputs {', '.join(module.outputs)}",
        f"{ONNX}: largest difference from the run's own answers: {apart:.1e} of their range on {_SAMPLES} samples",
    ]


class _Scaled(nn.Module):
    """Columns in their units in, answers in theirs out."""

    def __init__(self, predictor: Any) -> None:
        super().__init__()
        self.model: Any = predictor.model.cpu()
        shape, scaler = predictor.shape, predictor.scaler
        shift, factor = scaler.of_targets(shape.targets)
        shifts = torch.tensor(scaler.shift[: shape.inputs], dtype=torch.float64)
        buffers = {"shift": shifts.float(), "factor": torch.tensor(scaler.factor[: shape.inputs])}
        buffers |= {"rest_of_shift": (shifts - shifts.float()).float()}
        buffers |= {"answer_shift": torch.tensor(shift), "answer_factor": torch.tensor(factor)}
        for name, values in buffers.items():
            self.register_buffer(name, values)
        self.labels = predictor.shape.labels
        self.has_classes, (self.mean, self.spread) = predictor.has_classes, predictor.label_scale

    def scale(self, values: Tensor) -> Tensor:
        """In two steps, since 32 bits hold too few digits of a shift that is large beside the factor."""
        return ((values - self.get_buffer("shift")) - self.get_buffer("rest_of_shift")) / self.get_buffer("factor")

    def in_units(self, answers: Tensor) -> Tensor:
        if self.has_classes:
            return answers.softmax(-1)
        if self.labels:
            return answers * self.spread + self.mean
        return answers * self.get_buffer("answer_factor") + self.get_buffer("answer_shift")


class _Sample(_Scaled):
    """One sample and the state before it; the answer and the state after it."""

    def __init__(self, predictor: Any) -> None:
        super().__init__(predictor)
        what = "a network of your own has no state that is known to us"
        states = contract(self.model).make_state(1)
        require(states is not None, "export", what, hint="Export it with torch.onnx.")
        state = {f"state_{number}": each.clone() for number, each in enumerate(states or ())}
        self.inputs = {"sample": torch.zeros(1, predictor.shape.inputs), **state}
        self.outputs = ["answer", *(f"next_{name}" for name in state)]

    def forward(self, sample_BF: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        answers_BLK, after = self.model.run(self.scale(sample_BF).unsqueeze(1), state)
        return self.in_units(answers_BLK[:, 0]), *after


class _Window(_Scaled):
    """One window; the answer at its end, or the samples after it."""

    def __init__(self, predictor: Any) -> None:
        super().__init__(predictor)
        self.inputs = {"window": torch.zeros(1, predictor.shape.lookback or 1, predictor.shape.inputs)}
        self.outputs = ["answer"]

    def forward(self, windows_BLF: Tensor) -> Tensor:
        return self.in_units(self.model.answer(self.scale(windows_BLF)))


def _signature(predictor: Any, module: _Sample | _Window) -> dict[str, Any]:
    return {
        "inputs": {name: list(each.shape) for name, each in module.inputs.items()},
        "outputs": module.outputs,
        "columns": predictor.columns,
        "targets": predictor.names,
        "step_s": predictor.step_s,
        "state": "zeros begin a recording; give each next_state back as state with the next sample",
    }


def _compare(predictor: Any, path: Path) -> float:
    """The largest difference between the file's answers and the run's own, as a share of the targets' scale; of labels
    after the last sample. Both read samples of 32 bits, and the rounding of an answer to 32 bits is no difference."""
    random = np.random.default_rng(0)
    shape, scaler = predictor.shape, predictor.scaler
    samples = max(_SAMPLES, shape.lookback or 0)
    values = random.standard_normal((samples, shape.inputs)).cumsum(0) / 10
    values = values * np.array(scaler.factor[: shape.inputs]) + np.array(scaler.shift[: shape.inputs])
    values = values.astype(np.float32).astype(np.float64)
    expected, found = predictor.answer(values), stream_onnx(path, values)
    if shape.labels:
        scale = 1.0 if predictor.has_classes else predictor.label_scale[1]
        return float(np.abs((found[-1] - expected) / scale).max())
    factor = np.array(scaler.of_targets(shape.targets)[1])
    expected = expected[-len(found) :]
    rounding = 2 * np.spacing(np.abs(expected).astype(np.float32))
    return float((np.maximum(0, np.abs(found - expected) - rounding) / factor).max())


def stream_onnx(path: Path, values: Any) -> Any:
    """The answers of an exported file: sample by sample, or of the last window."""
    from onnxruntime import InferenceSession

    session = InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = {each.name: each.shape for each in session.get_inputs()}
    values = np.asarray(values, dtype=np.float32)
    if "window" in inputs:
        (answer,) = session.run(None, {"window": values[None, -inputs["window"][1] :]})
        return answer.reshape(-1, answer.shape[-1])
    state = {name: np.zeros(shape, np.float32) for name, shape in inputs.items() if name != "sample"}
    found = []
    for sample in values:
        answer, *after = session.run(None, {"sample": sample[None], **state})
        state = dict(zip(state, after, strict=True))
        found.append(answer[0])
    return np.stack(found)
