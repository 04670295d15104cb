"""Two layers as torch has them, without what they waste on a CPU: the same mathematics, the same
state.

An embedding's gradient is a table of zeros with a few rows filled in. Torch makes a new table each
step. One of fifty megabytes costs more in page faults than a small encoder's layers. Here one table
is kept, the rows of the batch are added to it, and only these are cleared after the step. Ranks
exchange only these rows, too. Dropout needs a random bit a number; torch draws a double for each.
Here one draw decides four places, to 1/65,536.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_SIXTEEN_BITS = 1 << 16
# whole numbers as wide as the numbers whose bits they cut out
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_LEAST_WORTH = 1 << 18  # numbers of a table from which on keeping its gradient is worth while


def make_lean(model: nn.Module) -> None:
    """Let a model's dropout and large embeddings be lean where they are computed on a CPU; its
    state stays the same.
    """
    owners = Counter(
        id(each) for module in model.modules() for each in module.parameters(recurse=False)
    )
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
    """An embedding that adds to one kept gradient; after `zero_grad` the next pass clears it and
    puts it back.
    """

    keeps_gradient = False

    def forward(self, input: Tensor) -> Tensor:
        is_lean = self.keeps_gradient and self.weight.requires_grad and torch.is_grad_enabled()
        if not is_lean or self.max_norm is not None or self.scale_grad_by_freq:
            return super().forward(input)
        return _Lookup.apply(self.weight, input, self)

    def clear(self) -> None:
        """Zero what the last step added, and keep the table for the next."""
        for ids in vars(self).pop("_added", []):
            vars(self)["_table"].index_fill_(0, ids, 0.0)

    def exchange(self) -> None:
        """Average the gradient over all ranks, in the rows that any rank has added to."""
        if not self.weight.requires_grad:
            return
        table = self._put_table()
        touched = torch.zeros(len(self.weight), dtype=torch.int32)
        for ids in vars(self).get("_added", []):
            touched.index_fill_(0, ids, 1)
        dist.all_reduce(touched)
        ids = touched.nonzero().flatten()
        rows = table.index_select(0, ids)
        dist.all_reduce(rows)
        table.index_copy_(0, ids, rows.div_(dist.get_world_size()))
        vars(self)["_added"] = [ids]

    def _put_table(self) -> Tensor:
        """The gradient's table, in its place; cleared where the gradient was dropped."""
        if self.weight.grad is None:
            self.clear()
            if "_table" not in vars(self):
                vars(self)["_table"] = torch.zeros_like(self.weight)
            self.weight.grad = vars(self)["_table"]
        return self.weight.grad

    def add(self, ids: Tensor, gradient: Tensor) -> None:
        """Add to the rows of `ids`; a row of padding has no gradient."""
        if self.padding_idx is not None:
            gradient = gradient.masked_fill((ids == self.padding_idx).unsqueeze(1), 0)
        self._put_table().index_add_(0, ids, gradient.to(self.weight.dtype))
        vars(self).setdefault("_added", []).append(ids.long())


class _Lookup(torch.autograd.Function):
    """Rows of a table; the gradient goes to the table's owner instead of through autograd."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, owner: LeanEmbedding) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.owner = owner
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.owner.add(ctx.saved_tensors[0].flatten(), gradients[0].flatten(0, -2))
        return None, None, None


class LeanDropout(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return drop(input, self.p) if self.training else super().forward(input)


def drop(values: Tensor, share: float) -> Tensor:
    """Dropout at random, by sixteen bits a place on a CPU."""
    is_plain = share in (0, 1) or values.device.type != "cpu"
    if is_plain or torch.compiler.is_compiling():  # the compiler makes dropout of its own
        return nn.functional.dropout(values, share)
    return _Dropped.apply(values, *kept_places(values.shape, share))


def even_sigmoid(logits: Tensor) -> Tensor:
    """The same bits for a logit in any place: torch's own takes another way for the last few
    numbers of a piece.
    """
    return 1 / (1 + (-logits).exp())


def kept_places(shape: torch.Size, share: float) -> tuple[Tensor, float]:
    """Which places of a CPU stay when a share is dropped at random, and the factor that keeps their
    mean.
    """
    # int16, with all bits set where a place stays, else none: a bitwise `and` takes a tenth of the
    # time of booleans.
    edge, scale = _edge_and_scale(share)
    return draw_words(shape).lt_(edge).sub_(1), scale


def _edge_and_scale(share: float) -> tuple[int, float]:
    """Random words from the edge on stay; the factor of what stays."""
    edge = round(share * _SIXTEEN_BITS)
    return edge - _SIXTEEN_BITS // 2, _SIXTEEN_BITS / (_SIXTEEN_BITS - edge)


def draw_words(shape: torch.Size) -> Tensor:
    """Sixteen random bits for each place, on a CPU."""
    count = shape.numel()
    words = torch.empty((count + 3) // 4, dtype=torch.int64).random_(
        torch.iinfo(torch.int64).min, None
    )
    return words.view(torch.int16)[:count].view(shape)


def drop_by_words(values: Tensor, words: Tensor, share: float) -> Tensor:
    """Dropout that random words decide; a compiled function gets them from outside, and so stays
    the same each time.
    """
    edge, scale = _edge_and_scale(share)
    # the compiler fuses it, and warns of functions with gradients of their own
    if torch.compiler.is_compiling():
        return values * (words >= edge) * scale
    return _Dropped.apply(values, words.clone().lt_(edge).sub_(1), scale)


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, stays: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(stays)
        ctx.scale = scale
        return _keep(values, stays, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _keep(gradients[0], ctx.saved_tensors[0], ctx.scale), None, None


def _keep(values: Tensor, stays: Tensor, scale: float) -> Tensor:
    kind = _BITS[values.element_size()]
    return (values.view(kind) & stays.to(kind)).view(values.dtype).mul_(scale)
