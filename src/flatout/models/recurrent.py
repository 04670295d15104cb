"""What recurrent networks share: a layer's kernel, both directions at once, rows turned round,
states carried on.

An LSTM is a chain of small kernels, and one direction alone leaves most of a GPU idle. So both run
at once there; autograd runs each part of the backward pass on the stream of its forward pass. Among
several ranks both stay on one. Hidden states go from one batch to the next where rows continue rows
of the batch before. Row numbers of one recording follow one another, so row n continues row n - 1
unless it begins a recording. The device never waits. Time comes first, `[L, B, D]`: L longest row,
B rows, D numbers a place.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from flatout.data.batches.flat_batch import FlatBatch, on_device

State = tuple[Tensor, ...]  # tensors `[layers, B, width]`; all zeros at the beginning of a row


def run_layer(layer: Any, inputs_LBF: Tensor, before: State | None = None) -> tuple[Tensor, State]:
    """States of a layer in one direction and the last ones; by the kernel itself, as autocast may
    take fp16.
    """
    kind = inputs_LBF.device.type
    is_lstm = isinstance(layer, nn.LSTM)
    is_autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    if kind == "cpu" and is_autocast and not _cpu_runs_bf16():
        before = None if before is None else tuple(each.float() for each in before)
        with torch.autocast(kind, enabled=False):
            return run_layer(layer, inputs_LBF.float(), before)
    if kind == "cpu" or not is_autocast or torch.get_autocast_dtype(kind) is not torch.bfloat16:
        given = () if before is None else (before if is_lstm else before[0],)
        states, end = layer(inputs_LBF, *given)
        return states, end if is_lstm else (end,)
    if before is None:
        before = (inputs_LBF.new_zeros(1, inputs_LBF.shape[1], layer.hidden_size),) * (1 + is_lstm)
    with torch.autocast(kind, enabled=False):
        weights = _in_bf16(layer, layer.all_weights[0], kind)
        inputs_LBF = inputs_LBF.bfloat16()
        before = tuple(part.bfloat16() for part in before)
        rest = (True, 1, 0.0, layer.training, False, False)  # of one layer, in one direction
        if is_lstm:
            states, *after = torch.lstm(inputs_LBF, before, weights, *rest)
        else:
            states, *after = torch.gru(inputs_LBF, before[0], weights, *rest)
    return states, tuple(after)


@cache
def _cpu_runs_bf16() -> bool:
    """Whether oneDNN has recurrent layers in bf16 for this processor: without AVX512 it refuses
    them.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _in_bf16(layer: nn.RNNBase, weights: list[Tensor], kind: str) -> list[Tensor]:
    """The weights cast, in one piece of memory, as cuDNN wants them."""
    found = [weight.bfloat16() for weight in weights]
    if kind == "cuda" and hasattr(torch, "_cudnn_rnn_flatten_weight"):
        mode = torch.backends.cudnn.rnn.get_cudnn_mode(layer.mode)
        with torch.no_grad():
            torch._cudnn_rnn_flatten_weight(
                found, 4, layer.input_size, mode, layer.hidden_size, 0, 1, False, False
            )
    return found


def start_layer(layer: Any) -> None:
    """Orthogonal recurrent weights; an LSTM's forget gates are open."""
    gates = 4 if isinstance(layer, nn.LSTM) else 3
    for name, weight in layer.named_parameters():
        if "weight_hh" in name:
            for gate in torch.chunk(weight.data, gates):
                nn.init.orthogonal_(gate)
        elif "weight_ih" in name:
            nn.init.xavier_uniform_(weight)
        else:
            nn.init.zeros_(weight)
    if gates == 4:  # they stand in the order input, forget, cell, output
        layer.get_parameter("bias_ih_l0").data[layer.hidden_size : 2 * layer.hidden_size] = 1.0


