"""Attention on a CPU over rectangles of rows, forwards and backwards by hand.

One gather lays all queries, keys and values out by rectangle (`rectangles.py`). Then each rectangle
is a few matrix products: scores, shares by a softmax, answers. Long rows go through torch's fused
kernel, which keeps no scores. One gather puts the answers back in the order of tokens. By hand,
because autograd's slices and joins would cost more than the work itself. It computes in fp32: bf16
backwards takes four times as long.

Open this file to change how attention is computed on a CPU. The gradient of a rectangle, with
incoming gradients g of the answers `a = s v` and shares `s = softmax(q k)`:

    gradient of values    s^T g
    gradient of scores    s * (g v^T - sum over the row of a * g)
    gradient of queries   (gradient of scores) k
    gradient of keys      (gradient of scores)^T q

Shapes: T tokens, B rows, H heads, D numbers a head; N rows of a rectangle, L its longest row, P
places of all rectangles; K is 3 (queries, keys and values) or 2 (keys and values).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from flatout.models.encoder.rectangles import Rectangle, RectangleLayout
from flatout.models.lean import kept_places

if TYPE_CHECKING:
    from flatout.models.encoder.attention import Scores

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _AttendContext(FunctionCtx):
    """What the forward pass leaves for the backward pass."""

    rows: RectangleLayout
    scores: Scores
    is_first: bool  # whether only first tokens asked
    # scaled queries, what was laid out, answers, and for each rectangle its shares (with dropout
    # also what is left of them), or what the fused kernel saves
    saved_tensors: tuple[Tensor, ...]


class _Attend(torch.autograd.Function):
    """Each token reads its row by queries, keys and values `[T, 3, H, D]`.

    Or first tokens alone read, by queries `[B, H, D]`, from keys and values `[T, 2, H, D]`.
    """

    # Autocast is off in here: these products are in fp32 on purpose.

    @staticmethod
    def forward(
        ctx: _AttendContext,
        others_TKHD: Tensor,
        first_BHD: Tensor | None,
        rows: RectangleLayout,
        scores: Scores,
    ) -> Tensor:
        heads = others_TKHD.shape[2]
        is_first = first_BHD is not None
        laid_out = _lay_out(others_TKHD, rows)
        # Scaled in place where it can be. The scaled queries are saved, as the gradients of keys
        # want these.
        if first_BHD is None:
            query = laid_out[0].mul_(scores.scale)
        else:
            query = first_BHD.float() * scores.scale
        # Products write into slices of one answer, so nothing is joined afterwards.
        answer = torch.empty_like(query)
        saved = list[Tensor]()
        factors = _draw_factors(_count_scores(rows, heads, is_first), scores.dropout)
        with torch.autocast("cpu", enabled=False):
            # Saved rectangle by rectangle in order; backwards takes them off the front in the same
            # order.
            for rectangle, factor in zip(rows.rectangles, factors, strict=True):
                own_query, own_answer = _views((query, answer), rectangle, heads, of_rows=is_first)
                own_key, own_value = _views(laid_out[-2:].unbind(), rectangle, heads)
                tensors = [own_query, own_key, own_value, own_answer]
                if _is_fused(rectangle, scores, is_first):
                    saved += _fused_forward(tensors, rectangle, scores)
                else:
                    saved += _plain_forward(tensors, rectangle, scores, factor, is_first=is_first)
        ctx.save_for_backward(query, laid_out, answer, *saved)
        ctx.rows = rows
        ctx.scores = scores
        ctx.is_first = is_first
        answer = answer.to(others_TKHD.dtype)
        if is_first:
            return answer
        _, back = rows.indices_by_head(heads, 1)
        return answer.index_select(0, back).view(-1, heads, answer.shape[1])

    @staticmethod
    def backward(ctx: _AttendContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows = ctx.rows
        scores = ctx.scores
        is_first = ctx.is_first
        gradient = gradients[0]
        heads = gradient.shape[1]
        dtype = gradient.dtype
        query, laid_out, answer, *saved = ctx.saved_tensors
        incoming = gradient.float() if is_first else _lay_out(gradient.unsqueeze(1), rows)[0]
        # The softmax's gradient subtracts sum(share * its gradient) over the keys. That equals the
        # answer times its gradient, summed over D: L times fewer numbers, for all rectangles at
        # once.
        sums = (incoming * answer).sum(-1, keepdim=True)
        outgoing = torch.empty_like(laid_out)
        to_query = torch.empty_like(query) if is_first else outgoing[0]
        by_query = (query, answer, incoming, sums, to_query)
        with torch.autocast("cpu", enabled=False):
            for rectangle in rows.rectangles:
                own_query, own_answer, own_incoming, own_sums, to_own_query = _views(
                    by_query, rectangle, heads, of_rows=is_first
                )
                by_key = (*laid_out[-2:], *outgoing[-2:])
                key, value, to_key, to_value = _views(by_key, rectangle, heads)
                first_saved = saved.pop(0)
                targets = (to_own_query, to_key, to_value)
                if _is_fused(rectangle, scores, is_first):
                    tensors = [own_query, key, value, own_incoming, own_answer, *targets]
                    _fused_back(tensors, rectangle, scores, first_saved)
                else:
                    dropped = saved.pop(0) if scores.dropout else first_saved
                    tensors = [own_query, key, value, own_incoming, own_sums, *targets]
                    _plain_back(tensors, first_saved, dropped)
        # Queries were scaled, so the chain rule scales their gradient. That of keys has met scaled
        # queries already.
        to_query *= scores.scale
        # One gather puts all gradients back in the order of tokens, without zeros to add to.
        parts = len(laid_out)
        _, back = rows.indices_by_head(heads, parts)
        to_others = outgoing.to(dtype).flatten(0, 1).index_select(0, back)
        to_first = to_query.to(dtype) if is_first else None
        return to_others.view(-1, parts, heads, query.shape[-1]), to_first, None, None


attend_by_rectangles = _Attend.apply


def _is_fused(rectangle: Rectangle, scores: Scores, is_first: bool) -> bool:
    """Whether the fused kernel computes this rectangle.

    It keeps no scores, which pays off where they are many. On a CPU it has no dropout.
    """
    return rectangle.is_long and scores.dropout == 0 and not is_first


def _lay_out(values_TKHD: Tensor, rows: RectangleLayout) -> Tensor:
    """`[K, P*H, D]` fp32: rectangle after rectangle, each `[N, H, L, D]`."""
    parts, heads = values_TKHD.shape[1:3]
    into, _ = rows.indices_by_head(heads, parts)
    gathered = values_TKHD.flatten(0, 2).index_select(0, into)
    return gathered.float().view(parts, -1, values_TKHD.shape[3])


def _count_scores(rows: RectangleLayout, heads: int, is_first: bool) -> list[int]:
    """How many scores each rectangle has: one a place and query."""
    if is_first:  # one query a row, so as many scores as places
        return [rectangle.places * heads for rectangle in rows.rectangles]
    return [rectangle.places * heads * rectangle.length for rectangle in rows.rectangles]


def _draw_factors(sizes: list[int], dropout: float) -> Sequence[Tensor | None]:
    """For each rectangle the factors of its shares, 0 where one is dropped; None without dropout.

    Drawn at once for the whole layer.
    """
    if not dropout:
        return [None] * len(sizes)
    stays, scale = kept_places(torch.Size([sum(sizes)]), dropout)
    return stays.float().mul_(-scale).split(sizes)  # `stays` is -1 where a share stays, else 0


def _views(
    values: Sequence[Tensor], rectangle: Rectangle, heads: int, *, of_rows: bool = False
) -> list[Tensor]:
    """One rectangle's part of each tensor, in place, as `[N*H, L, D]`.

    `of_rows`: the tensors are `[B, H, D]`, one vector a row and head, and the views `[N*H, 1, D]`.
    """
    if of_rows:
        first = rectangle.first_row
        size = rectangle.rows
        return [value.narrow(0, first, size).view(-1, 1, value.shape[2]) for value in values]
    first = rectangle.first_place * heads
    size = rectangle.places * heads
    rows = rectangle.rows * heads
    return [value.narrow(0, first, size).view(rows, rectangle.length, -1) for value in values]


def _near(length: int, window: int | None) -> Tensor | None:
    """`[L, L]` zero within the window and -inf beyond; None where the window holds every place."""
    if window is None or length <= window:
        return None
    place = torch.arange(length)
    is_far = (place - place[:, None]).abs() >= window
    return torch.zeros(is_far.shape).masked_fill_(is_far, float("-inf"))


def _plain_forward(
    tensors: list[Tensor],
    rectangle: Rectangle,
    how: Scores,
    factor: Tensor | None,
    *,
    is_first: bool,
) -> list[Tensor]:
    """Write the answer; return the shares, and with dropout also what is left of them."""
    query, key, value, answer = tensors
    scores = torch.bmm(query, key.transpose(1, 2))
    # A mask is one for all heads of a row, so it is added through this view, in place.
    by_row = scores.view(rectangle.rows, -1, *scores.shape[1:])
    if rectangle.bias is not None:
        by_row += rectangle.bias
    near = _near(rectangle.length, how.window)
    if near is not None:
        scores += near
    shares = scores.softmax(-1)
    if rectangle.padding is not None and not is_first:
        # A padded place asks nothing, so it must have no gradient. Beyond every window its scores
        # are all -inf, and its shares not a number.
        shares.view_as(by_row).masked_fill_(rectangle.padding, 0)
    dropped = shares if factor is None else shares * factor.view_as(shares)
    torch.bmm(dropped, value, out=answer)
    return [shares] if factor is None else [shares, dropped]


def _plain_back(tensors: list[Tensor], shares: Tensor, dropped: Tensor) -> None:
    """Write the gradients of queries, keys and values.

    `sums` are the sums over each place's answer times its gradient. `dropped` are the shares after
    dropout, the same tensor as `shares` without it.
    """
    query, key, value, incoming, sums, to_query, to_key, to_value = tensors
    torch.bmm(dropped.transpose(1, 2), incoming, out=to_value)
    to_scores = torch.bmm(incoming, value.transpose(1, 2))
    # Without dropout: shares * (gradient - sums). With it, shares are multiplied by their factor
    # first, and what is left of them (`dropped`) holds that product already: dropped * gradient -
    # shares * sums.
    if dropped is shares:
        to_scores.sub_(sums).mul_(shares)
    else:
        to_scores.mul_(dropped).addcmul_(shares, sums, value=-1)
    torch.bmm(to_scores, key, out=to_query)
    torch.bmm(to_scores.transpose(1, 2), query, out=to_key)


def _by_row(values: list[Tensor], rectangle: Rectangle) -> list[Tensor]:
    """`[N, H, L, D]` of `[N*H, L, D]`, as the fused kernel takes them."""
    return [value.view(rectangle.rows, -1, *value.shape[1:]) for value in values]


def _fused_forward(tensors: list[Tensor], rectangle: Rectangle, how: Scores) -> list[Tensor]:
    """Write the answer; return the logarithm of each place's sum of scores, for backwards."""
    query, key, value, answer = _by_row(tensors, rectangle)
    near = _near(rectangle.length, how.window)
    # 0.0 and False: no dropout, not causal. The scale is in the queries already.
    made, log_sums = _fused(query, key, value, 0.0, False, attn_mask=near, scale=1.0)
    answer.copy_(made)  # the operator has no variant that writes into a slice
    return [log_sums]


def _fused_back(tensors: list[Tensor], rectangle: Rectangle, how: Scores, log_sums: Tensor) -> None:
    """Write the gradients of queries, keys and values."""
    query, key, value, incoming, answer, *targets = _by_row(tensors, rectangle)
    near = _near(rectangle.length, how.window)
    made = _fused_backward(
        incoming, query, key, value, answer, log_sums, 0.0, False, attn_mask=near, scale=1.0
    )
    for target, gradient in zip(targets, made, strict=True):
        target.copy_(gradient)
