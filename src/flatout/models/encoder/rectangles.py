"""The rows of a flat batch, and their attention on a CPU.

There rows of nearly equal lengths are gathered into rectangles, forwards and backwards by hand.
Rows come sorted by length, so a few rectangles hold them with little padding, and only scores are
padded. A rectangle costs as much to start as 1,300 scores; the edges follow from that. It computes
in fp32: bf16 backwards takes four times as long.

Shapes: T tokens, B rows, H heads, D numbers a head; N rows of a rectangle, L its longest, P places
of all rectangles.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.models.encoder.attention import KERNELS, Bounds, Kernel, Scores, pad_rows
from flatout.models.lean import kept_places

_LONG = 160  # rows from this length on are work enough for a call of their own
# scores computed in vain to save the calls of one more rectangle (both cost about 60 µs a layer)
_CALL_SCORES = 1300
# bounds of row lengths are rounded up to it, so that the same few kernels serve all batches
_LENGTH_MULTIPLE = 64
_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Consecutive rows of nearly equal lengths."""

    rows: int
    length: int
    first_row: int
    first: int  # places of the rectangles before it
    is_long: bool  # whether it goes to the fused kernel
    # `[N, 1, 1, L]` zero on tokens and -inf on padding; None where rows are equally long
    bias: Tensor | None = None
    padding: Tensor | None = None  # `[N, 1, L, 1]` whether a place is no token

    @property
    def places(self) -> int:
        return self.rows * self.length


@dataclass(slots=True)
class RectangleLayout:
    """The rows of a batch as rectangles."""

    rectangles: list[Rectangle]
    tokens: Tensor  # [P] the token at each place of the rectangles
    places: Tensor  # [T] the place of each token
    _by_head: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def by_head(self, heads: int, parts: int) -> tuple[Tensor, Tensor]:
        """Index of `[T, parts, H]` vectors for `[parts, P*H]` places of rectangles `[N, H, L]`, and
        the way back.
        """
        # Layers that read all tokens ask for 1 and 3 parts, one that reads first tokens for 2 as
        # well.
        if (heads, parts) not in self._by_head:
            there, back = self._of_one(heads) if parts == 1 else self._of_several(heads, parts)
            self._by_head[heads, parts] = torch.from_numpy(there), torch.from_numpy(back)
        return self._by_head[heads, parts]

    def _of_one(self, heads: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        head = np.arange(heads)
        tokens = self.tokens.numpy()
        there, back = (
            np.empty(len(tokens) * heads, np.int64),
            np.empty(len(tokens) * heads, np.int64),
        )
        for part in self.rectangles:
            own = slice(part.first, part.first + part.places)
            # With heads outside of lengths, bmm reads `[N*H, L, D]` without a copy; one gather lays
            # all rectangles so.
            spread = slice(own.start * heads, own.stop * heads)
            there[spread] = (
                tokens[own].reshape(part.rows, 1, part.length) * heads + head[:, None]
            ).ravel()
            # Numbered in the order `[N, H, L]` in which they lie, read off in the order `[N, L, H]`
            # of tokens.
            lies = spread.start + np.arange(part.places * heads).reshape(
                part.rows, heads, part.length
            )
            back[spread] = lies.transpose(0, 2, 1).ravel()
        # Places of padding are left out on the way back: nothing reads their answers.
        return there, back.reshape(-1, heads)[self.places.numpy()].ravel()

    def _of_several(self, heads: int, parts: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        there, back = (index.numpy() for index in self.by_head(heads, 1))
        token, head = np.divmod(there, heads)
        part = np.arange(parts)
        # Queries, keys and values stand side by side in a token, and one after the other where bmm
        # reads them.
        several = token * (parts * heads) + head + part[:, None] * heads
        return several.ravel(), (back.reshape(-1, 1, heads) + part[:, None] * len(there)).ravel()


def rectangle_edges(lengths: NDArray[np.integer]) -> list[int]:
    """Where to cut rows into rectangles, of which the last row is the longest; rows in order of
    length need fewest.
    """
    edges = [len(lengths)]
    longest = int(lengths[-1])
    wasted = 0
    for row in range(len(lengths) - 1, -1, -1):
        length = int(lengths[row])
        # Scores grow with the square, so a few short rows beside a long one cost more than a call.
        wasted += longest * longest - length * length
        # Equal rows waste nothing and stay together. Long ones that differ part at once: each is
        # worth a call.
        if length != longest and (length > longest or longest >= _LONG or wasted > _CALL_SCORES):
            edges.append(row + 1)
            longest = length
            wasted = 0
    return [*edges, 0][::-1]


def lay_out_rows(lengths: NDArray[np.int64]) -> RectangleLayout:
    """Rows of these lengths, shortest first, as rectangles."""
    starts = np.cumsum(lengths) - lengths
    first = 0
    found = list[Rectangle]()
    tokens = list[NDArray[np.int64]]()
    places = list[NDArray[np.int64]]()
    for begin, end in itertools.pairwise(rectangle_edges(lengths)):
        own = lengths[begin:end]
        length = int(lengths[end - 1])
        place = np.arange(length)
        # Broadcast `[N, L]` on the host; the masks below get an axis for heads, and one for queries
        # or keys.
        is_real = place < own[:, None]
        bias = None
        padding = None
        if (own != length).any():
            mask = torch.from_numpy(is_real)
            bias = torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))[:, None, None]
            padding = ~mask[:, None, :, None]
        # A place of padding repeats its row's first token, which no masked score lets through.
        tokens.append((starts[begin:end, None] + np.where(is_real, place, 0)).ravel())
        places.append(first + np.flatnonzero(is_real))
        found.append(Rectangle(end - begin, length, begin, first, length >= _LONG, bias, padding))
        first += (end - begin) * length
    return RectangleLayout(
        found, torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(np.concatenate(places))
    )


