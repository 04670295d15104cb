"""Dropout and embeddings as torch has them, without what they waste on a CPU.

The mathematics is the same, and so is the state.

An embedding's gradient is a table of zeros with a few rows filled in. Torch makes a new table each
step, and one of fifty megabytes costs more in page faults than a small encoder's layers. Here one
table is kept: the gradients of the batch's rows are added to it, and only these rows are cleared
after the step. Ranks exchange only these rows, too.

    a table of 50,000 words, rows 3 and 7 in the batch
    backward      adds to rows 3 and 7 of the kept table, and notes 3 and 7
    next step     clears rows 3 and 7

Dropout needs one random decision a number; torch draws a double for each. Here one draw of 64 bits
decides four numbers, each by sixteen bits, so the fraction is exact to 1/65,536.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

_SIXTEEN_BITS = 1 << 16
# for the bytes of a number the whole numbers that are as wide, so that bits can be cut out of it
_WHOLE_NUMBERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_LEAST_WORTH = 1 << 18  # numbers of a table; keeping the gradient of a smaller one saves nothing


def make_lean(model: nn.Module) -> None:
    """Replace dropout and large embeddings of a model in place; its state stays the same."""
    owners = Counter[int]()
    for module in model.modules():
        owners.update(id(weight) for weight in module.parameters(recurse=False))
    for name, module in model.named_modules():
        if type(module) is nn.Dropout:
            module.__class__ = LeanDropout
        elif name.endswith("rel_embeddings"):
            # DeBERTa reads this table's weight rather than rows of it, so autograd has its gradient
            continue
        elif (
            type(module) is nn.Embedding
            and module.weight.numel() >= _LEAST_WORTH
            and not module.sparse
        ):
            # a table that a head reads too has a gradient in every row
            is_alone = owners[id(module.weight)] == 1
            module.__class__ = LeanEmbedding if is_alone else nn.Embedding


class LeanEmbedding(nn.Embedding):
    """An embedding that keeps the table of its gradient from step to step.

    After `zero_grad` the next backward pass clears the table and puts it back in its place. Set
    `keeps_gradient` to use this; else it is a plain embedding.
    """

    keeps_gradient = False

    # Values of the class, as modules that became lean have no `__init__` of this class.
    _table: Tensor | None = None  # the gradient's table; None before the first backward pass
    # the rows that were added to since it was cleared, a tensor for each backward pass
    _added: tuple[Tensor, ...] = ()

    def forward(self, input: Tensor) -> Tensor:
        is_lean = self.keeps_gradient and self.weight.requires_grad and torch.is_grad_enabled()
        if not is_lean or self.max_norm is not None or self.scale_grad_by_freq:
            return super().forward(input)
        return _Lookup.apply(self.weight, input, self)

    def clear(self) -> None:
        """Set to zero what the last step added to; the table stays for the next step."""
        if self._table is not None:
            for ids in self._added:
                self._table.index_fill_(0, ids, 0.0)
        self._added = ()

    def exchange(self) -> None:
        """Average the gradient over all ranks, in the rows that any rank has added to."""
        if not self.weight.requires_grad:
            return
        table = self._put_table()
        touched = torch.zeros(len(self.weight), dtype=torch.int32)
        for ids in self._added:
            touched.index_fill_(0, ids, 1)
        dist.all_reduce(touched)
        ids = touched.nonzero().flatten()
        rows = table.index_select(0, ids)
        dist.all_reduce(rows)
        table.index_copy_(0, ids, rows.div_(dist.get_world_size()))
        self._added = (ids,)

    def _put_table(self) -> Tensor:
        """The gradient, which is the kept table; cleared if the gradient has been dropped."""
        if self.weight.grad is None:
            self.clear()
            if self._table is None:
                self._table = torch.zeros_like(self.weight)
            self.weight.grad = self._table
        return self.weight.grad

    def add(self, ids: Tensor, gradient: Tensor) -> None:
        """Add to the gradient of the rows `ids`; a row of padding has no gradient."""
        if self.padding_idx is not None:
            gradient = gradient.masked_fill((ids == self.padding_idx).unsqueeze(1), 0)
        self._put_table().index_add_(0, ids, gradient.to(self.weight.dtype))
        self._added = (*self._added, ids.long())


class _LookupContext(FunctionCtx):
    owner: LeanEmbedding
    saved_tensors: tuple[Tensor, ...]  # the ids


class _Lookup(torch.autograd.Function):
    """Rows of a table; the gradient goes to the table's owner instead of through autograd."""

    @staticmethod
    def forward(ctx: _LookupContext, weight: Tensor, ids: Tensor, owner: LeanEmbedding) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.owner = owner
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: _LookupContext, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.owner.add(ctx.saved_tensors[0].flatten(), gradients[0].flatten(0, -2))
        return None, None, None


