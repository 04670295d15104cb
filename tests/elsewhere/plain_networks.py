"""Networks as one would write them plainly: weights cast one by one, constants made in each pass.

Ours have to answer with the same bits, and have the same gradients.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatout.data.batches.flat_batch import FlatBatch, flat_batch
from flatout.data.sequences.info import SequenceShape
from flatout.models.bilstm import BiLSTM, BiLSTMConfig
from flatout.models.rnn import RNN, RNNConfig
from flatout.models.textcnn import TextCNN, TextCNNConfig
from tests.elsewhere.device import add_device
from tests.elsewhere.one_operator import KERNELS

DIFFERENCES = "differences.json"
EVEN = [[3, 4, 5], [5, 6, 7], [9, 9, 3]]
UNEVEN = [[9], [3, 4], [5, 6, 7], [4, 5, 6, 7, 8], [8, 9, 3, 4, 5, 6, 7]]
WINDOWS = SequenceShape(inputs=2, targets=1, lookback=4)
FORECAST = SequenceShape(inputs=2, targets=1, lookback=3, horizon=1)
NO_DROPOUT: dict[str, float] = {"dropout": 0.0, "embedding_dropout": 0.0}

Answer = Callable[[Any, FlatBatch], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """A network, how it would be written plainly, and rows."""

    make: Callable[[], nn.Module]
    plain: Answer
    batch: FlatBatch


def _cast(values: Tensor) -> Tensor:
    """As a recurrent layer of a GPU reads them under autocast."""
    kind = values.device.type
    if kind == "cpu" or not torch.is_autocast_enabled(kind):
        return values
    return values.to(torch.get_autocast_dtype(kind))


def _run(layer: nn.RNNBase, inputs_LBF: Tensor) -> Tensor:
    """The states of a layer of one direction."""
    kind = inputs_LBF.device.type
    inputs_LBF = _cast(inputs_LBF)
    before = inputs_LBF.new_zeros(1, inputs_LBF.shape[1], layer.hidden_size)
    if kind == "cpu":
        return layer(inputs_LBF, (before, before) if isinstance(layer, nn.LSTM) else before)[0]
    weights = [_cast(weight) for weight in layer.all_weights[0]]
    rest = (True, 1, 0.0, layer.training, False, False)
    with torch.autocast(kind, enabled=False):
        if isinstance(layer, nn.LSTM):
            return torch.lstm(inputs_LBF, (before, before), weights, *rest)[0]
        return torch.gru(inputs_LBF, before, weights, *rest)[0]


def answer_windows(model: RNN, batch: FlatBatch) -> Tensor:
    """From the state at the last sample of windows of one length."""
    shape = model.shape
    rows_BLC = batch.tokens.view(batch.num_rows, -1, batch.tokens.shape[1])
    windows_BLF = rows_BLC[:, : shape.lookback, : shape.inputs]
    last_B1F = windows_BLF[:, -1:]
    states_LBD = (windows_BLF - last_B1F if shape.horizon else windows_BLF).transpose(0, 1)
    for layer in model.ahead:
        states_LBD = _run(layer, states_LBD)
    answers_BK = model.output(states_LBD.transpose(0, 1)[:, -1])
    if not shape.horizon:
        return answers_BK
    return answers_BK.view(-1, shape.horizon, shape.targets) + last_B1F[..., -shape.targets :]


def answer_bilstm(model: BiLSTM, batch: FlatBatch) -> Tensor:
    tokens_BL, lengths_B = batch.padded(fill=model.padding_id)
    lengths = batch.lengths.tolist()
    longest = lengths[-1]
    # each row's places from its last word to its first, then padding
    turned = [[*reversed(range(length)), *range(length, longest)] for length in lengths]
    places_LB1 = torch.tensor(turned).t().unsqueeze(-1).to(tokens_BL.device)
    states_LBD = model.embedding(tokens_BL.t())
    for layer in model.layers:
        turned_LBD = states_LBD.gather(0, places_LB1.expand_as(states_LBD))
        back_LBH = _run(layer["back"], turned_LBD)
        back_LBH = back_LBH.gather(0, places_LB1.expand_as(back_LBH))
        states_LBD = torch.cat([_run(layer["ahead"], states_LBD), back_LBH], -1)
    mask_LB = torch.arange(longest, device=tokens_BL.device).unsqueeze(1) < lengths_B
    least = torch.finfo(states_LBD.dtype).min
    return model.output(states_LBD.masked_fill(~mask_LB.unsqueeze(-1), least).amax(0))


def answer_textcnn(model: TextCNN, batch: FlatBatch) -> Tensor:
    tokens_BL, lengths_B = batch.padded(fill=model.padding_id)
    longest = tokens_BL.shape[1]
    places_L = torch.arange(longest + 1, device=tokens_BL.device)
    is_padding_BL = places_L[:longest] >= lengths_B.unsqueeze(1)
    words_BLE = model.embedding(tokens_BL).masked_fill(is_padding_BL.unsqueeze(-1), 0)
    highest = []
    for conv in model.filters:
        answers_BFL = conv(words_BLE.transpose(1, 2))
        windows = answers_BFL.shape[-1]
        is_missing_BL = places_L[:windows] >= (lengths_B + windows - longest).unsqueeze(1)
        least = torch.finfo(answers_BFL.dtype).min
        highest.append(answers_BFL.masked_fill(is_missing_BL.unsqueeze(1), least).amax(-1).relu())
    return model.output(torch.cat(highest, -1))


def _rnn(shape: SequenceShape = WINDOWS, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: RNNConfig(hidden=5, **settings).build(shape=shape)


def _bilstm(layers: int) -> Callable[[], nn.Module]:
    config = BiLSTMConfig(embedding=6, hidden=5, layers=layers, **NO_DROPOUT)
    return lambda: config.build(num_outputs=3, vocabulary_size=10)


def _textcnn() -> nn.Module:
    config = TextCNNConfig(embedding=6, filters=5, **NO_DROPOUT)
    return config.build(num_outputs=3, vocabulary_size=10)


def _recordings() -> FlatBatch:
    """Three rows of four samples, of two inputs and a target."""
    samples_TC = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    return replace(flat_batch([[0] * 4] * 3), tokens=samples_TC)


CASES = {
    "LSTM on windows": Case(_rnn(), answer_windows, _recordings()),
    "GRU of two layers": Case(_rnn(cell="gru", layers=2), answer_windows, _recordings()),
    "forecast": Case(_rnn(FORECAST), answer_windows, _recordings()),
    "BiLSTM": Case(_bilstm(1), answer_bilstm, flat_batch(EVEN)),
    "BiLSTM of two layers, padded": Case(_bilstm(2), answer_bilstm, flat_batch(UNEVEN)),
    "TextCNN": Case(_textcnn, answer_textcnn, flat_batch(EVEN)),
    "TextCNN, padded": Case(_textcnn, answer_textcnn, flat_batch(UNEVEN)),
}


def find_differences(name: str, device: torch.device, dtype: torch.dtype) -> list[str]:
    """What differs in a bit between a network of ours and its plain form: answers, gradients."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make().to(device)
    for weight in model.parameters():
        nn.init.uniform_(weight, -0.5, 0.5)
    batch = case.batch.to(device)
    precision: AbstractContextManager[object] = nullcontext()
    if dtype is not torch.float32:
        precision = torch.autocast(device.type, dtype)
    names = ["answers", *dict(model.named_parameters())]
    found = list[list[Tensor]]()
    for answer in (type(model).__call__, case.plain):
        model.zero_grad()
        with precision:
            answers = answer(model, batch)
        answers.float().square().sum().backward()
        gradients = [weight.grad for weight in model.parameters()]
        found.append([tensor.detach().cpu() for tensor in (answers, *gradients)])
    return [
        name
        for name, ours, plain in zip(names, *found, strict=True)
        if not torch.equal(ours, plain) or not plain.any()
    ]


def compare_all(folder: Path) -> None:
    """Compare each network with its plain form on the device elsewhere, in each number format."""
    device = add_device(KERNELS)
    differences = {}
    for name in CASES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            differences[f"{name}, {dtype}"] = find_differences(name, device, dtype)
    (folder / DIFFERENCES).write_text(json.dumps(differences), encoding="utf-8")
