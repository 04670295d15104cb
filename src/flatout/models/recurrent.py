"""What recurrent networks share: how one layer runs, both directions at once, and rows reversed.

An LSTM is a chain of small kernels, and one direction alone leaves most of a GPU idle. So both
directions run at once there, each on its own stream. Autograd runs each part of the backward pass
on the stream of its forward pass. Among several ranks both directions stay on one stream. The
device never waits.

Time comes first, `[L, B, D]`: L longest row, B rows, D numbers a place.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from flatout.data.batches.kept_tensors import count_up, zeros
from flatout.models.casts import autocast_dtype, cast_weights, share_cast

State = tuple[Tensor, ...]  # tensors `[layers, B, width]`; all zeros at the beginning of a row
# arguments of torch.lstm and torch.gru for one layer in one direction
_HAS_BIASES = True
_NUM_LAYERS = 1
_DROPOUT = 0.0
_IS_BOTH = False
_IS_BATCH_FIRST = False


def run_layer(
    layer: nn.Module,
    inputs_LBF: Tensor,
    before: State | None = None,
    weights: list[Tensor] | None = None,
) -> tuple[Tensor, State]:
    """The states of one `nn.LSTM` or `nn.GRU` layer in one direction, and the last ones.

    An LSTM's `State` is hidden and cell states, a GRU's the hidden ones. None: zeros. `weights`:
    the layer's own in sixteen bits, if they have been cast already.
    """
    device = inputs_LBF.device
    dtype = _kernel_dtype(device)
    if dtype is not None:
        weights = weights or cast_layers([layer], device)[0]
        assert weights is not None
        return _run_in_sixteen_bits(layer, inputs_LBF.to(dtype), before, weights)
    if device.type == "cpu" and torch.is_autocast_enabled("cpu") and not _cpu_runs_bf16():
        if before is not None:
            before = tuple(state.float() for state in before)
        with torch.autocast("cpu", enabled=False):
            return run_layer(layer, inputs_LBF.float(), before)
    is_lstm = isinstance(layer, nn.LSTM)
    if before is None and device.type != "cpu":
        before = _zero_state(layer, inputs_LBF)
    if before is None:
        states, after = layer(inputs_LBF)
    else:
        states, after = layer(inputs_LBF, before if is_lstm else before[0])
    return states, after if is_lstm else (after,)


def cast_layers(layers: list[nn.Module], device: torch.device) -> list[list[Tensor] | None]:
    """The weights of each layer for `run_layer`, cast by one operator; None where none is cast.

    A linear layer may be among them. The weights of each layer lie in one piece of memory. cuDNN
    reads those of inputs and of states, then both biases, one after the other. Others it would copy
    in each pass, and warn.
    """
    dtype = _kernel_dtype(device)
    if dtype is None:
        return [None] * len(layers)
    groups = list[list[Tensor]]()
    for layer in layers:
        if isinstance(layer, nn.RNNBase):
            groups.append(list(layer.all_weights[0]))
        else:
            groups.append([layer.get_parameter("weight"), layer.get_parameter("bias")])
    return list(cast_weights(dtype, groups))


def _run_in_sixteen_bits(
    layer: nn.Module, inputs_LBF: Tensor, before: State | None, weights: list[Tensor]
) -> tuple[Tensor, State]:
    """The same by the kernel itself, in the number format of inputs and weights.

    Autocast would cast each weight by itself, and take fp16 for recurrent layers in any case.
    """
    if before is None:
        before = _zero_state(layer, inputs_LBF)
    with torch.autocast(inputs_LBF.device.type, enabled=False):
        before = tuple(state.to(inputs_LBF.dtype) for state in before)
        settings = (_HAS_BIASES, _NUM_LAYERS, _DROPOUT, layer.training, _IS_BOTH, _IS_BATCH_FIRST)
        if isinstance(layer, nn.LSTM):
            states, *after = torch.lstm(inputs_LBF, before, weights, *settings)
        else:
            states, *after = torch.gru(inputs_LBF, before[0], weights, *settings)
    return states, tuple(after)


def _kernel_dtype(device: torch.device) -> torch.dtype | None:
    """Autocast's number format, if layers call their kernel in it; None: torch's modules run."""
    return None if device.type == "cpu" else autocast_dtype(device)


@cache
def _cpu_runs_bf16() -> bool:
    """Whether oneDNN has recurrent layers in bf16 for this processor; without AVX512 it has not."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _zero_state(layer: nn.Module, inputs_LBF: Tensor) -> State:
    """The state before the first place of each row."""
    assert isinstance(layer, nn.RNNBase)
    shape = (_NUM_LAYERS, inputs_LBF.shape[1], layer.hidden_size)
    hidden = zeros(shape, inputs_LBF.dtype, inputs_LBF.device)
    return (hidden, hidden) if isinstance(layer, nn.LSTM) else (hidden,)


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
    ahead: nn.Module,
    back: nn.Module,
    inputs: Tensor,
    places: Tensor | None,
    weights: list[list[Tensor] | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """The states of both directions at each place.

    `back` runs over reversed rows, on a GPU on its own stream. `places` are `reversed_places`; None
    where all rows have one length. `weights`: of both, if they have been cast already.
    """
    device = inputs.device
    ahead_weights, back_weights = weights or cast_layers([ahead, back], device)
    turned = inputs
    dtype = _kernel_dtype(device)
    if dtype is not None:
        inputs, turned = share_cast(inputs, dtype, 2)
    turned = _Reverse.apply(turned, places)
    if not _has_streams(device):
        ahead_states, _ = run_layer(ahead, inputs, None, ahead_weights)
        back_states, _ = run_layer(back, turned, None, back_weights)
        return ahead_states, _Reverse.apply(back_states, places)
    here = torch.cuda.current_stream(device)
    beside = _stream_beside(device)
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        back_states, _ = run_layer(back, turned, None, back_weights)
    ahead_states, _ = run_layer(ahead, inputs, None, ahead_weights)
    here.wait_stream(beside)
    # Memory freed on one stream might be used again while the other still reads it.
    turned.record_stream(beside)
    if back_weights is not None:
        back_weights[0].record_stream(beside)  # all of them are one piece of memory
    back_states.record_stream(here)
    return ahead_states, _Reverse.apply(back_states, places)


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
    num_rows = lengths_B.shape[0]
    places_L1 = count_up(longest, lengths_B.device).unsqueeze(1)
    turned_LB = lengths_B - 1 - places_L1
    turned_LB = torch.where(turned_LB >= 0, turned_LB, places_L1)
    return torch.add(count_up(num_rows, lengths_B.device), turned_LB, alpha=num_rows).flatten()


def _reverse_rows(states_LBD: Tensor, places: Tensor | None) -> Tensor:
    """States with each row reversed; None: no row is padded."""
    if places is None:
        return states_LBD.flip(0)
    return states_LBD.flatten(0, 1).index_select(0, places).view(states_LBD.shape)


class _ReverseContext(FunctionCtx):
    places: Tensor | None  # the reversed ones


class _Reverse(torch.autograd.Function):
    """Each row reversed; backwards the gradient is reversed in the same way.

    That is a copy. Autograd's own way would be to scatter and add.
    """

    @staticmethod
    def forward(ctx: _ReverseContext, states_LBD: Tensor, places: Tensor | None) -> Tensor:
        ctx.places = places
        return _reverse_rows(states_LBD, places)

    @staticmethod
    def backward(ctx: _ReverseContext, *gradients: Tensor) -> tuple[Tensor, None]:
        return _reverse_rows(gradients[0], ctx.places), None