def run_both(
    ahead: nn.Module, back: nn.Module, inputs: Tensor, places: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Each place's states of both directions; `back` runs over rows turned round, on a GPU on a
    stream of its own.
    """
    device = inputs.device
    turned = _reverse_rows(inputs, places)
    if not _has_streams(device):
        return run_layer(ahead, inputs)[0], _reverse_rows(run_layer(back, turned)[0], places)
    here = torch.cuda.current_stream(device)
    beside = _stream_beside(device)
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        back_states = run_layer(back, turned)[0]
    ahead_states = run_layer(ahead, inputs)[0]
    here.wait_stream(beside)
    # else its memory might be used again while the other stream reads it
    turned.record_stream(beside)
    back_states.record_stream(here)
    return ahead_states, _reverse_rows(back_states, places)


def _has_streams(device: torch.device) -> bool:
    is_alone = not (dist.is_available() and dist.is_initialized())
    return device.type == "cuda" and is_alone and not torch.compiler.is_compiling()


@cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def reversed_places(lengths_B: Tensor, longest: int) -> Tensor:
    """`[L*B]`: for each place the one it takes when each row is turned round by itself; padding
    stays.
    """
    places_L1 = torch.arange(longest, device=lengths_B.device).unsqueeze(1)
    turned_LB = lengths_B - 1 - places_L1
    rows_B = torch.arange(len(lengths_B), device=lengths_B.device)
    return (torch.where(turned_LB >= 0, turned_LB, places_L1) * len(lengths_B) + rows_B).flatten()


def _reverse_rows(states_LBD: Tensor, places: Tensor | None) -> Tensor:
    """States with each row turned round; None: no row is padded."""
    return states_LBD.flip(0) if places is None else _Reverse.apply(states_LBD, places)


class _Reverse(torch.autograd.Function):
    """Turning twice changes nothing, so the gradient is turned too: a copy, where autograd would
    scatter and add.
    """

    @staticmethod
    def forward(ctx: Any, states_LBD: Tensor, turned: Tensor) -> Tensor:
        ctx.save_for_backward(turned)
        return states_LBD.flatten(0, 1).index_select(0, turned).view(states_LBD.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient_LBD,) = gradients
        return gradient_LBD.flatten(0, 1).index_select(0, ctx.saved_tensors[0]).view(
            gradient_LBD.shape
        ), None


class CarriedState:
    """The states after the last batch, by row number."""

    def __init__(self) -> None:
        self._before: tuple[NDArray[np.int64], State] | None = None
        self._now: list[tuple[NDArray[np.int64], State]] = []
        self._batch: FlatBatch | None = None
        self._is_first: NDArray[np.bool_] = np.empty(0, np.bool_)

    def begin(self, batch: FlatBatch, is_first: NDArray[np.bool_]) -> None:
        """A batch, or a piece of one, is next; `[B]` whether each row begins a recording."""
        if batch.cut_from is None or batch.cut_from[0] == 0:
            self._close()
        self._batch, self._is_first = batch, is_first

    def take(self, zeros: State) -> State:
        """The states with which the rows of this batch begin."""
        assert self._batch is not None
        if self._before is None:
            return zeros
        rows, state = self._before
        wanted = self._batch.rows.numpy() - 1
        order = np.argsort(rows)
        found = order[np.clip(np.searchsorted(rows, wanted, sorter=order), 0, len(rows) - 1)]
        continues = (rows[found] == wanted) & ~self._is_first
        if not continues.any():
            return zeros
        device = zeros[0].device
        index = on_device(found, device)
        is_kept = on_device(continues, device).view(1, -1, 1)
        kept = (part.to(device).index_select(1, index) for part in state)
        return tuple(
            torch.where(is_kept, part, zero) for part, zero in zip(kept, zeros, strict=True)
        )

    def keep(self, state: State) -> None:
        """The states after this batch, cut from its gradient."""
        assert self._batch is not None
        self._now.append((self._batch.rows.numpy(), tuple(part.detach() for part in state)))

    def reset(self) -> None:
        """Forget everything: a pass over the recordings begins."""
        self._before = None
        self._now = []

    def state_dict(self) -> dict[str, Any]:
        self._close()
        if self._before is None:
            return {}
        rows, state = self._before
        return {"rows": torch.from_numpy(rows.copy()), "state": [part.cpu() for part in state]}

    def load_state_dict(self, saved: list[dict[str, Any]]) -> None:
        self.reset()
        self._now = [(each["rows"].numpy(), tuple(each["state"])) for each in saved if each]
        self._close()

    def mark(self) -> Any:
        """Where a step begins, for `go_back` when it is repeated."""
        return self._before, list(self._now)

    def go_back(self, mark: Any) -> None:
        self._before = mark[0]
        self._now = list(mark[1])

    def _close(self) -> None:
        """The pieces of the last batch are whole: they are what the next one continues."""
        if self._now:
            rows, states = zip(*self._now, strict=True)
            self._before = (
                np.concatenate(rows),
                tuple(torch.cat(parts, dim=1) for parts in zip(*states, strict=True)),
            )
            self._now = []
