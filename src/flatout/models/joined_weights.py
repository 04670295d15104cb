"""Weights of linear layers joined to one matrix, and cast to the number format of products.

Queries, keys and values read the same states, so one product with the three joined matrices does
the work of three. Under autocast the weights have to be cast as well. Both are one operator here,
for all groups of a layer: `_foreach_copy_` copies each weight into its slice of a joined matrix.
Gradients are cast back by one operator, too.

    groups    [[query, key, value], [out]], each weight [4, 4]
    joined    one matrix [12, 4] and one [4, 4], in bf16
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

Weights = tuple[Tensor, Tensor]  # weight and bias of a product


def join_weights(dtype: torch.dtype, groups: list[list[nn.Linear]]) -> list[Weights]:
    """Weight and bias of each group of linear layers, joined and cast."""
    if not groups:
        return []
    weights = [layer.weight for group in groups for layer in group]
    biases = [layer.bias for group in groups for layer in group]
    sizes = [len(group) for group in groups]
    joined = _Join.apply(dtype, 2 * sizes, *weights, *biases)
    return list(zip(joined[: len(groups)], joined[len(groups) :], strict=True))


class _JoinContext(FunctionCtx):
    """What the forward pass leaves for the backward pass."""

    dtype: torch.dtype  # of the weights
    lengths: list[list[int]]  # rows of each tensor, a list for each group


class _Join(torch.autograd.Function):
    """Tensors joined in groups of these sizes, and cast, by one operator."""

    @staticmethod
    def forward(
        ctx: _JoinContext, dtype: torch.dtype, sizes: list[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.dtype = tensors[0].dtype
        ctx.lengths = []
        joined = list[Tensor]()
        targets = list[Tensor]()  # slices of the joined tensors, one for each tensor
        rest = list(tensors)
        for size in sizes:
            group = rest[:size]
            rest = rest[size:]
            lengths = [len(tensor) for tensor in group]
            shape = (sum(lengths), *group[0].shape[1:])
            whole = group[0].new_empty(shape, dtype=dtype)
            ctx.lengths.append(lengths)
            joined.append(whole)
            targets += whole.split(lengths)
        torch._foreach_copy_(targets, list(tensors))
        return tuple(joined)

    @staticmethod
    def backward(ctx: _JoinContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cast = list(gradients)
        if gradients[0].dtype != ctx.dtype:
            cast = [gradient.new_empty(gradient.shape, dtype=ctx.dtype) for gradient in gradients]
            torch._foreach_copy_(cast, list(gradients))
        parts = list[Tensor]()
        for whole, lengths in zip(cast, ctx.lengths, strict=True):
            parts += whole.split(lengths)
        return None, None, *parts