class LeanDropout(nn.Dropout):
    """Dropout by sixteen random bits a number on a CPU, and torch's own elsewhere."""

    def forward(self, input: Tensor) -> Tensor:
        return drop(input, self.p) if self.training else super().forward(input)


def drop(values: Tensor, share: float) -> Tensor:
    """Dropout of a fraction of the values, in training."""
    is_plain = share in (0, 1) or values.device.type != "cpu"
    if is_plain or torch.compiler.is_compiling():  # the compiler makes its own dropout
        return nn.functional.dropout(values, share)
    return _Dropped.apply(values, *kept_places(values.shape, share))


def even_sigmoid(logits: Tensor) -> Tensor:
    """A sigmoid that gives a logit the same bits at every place of a tensor.

    Torch's own computes the last few numbers of a tensor in another way than the rest.
    """
    return 1 / (1 + (-logits).exp())


def kept_places(shape: torch.Size, share: float) -> tuple[Tensor, float]:
    """Which values stay when a fraction is dropped at random, and the factor that keeps their mean.

    The tensor is int16 on the CPU: -1 where a value stays, else 0.
    """
    # -1 has all bits set: a bitwise `and` takes a tenth of the time of booleans.
    edge, scale = _edge_and_scale(share)
    return draw_words(shape).lt_(edge).sub_(1), scale


def _edge_and_scale(share: float) -> tuple[int, float]:
    """The least random word whose value stays, and the factor of what stays.

    Half dropped: words from 0 on stay, of -32,768 to 32,767; the factor is 2.
    """
    dropped_words = round(share * _SIXTEEN_BITS)
    least_word = dropped_words - _SIXTEEN_BITS // 2
    return least_word, _SIXTEEN_BITS / (_SIXTEEN_BITS - dropped_words)


def draw_words(shape: torch.Size) -> Tensor:
    """Sixteen random bits for each value, as int16 on the CPU."""
    count = shape.numel()
    words = torch.empty((count + 3) // 4, dtype=torch.int64)
    words.random_(torch.iinfo(torch.int64).min, None)
    return words.view(torch.int16)[:count].view(shape)


def drop_by_words(values: Tensor, words: Tensor, share: float) -> Tensor:
    """Dropout that random words decide.

    A compiled function gets the words from outside, and so stays the same at each step.
    """
    edge, scale = _edge_and_scale(share)
    # the compiler fuses it, and warns of functions with gradients of their own
    if torch.compiler.is_compiling():
        return values * (words >= edge) * scale
    return _Dropped.apply(values, words.clone().lt_(edge).sub_(1), scale)


class _DroppedContext(FunctionCtx):
    scale: float
    saved_tensors: tuple[Tensor, ...]  # which values stay


class _Dropped(torch.autograd.Function):
    """Dropout by `kept_places`, forwards and backwards in the same places."""

    @staticmethod
    def forward(ctx: _DroppedContext, values: Tensor, stays: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(stays)
        ctx.scale = scale
        return _keep(values, stays, scale)

    @staticmethod
    def backward(ctx: _DroppedContext, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _keep(gradients[0], ctx.saved_tensors[0], ctx.scale), None, None


def _keep(values: Tensor, stays: Tensor, scale: float) -> Tensor:
    """The values that stay, times the factor, and zeros elsewhere."""
    whole = _WHOLE_NUMBERS[values.element_size()]
    return (values.view(whole) & stays.to(whole)).view(values.dtype).mul_(scale)
