"""Kernels of a GPU on the device elsewhere, each one operator forwards and one backwards.

By itself the device takes an LSTM or an attention apart into hundreds of small operators. cuDNN and
flash attention are one operator each way, so operators are counted with these. Recurrent layers
compute what they should. Attention gives zeros: its numbers are of no matter here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.function import FunctionCtx

from tests.elsewhere.device import There

_OPERATORS = torch.ops.aten


def _lstm(inputs: Tensor, before: Sequence[Tensor], weights: Sequence[Tensor], *rest: Any) -> Any:
    def run(inputs: Tensor, hidden: Tensor, cell: Tensor, *weights: Tensor) -> Any:
        return torch.lstm(inputs, (hidden, cell), weights, *rest)

    return _Recurrent.apply(run, inputs, *before, *weights)


def _gru(inputs: Tensor, before: Tensor, weights: Sequence[Tensor], *rest: Any) -> Any:
    def run(inputs: Tensor, hidden: Tensor, *weights: Tensor) -> Any:
        return torch.gru(inputs, hidden, weights, *rest)

    return _Recurrent.apply(run, inputs, before, *weights)


def _flash(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
    read = _Attention.apply(query, key, value)
    return read, read, read, read, read


def _efficient(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
    read = _Attention.apply(query, key, value)
    return read, read, read, read, 1, 1


KERNELS: dict[str, Callable[..., Any]] = {
    "lstm.input": _lstm,
    "gru.input": _gru,
    "_flash_attention_forward": _flash,
    "_efficient_attention_forward": _efficient,
}
"""For `add_device`."""


def _note(operator: OpOverload) -> None:
    """Report an operator whose numbers are computed past the device's dispatch."""
    if There.watch is not None:
        There.watch(operator)


class _RecurrentContext(FunctionCtx):
    inputs: list[Tensor]  # on the CPU in fp32: the sequences, the states before, the weights
    outputs: tuple[Tensor, ...]  # on the CPU, with the graph that leads to them
    dtypes: list[torch.dtype]  # of the device's own tensors
    needs_input_grad: tuple[bool, ...]


class _Recurrent(torch.autograd.Function):
    """A recurrent layer, by the CPU's own kernel in fp32."""

    @staticmethod
    def forward(
        ctx: _RecurrentContext, run: Callable[..., tuple[Tensor, ...]], *tensors: There
    ) -> tuple[Tensor, ...]:
        _note(_OPERATORS._cudnn_rnn.default)
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        ctx.inputs = [tensor.numbers.detach().float().requires_grad_() for tensor in tensors]
        with torch.enable_grad():
            ctx.outputs = run(*ctx.inputs)
        ctx.set_materialize_grads(False)
        return tuple(There(output.detach().to(ctx.dtypes[0])) for output in ctx.outputs)

    @staticmethod
    def backward(ctx: _RecurrentContext, *gradients: There | None) -> tuple[Tensor | None, ...]:
        _note(_OPERATORS._cudnn_rnn_backward.default)
        outputs = list[Tensor]()
        incoming = list[Tensor]()
        for output, gradient in zip(ctx.outputs, gradients, strict=True):
            if gradient is not None:
                outputs.append(output)
                incoming.append(gradient.numbers.float())
        found = torch.autograd.grad(outputs, ctx.inputs, incoming)
        returned: list[Tensor | None] = [None]  # of `run`
        needed = ctx.needs_input_grad[1:]
        for gradient, dtype, is_needed in zip(found, ctx.dtypes, needed, strict=True):
            returned.append(There(gradient.to(dtype)) if is_needed else None)
        return tuple(returned)


class _AttentionContext(FunctionCtx):
    saved_tensors: tuple[There, ...]  # queries, keys, values


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _AttentionContext, query: There, key: There, value: There) -> Tensor:
        _note(_OPERATORS._flash_attention_forward.default)
        ctx.save_for_backward(query, key, value)
        return There(torch.zeros_like(query.numbers))

    @staticmethod
    def backward(ctx: _AttentionContext, *gradients: Tensor) -> tuple[Tensor, ...]:
        _note(_OPERATORS._flash_attention_backward.default)
        return tuple(There(torch.zeros_like(tensor.numbers)) for tensor in ctx.saved_tensors)