def lay_out_padded(rows: Bounds, tokens: int) -> RectangleLayout:
    """All rows as one rectangle, made on their device."""
    index_BL, is_token_BL, back_T = pad_rows(rows, tokens)
    bias = torch.zeros(is_token_BL.shape, device=index_BL.device).masked_fill(
        ~is_token_BL, float("-inf")
    )
    whole = Rectangle(len(index_BL), rows.longest, 0, 0, is_long=False, bias=bias[:, None, None])
    return RectangleLayout([whole], index_BL.flatten(), back_T)


class FlatRows:
    """How the rows of a flat batch lie, and the attention that keeps them apart."""

    def __init__(self, lengths: Tensor, offsets: Tensor, kernel: Kernel) -> None:
        """`lengths` `[B]` lie on the host; the longest is looked for, as a transform may have
        changed their order.
        """
        # On the host: a look at the device's offsets would wait for it.
        longest = -(-int(lengths.numpy().max()) // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        self.lengths = lengths
        self.bounds = Bounds(offsets.to(torch.int32), longest)
        self.kernel = kernel

    @cached_property
    def layout(self) -> RectangleLayout:
        """The rows as rectangles, or padded to the longest where a device is none; made once, where
        it is needed.
        """
        lengths = self.lengths.numpy()
        is_cpu = self.kernel is Kernel.rectangles
        return lay_out_rows(lengths) if is_cpu else lay_out_padded(self.bounds, int(lengths.sum()))

    def attend(
        self, others_TKHD: Tensor, scores: Scores, first_BHD: Tensor | None = None
    ) -> Tensor:
        """`[T, H, D]`: each token reads the tokens of its row, by queries, keys and values `[T, 3,
        H, D]`.
        """
        # `[B, H, D]` where queries of first tokens are given: they alone read all, by keys and
        # values `[T, 2, H, D]`.
        is_first = first_BHD is not None
        assert scores.window is None or not is_first
        if scores.by_distance is None and self.kernel is Kernel.rectangles:
            return attend_by_rectangles(others_TKHD, first_BHD, self.layout, scores)
        *asking, key, value = others_TKHD.unbind(1)
        query = asking[0] if first_BHD is None else first_BHD
        if scores.by_distance is not None:
            return scores.by_distance(
                query, others_TKHD[:, -2:], self.layout, scores, is_first=is_first
            )
        return KERNELS[self.kernel](query, key, value, self.bounds, scores, is_first=is_first)


class _Attend(torch.autograd.Function):
    """Of queries, keys and values `[T, 3, H, D]`; or of keys and values alone, by queries `[B, H,
    D]`, rows already.
    """

    # Autograd's slicing would cost more than the work. Autocast is off: these products are fp32 on
    # purpose.

    @staticmethod
    def forward(
        ctx: Any,
        others_TKHD: Tensor,
        first_BHD: Tensor | None,
        rows: RectangleLayout,
        scores: Scores,
    ) -> Tensor:
        heads = others_TKHD.shape[2]
        is_first = first_BHD is not None
        laid = _laid_out(others_TKHD, rows)
        # Scaled, in place where it can be, and so kept for backwards: the gradients of keys want
        # the scaled queries.
        query = (
            laid[0].mul_(scores.scale) if first_BHD is None else first_BHD.float() * scores.scale
        )
        # Products write into slices of whole tensors, so nothing is joined afterwards.
        answer = torch.empty_like(query)
        kept = list[Tensor]()
        sizes = [part.places * heads * (1 if is_first else part.length) for part in rows.rectangles]
        factors = _draw_factors(sizes, scores.dropout)
        with torch.autocast("cpu", enabled=False):
            # Recorded rectangle by rectangle in order; backwards takes them off the front in the
            # same order.
            for part, factor in zip(rows.rectangles, factors, strict=True):
                asked, read = _views((query, answer), part, heads, of_rows=is_first)
                own = [asked, *_views(laid[-2:].unbind(), part, heads), read]
                if _is_fused(part, scores, is_first):
                    kept += _fused_forward(own, part, scores)
                else:
                    kept += _plain_forward(own, part, scores, factor, is_first=is_first)
        ctx.save_for_backward(query, laid, answer, *kept)
        ctx.rows = rows
        ctx.scores = scores
        ctx.is_first = is_first
        found = answer.to(others_TKHD.dtype)
        return (
            found
            if is_first
            else found.index_select(0, rows.by_head(heads, 1)[1]).view(-1, heads, found.shape[1])
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows = ctx.rows
        scores = ctx.scores
        is_first = ctx.is_first
        gradient = gradients[0]
        heads = gradient.shape[1]
        kind = gradient.dtype
        query, laid, answer, *kept = ctx.saved_tensors
        incoming = gradient.float() if is_first else _laid_out(gradient.unsqueeze(1), rows)[0]
        # The softmax's gradient subtracts sum(share * its gradient) over the keys. That equals the
        # answer times its gradient, summed over D: L times fewer numbers, for all rectangles at
        # once.
        sums = (incoming * answer).sum(-1, keepdim=True)
        outgoing = torch.empty_like(laid)
        to_query = torch.empty_like(query) if is_first else outgoing[0]
        asking = (query, answer, incoming, sums, to_query)
        with torch.autocast("cpu", enabled=False):
            for part in rows.rectangles:
                asked, read, back, total, to_asked = _views(asking, part, heads, of_rows=is_first)
                key, value, to_key, to_value = _views((*laid[-2:], *outgoing[-2:]), part, heads)
                shares = kept.pop(0)
                targets = (to_asked, to_key, to_value)
                if _is_fused(part, scores, is_first):
                    _fused_back([asked, key, value, read, back, *targets], part, scores, shares)
                else:
                    dropped = kept.pop(0) if scores.dropout else shares
                    _plain_back([asked, key, value, back, total, *targets], shares, dropped)
        # Queries were scaled, so the chain rule scales their gradient; that of keys has met scaled
        # queries already.
        to_query *= scores.scale
        # One gather puts all gradients back in the order of tokens, without zeros to add to.
        found = outgoing.to(kind).flatten(0, 1).index_select(0, rows.by_head(heads, len(laid))[1])
        return (
            found.view(-1, len(laid), heads, query.shape[-1]),
            to_query.to(kind) if is_first else None,
            None,
            None,
        )


attend_by_rectangles = _Attend.apply


def _is_fused(part: Rectangle, scores: Scores, is_first: bool) -> bool:
    """The fused kernel keeps no scores, which pays off where they are many; on a CPU it cannot drop
    any.
    """
    return part.is_long and scores.dropout == 0 and not is_first


def _laid_out(values_TKHD: Tensor, rows: RectangleLayout) -> Tensor:
    """`[K, P*H, D]` fp32: rectangle after rectangle, each `[N, H, L, D]`."""
    parts, heads = values_TKHD.shape[1:3]
    there, _ = rows.by_head(heads, parts)
    return (
        values_TKHD.flatten(0, 2)
        .index_select(0, there)
        .float()
        .view(parts, -1, values_TKHD.shape[3])
    )


def _draw_factors(sizes: list[int], dropout: float) -> Sequence[Tensor | None]:
    """For each rectangle what its shares are multiplied by, drawn at once for the layer; None where
    nothing drops.
    """
    if not dropout:
        return [None] * len(sizes)
    stays, scale = kept_places(torch.Size([sum(sizes)]), dropout)
    return stays.float().mul_(-scale).split(sizes)  # -1 stays


def _views(
    values: Sequence[Tensor], part: Rectangle, heads: int, *, of_rows: bool = False
) -> list[Tensor]:
    """Each of the tensors as `[N*H, L, D]` of one rectangle, in place; `of_rows`: `[B, H, D]` as
    `[N*H, 1, D]`.
    """
    if of_rows:
        return [
            each.narrow(0, part.first_row, part.rows).view(-1, 1, each.shape[2]) for each in values
        ]
    first = part.first * heads
    places = part.places * heads
    rows = part.rows * heads
    return [each.narrow(0, first, places).view(rows, part.length, -1) for each in values]


def _near(length: int, window: int | None) -> Tensor | None:
    """`[L, L]` zero within the window and -inf beyond; None where the window holds every place."""
    if window is None or length <= window:
        return None
    place = torch.arange(length)
    is_far = (place - place[:, None]).abs() >= window
    return torch.zeros(is_far.shape).masked_fill_(is_far, float("-inf"))


def _plain_forward(
    own: list[Tensor], part: Rectangle, how: Scores, factor: Tensor | None, *, is_first: bool
) -> list[Tensor]:
    """Write the answer; the shares, and with dropout also what is left of them."""
    query, key, value, answer = own
    scores = torch.bmm(query, key.transpose(1, 2))
    # A mask is one for all heads of a row, so it is added through this view, in place.
    by_row = scores.view(part.rows, -1, *scores.shape[1:])
    if part.bias is not None:
        by_row += part.bias
    if (near := _near(part.length, how.window)) is not None:
        scores += near
    shares = scores.softmax(-1)
    if part.padding is not None and not is_first:
        # A padded place asks nothing, so it has no gradient; beyond every window its shares are not
        # even numbers.
        shares.view_as(by_row).masked_fill_(part.padding, 0)
    dropped = shares if factor is None else shares * factor.view_as(shares)
    torch.bmm(dropped, value, out=answer)
    return [shares] if factor is None else [shares, dropped]


def _plain_back(own: list[Tensor], shares: Tensor, dropped: Tensor) -> None:
    """Write the gradients; `total` is the sum over a place's answer times its gradient."""
    query, key, value, incoming, total, to_query, to_key, to_value = own
    torch.bmm(dropped.transpose(1, 2), incoming, out=to_value)
    to_scores = torch.bmm(incoming, value.transpose(1, 2))
    # Without dropout: shares * (gradient - total). With it, shares are multiplied by their factor
    # first, and what is left of them (`dropped`) holds that product already: dropped * gradient -
    # shares * total.
    if dropped is shares:
        to_scores.sub_(total).mul_(shares)
    else:
        to_scores.mul_(dropped).addcmul_(shares, total, value=-1)
    torch.bmm(to_scores, key, out=to_query)
    torch.bmm(to_scores.transpose(1, 2), query, out=to_key)


def _by_row(values: list[Tensor], part: Rectangle) -> list[Tensor]:
    """`[N, H, L, D]` of `[N*H, L, D]`, as the fused kernel takes them."""
    return [each.view(part.rows, -1, *each.shape[1:]) for each in values]


def _fused_forward(own: list[Tensor], part: Rectangle, how: Scores) -> list[Tensor]:
    query, key, value, answer = _by_row(own, part)
    # The scale is in the queries already; `total` is the logarithm of each place's sum, kept for
    # backwards.
    found, total = _fused(
        query, key, value, 0.0, False, attn_mask=_near(part.length, how.window), scale=1.0
    )
    answer.copy_(found)  # the operator has no variant that writes into a slice
    return [total]


def _fused_back(own: list[Tensor], part: Rectangle, how: Scores, total: Tensor) -> None:
    query, key, value, answer, incoming, *outgoing = _by_row(own, part)
    near = _near(part.length, how.window)
    found = _fused_backward(
        incoming, query, key, value, answer, total, 0.0, False, attn_mask=near, scale=1.0
    )
    for target, gradient in zip(outgoing, found, strict=True):
        target.copy_(gradient)
