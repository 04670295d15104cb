"""A recurrent layer's kernel, and both directions of one at the same time on a GPU.

An LSTM is a chain of small kernels, and one direction alone leaves most of a GPU idle. Autograd runs each part of the
backward pass on the stream of its forward pass. Among several ranks both stay on one stream, as DDP needs.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

State = tuple[Tensor, ...]
"""Tensors `[layers, B, width]`; all zeros at the beginning of a row."""


def run_layer(layer: Any, inputs_LBF: Tensor, before: State | None = None) -> tuple[Tensor, State]:
    """States of a layer in one direction and the last ones.

    With a state before, its kernel is called past the module in training: 45 µs less a step. Autocast would have cuDNN
    compute in fp16 without a scaler where bf16 is asked for, so then it is left here and all is cast.
    """
    kind, is_lstm = inputs_LBF.device.type, isinstance(layer, nn.LSTM)
    is_cast = kind not in ("cpu", "meta") and torch.is_autocast_enabled(kind)
    is_bf16 = is_cast and torch.get_autocast_dtype(kind) is torch.bfloat16
    if not is_bf16 and (before is None or not layer.training or torch.compiler.is_compiling()):
        given = () if before is None else (before if is_lstm else before[0],)
        states, end = layer(inputs_LBF, *given)
        return states, end if is_lstm else (end,)
    layer._update_flat_weights()
    weights = layer._flat_weights
    if before is None:
        before = (inputs_LBF.new_zeros(1, inputs_LBF.shape[1], layer.hidden_size),) * (1 + is_lstm)
    with torch.autocast(kind, enabled=False) if is_bf16 else nullcontext():
        if is_bf16:
            weights = _in_bf16(layer, weights, kind)
            inputs_LBF, before = inputs_LBF.bfloat16(), tuple(part.bfloat16() for part in before)
        rest = (True, 1, 0.0, layer.training, False, False)  # of one layer, in one direction
        if is_lstm:
            states, *after = torch.lstm(inputs_LBF, before, weights, *rest)
        else:
            states, *after = torch.gru(inputs_LBF, before[0], weights, *rest)
    return states, tuple(after)


def _in_bf16(layer: nn.RNNBase, weights: list[Tensor], kind: str) -> list[Tensor]:
    """The weights cast, in one piece of memory, as cuDNN wants them."""
    found = [weight.bfloat16() for weight in weights]
    if kind == "cuda" and hasattr(torch, "_cudnn_rnn_flatten_weight"):
        mode = torch.backends.cudnn.rnn.get_cudnn_mode(layer.mode)
        with torch.no_grad():
            torch._cudnn_rnn_flatten_weight(found, 4, layer.input_size, mode, layer.hidden_size, 0, 1, False, False)
    return found


def run_both(ahead: nn.Module, back: nn.Module, inputs: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    """States of both directions, `back` over rows that are turned round; on a GPU it has a stream of its own."""
    device = inputs.device
    if not _has_streams(device):
        return run_layer(ahead, inputs)[0], run_layer(back, turned)[0]
    here, beside = torch.cuda.current_stream(device), _stream_beside(device)
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        back_states = run_layer(back, turned)[0]
    ahead_states = run_layer(ahead, inputs)[0]
    here.wait_stream(beside)
    turned.record_stream(beside)  # else its memory might be used again while the other stream reads it
    back_states.record_stream(here)
    return ahead_states, back_states


def _has_streams(device: torch.device) -> bool:
    is_alone = not (dist.is_available() and dist.is_initialized())
    return device.type == "cuda" and is_alone and not torch.compiler.is_compiling()


@cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
