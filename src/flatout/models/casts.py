"""Casts to the number format of products: one operator for many tensors, where autocast takes many.

Autocast casts each weight by itself, and each gradient back. A small model on a GPU waits for the
host to launch these operators. Here one operator casts all weights, and one all their gradients.
The numbers are those of autocast.

- `cast_weights`: weights of several layers.
- `share_cast`: inputs that several layers read.
- `join_weights`: weights of linear layers that read the same states, joined to one matrix. Queries,
  keys and values are one product then. `_foreach_copy_` copies each weight into its slice.

        groups    [[query, key, value], [out]], each weight [4, 4]
        joined    one matrix [12, 4] and one [4, 4], in bf16

- `cast_in_pass`: the same for all linear layers of a network, for one forward pass. At the end of
  the backward pass the gradients of all weights are there in sixteen bits and in their own format,
  six bytes a weight, where layer by layer they are there for one layer.

Each pass casts again, also where a step has several. A copy that later passes use would have to be
renewed whenever a weight changes, of which the host does not hear in captured steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

Weights = tuple[Tensor, Tensor | None]  # weight and bias of a product
_OF_A_LINEAR = {"weight", "bias"}  # names of a linear layer's own parameters
Joined = dict[tuple[nn.Linear, ...], Weights]  # by the layers of each group


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The number format of products on this device; None: that of the weights."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def dtype_of_pass(module: nn.Module, device: torch.device) -> torch.dtype | None:
    """The number format in which `cast_in_pass` may cast; None: each layer casts its own weights.

    On a CPU a layer's weights are in its cache just after their own cast. Ranks exchange the
    gradients of a layer while those of the next are computed. Outside of training several threads
    may ask for answers. A network that is compiled as a whole fuses its casts.
    """
    has_ranks = dist.is_available() and dist.is_initialized()
    is_apart = has_ranks or not module.training or torch.compiler.is_compiling()
    if device.type == "cpu" or is_apart:
        return None
    return autocast_dtype(device)


def cast_weights(dtype: torch.dtype, groups: list[list[Tensor]]) -> list[list[Tensor]]:
    """The tensors in this number format; those of a group stand one after the other in memory."""
    sizes = [len(group) for group in groups]
    cast = _Cast.apply(dtype, sizes, *(tensor for group in groups for tensor in group))
    return _regroup(list(cast), sizes)


def share_cast(inputs: Tensor, dtype: torch.dtype, num_readers: int) -> tuple[Tensor, ...]:
    """The inputs in this number format, once for each layer that reads them."""
    shared: tuple[Tensor, ...] = _ShareCast.apply(inputs, dtype, num_readers)
    return shared


def join_weights(dtype: torch.dtype, groups: list[list[nn.Linear]]) -> list[Weights]:
    """Weight and bias of each group of linear layers, joined and cast.

    All layers of a group have a bias, or none has.
    """
    if not groups:
        return []
    with_bias = [group for group in groups if group[0].bias is not None]
    weights = [layer.weight for group in groups for layer in group]
    biases = [layer.bias for group in with_bias for layer in group]
    sizes = [len(group) for group in (*groups, *with_bias)]
    joined = _Join.apply(dtype, sizes, *weights, *biases)
    joined_biases = iter(joined[len(groups) :])
    weights_of_groups = list[Weights]()
    for group, weight in zip(groups, joined[: len(groups)], strict=True):
        weights_of_groups.append((weight, None if group[0].bias is None else next(joined_biases)))
    return weights_of_groups


@contextmanager
def cast_in_pass(dtype: torch.dtype, groups: list[list[nn.Linear]]) -> Iterator[Joined]:
    """Context manager: these linear layers have weights in this number format.

    One operator casts all weights, and one all their gradients. The gradients of a layer that is
    called twice would be added up in sixteen bits. Yields the joined weights of groups of several
    layers, whose own weights stay. Groups with a layer that is not plain are left as they are.
    """
    joined: Joined = {}
    weights_of_layers = list[tuple[nn.Linear, dict[str, nn.Parameter | None]]]()
    plain = [group for group in groups if _are_plain(group)]
    try:
        # Apart, as the cast of a frozen weight has no gradient either.
        for is_trained in (True, False):
            alike = [group for group in plain if group[0].weight.requires_grad == is_trained]
            for group, (weight, bias) in zip(alike, join_weights(dtype, alike), strict=True):
                if len(group) > 1:
                    joined[tuple(group)] = (weight, bias)
                    continue
                weights_of_layers.append((group[0], group[0]._parameters))
                in_format: dict[str, Tensor | None] = {"weight": weight, "bias": bias}
                # tensors in the place of parameters, which is what a module's attributes refuse
                group[0]._parameters = in_format  # type: ignore[assignment]
        yield joined
    finally:
        for layer, parameters in weights_of_layers:
            layer._parameters = parameters
        joined.clear()  # else they would live on, and with them the pass's graph


def _are_plain(group: list[nn.Linear]) -> bool:
    """Whether all layers have weights of their own, and all or none of these are trained.

    Pruning and the like compute a weight from others in each call.
    """
    are_own = all(
        type(layer) is nn.Linear and layer._parameters.keys() == _OF_A_LINEAR for layer in group
    )
    if not are_own:
        return False
    is_trained = group[0].weight.requires_grad
    tensors = [tensor for layer in group for tensor in layer._parameters.values()]
    return all(tensor is None or tensor.requires_grad == is_trained for tensor in tensors)


def _regroup(tensors: list[Tensor], sizes: list[int]) -> list[list[Tensor]]:
    """The first so many tensors, the next so many, …"""
    ends = itertools.accumulate(sizes)
    return [tensors[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _copy_as(dtype: torch.dtype, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in this number format, by one operator."""
    copies = [tensor.new_empty(tensor.shape, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, list(tensors))
    return copies


class _CastContext(FunctionCtx):
    dtype: torch.dtype  # of what was cast


class _Cast(torch.autograd.Function):
    """Tensors cast by one operator, each group of these sizes into one piece of memory."""

    @staticmethod
    def forward(
        ctx: _CastContext, dtype: torch.dtype, sizes: list[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.dtype = tensors[0].dtype
        cast = list[Tensor]()
        for group in _regroup(list(tensors), sizes):
            counts = [tensor.numel() for tensor in group]
            piece = group[0].new_empty(sum(counts), dtype=dtype)
            for tensor, numbers in zip(group, piece.split_with_sizes(counts), strict=True):
                cast.append(numbers.view(tensor.shape))
        torch._foreach_copy_(cast, list(tensors))
        return tuple(cast)

    @staticmethod
    def backward(ctx: _CastContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_copy_as(ctx.dtype, gradients)


class _ShareCast(torch.autograd.Function):
    """One cast for several readers. Their gradients are added up in the format of the inputs."""

    @staticmethod
    def forward(
        ctx: _CastContext, inputs: Tensor, dtype: torch.dtype, num_readers: int
    ) -> tuple[Tensor, ...]:
        ctx.dtype = inputs.dtype
        cast = inputs.to(dtype)
        return tuple(cast.view_as(cast) for _ in range(num_readers))

    @staticmethod
    def backward(ctx: _CastContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # From the last reader to the first, in the order in which autograd would add them.
        last, *others = reversed(gradients)
        total = last.to(ctx.dtype)
        for gradient in others:
            total = total + gradient
        return total, None, None


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
        # A layer that this pass does not call has no gradient, rather than one of zeros.
        ctx.set_materialize_grads(False)
        ctx.lengths = []
        joined = list[Tensor]()
        targets = list[Tensor]()  # slices of the joined tensors, one for each tensor
        rest = list(tensors)
        for size in sizes:
            group = rest[:size]
            rest = rest[size:]
            lengths = [tensor.shape[0] for tensor in group]
            shape = (sum(lengths), *group[0].shape[1:])
            whole = group[0].new_empty(shape, dtype=dtype)
            ctx.lengths.append(lengths)
            joined.append(whole)
            targets += whole.split_with_sizes(lengths)
        torch._foreach_copy_(targets, list(tensors))
        return tuple(joined)

    @staticmethod
    def backward(ctx: _JoinContext, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cast = [gradient for gradient in gradients if gradient is not None]
        if cast and cast[0].dtype != ctx.dtype:
            cast = _copy_as(ctx.dtype, cast)
        rest = iter(cast)
        parts = list[Tensor | None]()
        for gradient, lengths in zip(gradients, ctx.lengths, strict=True):
            if gradient is None:
                parts += [None] * len(lengths)
            else:
                parts += next(rest).split_with_sizes(lengths)
        return None, None, *parts
