"""What recurrent networks share: how one layer runs, both directions at once, and rows reversed.

An LSTM is a chain of small kernels, and one direction alone leaves most of a GPU idle. So both
directions run at once there, each on its own stream. Autograd runs each part of the backward pass
on the stream of its forward pass. Among several ranks both directions stay on one stream. The
device never waits.

Time comes first, `[L, B, D]`: L longest row, B rows, D numbers a place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

State = tuple[Tensor, ...]  # tensors `[layers, B, width]`; all zeros at the beginning of a row
# arguments of torch.lstm and torch.gru for one layer in one direction
_HAS_BIASES = True
_NUM_LAYERS = 1
_DROPOUT = 0.0
_IS_BOTH = False
_IS_BATCH_FIRST = False


def run_layer(
    layer: nn.Module, inputs_LBF: Tensor, before: State | None = None
) -> tuple[Tensor, State]:
    """The states of one `nn.LSTM` or `nn.GRU` layer in one direction, and the last ones.

    An LSTM's `State` is hidden and cell states, a GRU's the hidden ones. None: zeros.
    """
    kind = inputs_LBF.device.type
    is_lstm = isinstance(layer, nn.LSTM)
    is_autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    if kind == "cpu" and is_autocast and not _cpu_runs_bf16():
        if before is not None:
            before = tuple(state.float() for state in before)
        with torch.autocast(kind, enabled=False):
            return run_layer(layer, inputs_LBF.float(), before)
    is_bf16 = is_autocast and torch.get_autocast_dtype(kind) is torch.bfloat16
    if kind == "cpu" or not is_bf16:
        if before is None:
            states, after = layer(inputs_LBF)
        else:
            states, after = layer(inputs_LBF, before if is_lstm else before[0])
        return states, after if is_lstm else (after,)
    return _run_in_bf16(layer, inputs_LBF, before)


def _run_in_bf16(
    layer: nn.Module, inputs_LBF: Tensor, before: State | None
) -> tuple[Tensor, State]:
    """The same by the kernel itself: autocast would take fp16 for recurrent layers."""
    assert isinstance(layer, nn.RNNBase)
    kind = inputs_LBF.device.type
    is_lstm = isinstance(layer, nn.LSTM)
    if before is None:
        zeros = inputs_LBF.new_zeros(1, inputs_LBF.shape[1], layer.hidden_size)
        before = (zeros, zeros) if is_lstm else (zeros,)
    with torch.autocast(kind, enabled=False):
        weights = _in_bf16(layer, layer.all_weights[0], kind)
        inputs_LBF = inputs_LBF.bfloat16()
        before = tuple(state.bfloat16() for state in before)
        settings = (_HAS_BIASES, _NUM_LAYERS, _DROPOUT, layer.training, _IS_BOTH, _IS_BATCH_FIRST)
        if is_lstm:
            states, *after = torch.lstm(inputs_LBF, before, weights, *settings)
        else:
            states, *after = torch.gru(inputs_LBF, before[0], weights, *settings)
    return states, tuple(after)


@cache
def _cpu_runs_bf16() -> bool:
    """Whether oneDNN has recurrent layers in bf16 for this processor; without AVX512 it has not."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _in_bf16(layer: nn.RNNBase, weights: Sequence[Tensor], kind: str) -> list[Tensor]:
    """The weights cast; for cuDNN in one piece of memory, as it wants them."""
    cast = [weight.bfloat16() for weight in weights]
    if kind == "cuda" and hasattr(torch, "_cudnn_rnn_flatten_weight"):
        mode = torch.backends.cudnn.rnn.get_cudnn_mode(layer.mode)
        weights_a_layer = 4  # of inputs, of states, and a bias for each
        projected_size = 0
        with torch.no_grad():
            torch._cudnn_rnn_flatten_weight(
                cast,
                weights_a_layer,
                layer.input_size,
                mode,
                layer.hidden_size,
                projected_size,
                _NUM_LAYERS,
                _IS_BATCH_FIRST,
                _IS_BOTH,
            )
    return cast


def start_layer(layer: nn.RNNBase) -> None:
    """Set the weights before training: orthogonal recurrent ones; an LSTM's forget gates open."""
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
    """The states of both directions at each place.

    `back` runs over reversed rows, on a GPU on its own stream. `places` are `reversed_places`; None
    where all rows have one length.
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
    # Memory freed on one stream might be used again while the other still reads it.
    turned.record_stream(beside)
    back_states.record_stream(here)
    return ahead_states, _reverse_rows(back_states, places)


def _has_streams(device: torch.device) -> bool:
    """Whether both directions may run at once."""
    is_alone = not (dist.is_available() and dist.is_initialized())
    return device.type == "cuda" and is_alone and not torch.compiler.is_compiling()


@cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def reversed_places(lengths_B: Tensor, longest: int) -> Tensor:
    """`[L*B]` for each place the one it takes when each row is reversed; padding stays.

    Lengths [3, 2], longest 3: row 0 takes its places 2 1 0, row 1 its places 1 0 2. Times 2 rows
    plus the row, time first: [4, 3, 2, 1, 0, 5].
    """
    places_L1 = torch.arange(longest, device=lengths_B.device).unsqueeze(1)
    turned_LB = lengths_B - 1 - places_L1
    rows_B = torch.arange(len(lengths_B), device=lengths_B.device)
    return (torch.where(turned_LB >= 0, turned_LB, places_L1) * len(lengths_B) + rows_B).flatten()


def _reverse_rows(states_LBD: Tensor, places: Tensor | None) -> Tensor:
    """States with each row reversed; None: no row is padded."""
    return states_LBD.flip(0) if places is None else _Reverse.apply(states_LBD, places)


class _ReverseContext(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]  # the reversed places


class _Reverse(torch.autograd.Function):
    """Each row reversed; backwards the gradient is reversed in the same way.

    That is a copy. Autograd's own way would be to scatter and add.
    """

    @staticmethod
    def forward(ctx: _ReverseContext, states_LBD: Tensor, turned: Tensor) -> Tensor:
        ctx.save_for_backward(turned)
        return states_LBD.flatten(0, 1).index_select(0, turned).view(states_LBD.shape)

    @staticmethod
    def backward(ctx: _ReverseContext, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient_LBD,) = gradients
        (turned,) = ctx.saved_tensors
        reversed_LBD = gradient_LBD.flatten(0, 1).index_select(0, turned)
        return reversed_LBD.view(gradient_LBD.shape), None
