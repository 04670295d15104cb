"""Attention over a flat batch: each token sees its own row's tokens and no others, and nothing is padded around it.

One function is registered with transformers under `NAME`; a model that is told to use it runs its own code over
`[1, T]` tokens. On CUDA, in sixteen bits and from Ampere on, the fused kernel for rows of unequal length does the work.
Elsewhere there is none, so the rows, which come sorted by length, are gathered into a few rectangles of nearly equal
lengths, small enough that a call costs more than the scores that are masked out; on a CPU long rows, of which each is
work enough, go to a fused kernel one length at a time. Both compute in fp32, which CPU kernels do sooner than bf16
here: the fused backward pass four times.

Only scores are ever computed in rectangles. What a model spends its time on (projections, feed-forward layers, norms)
sees real tokens alone.

Shapes: T tokens, B rows, H heads, D numbers a head; N rows of a rectangle, L its longest, P places of all rectangles.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface

from flatout.models.lean import kept_places


def _varlen_kernel() -> Callable[..., Any] | None:
    """Torch's attention over rows of unequal length; none before torch 2.10, or without scale and window."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"scale", "window_size"} <= inspect.signature(varlen_attn).parameters.keys() else None


_varlen = _varlen_kernel()

NAME = "flatout"

_LONG = 160
"""Rows from this length on are work enough for a call of their own."""
_CALL_SCORES = 1300
"""Scores that may be computed in vain to save the calls of one more rectangle (both cost about 60 µs a layer)."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Consecutive rows of nearly equal lengths."""

    rows: int
    length: int
    first: int
    """Places of the rectangles before it."""
    is_long: bool
    """Whether it goes to the fused kernel."""
    bias: Tensor | None = None
    """`[N, 1, 1, L]` zero on tokens and -inf on padding; None where all rows are equally long."""
    real: Tensor | None = None
    """`[N, 1, L, 1]` whether a place is a token."""

    @property
    def places(self) -> int:
        return self.rows * self.length


@dataclass(slots=True)
class Layout:
    """The rows of a batch as rectangles on a device."""

    rectangles: list[Rectangle]
    tokens: NDArray[np.int64]
    """[P] the token at each place of the rectangles."""
    places: NDArray[np.int64]
    """[T] the place of each token."""
    device: torch.device
    _by_head: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def by_head(self, heads: int) -> tuple[Tensor, Tensor]:
        """Where each place and head of the rectangles, `[N, H, L]` one after the other, finds its `[T, H]` numbers; and
        where each token and head is found again. Made once a batch and used by every layer."""
        if heads not in self._by_head:
            head = np.arange(heads)
            there, back = np.empty(len(self.tokens) * heads, np.int64), np.empty(len(self.tokens) * heads, np.int64)
            for part in self.rectangles:
                own = slice(part.first, part.first + part.places)
                spread = slice(own.start * heads, own.stop * heads)
                tokens = self.tokens[own].reshape(part.rows, 1, part.length)
                there[spread] = (tokens * heads + head[:, None]).ravel()
                lies = spread.start + np.arange(part.places * heads).reshape(part.rows, heads, part.length)
                back[spread] = lies.transpose(0, 2, 1).ravel()
            back = back.reshape(-1, heads)[self.places].ravel()
            self._by_head[heads] = torch.from_numpy(there).to(self.device), torch.from_numpy(back).to(self.device)
        return self._by_head[heads]


@dataclass(slots=True)
class FlatRows:
    """How the rows of a flat batch lie: all that attention needs to keep them apart."""

    lengths: Tensor
    """[B] on the host, shortest first."""
    offsets: Tensor
    """[B+1] int32 on the tokens' device."""
    _layout: Layout | None = None

    @classmethod
    def of(cls, lengths: Tensor, offsets: Tensor) -> FlatRows:
        return cls(lengths, offsets.to(torch.int32))

    @property
    def longest(self) -> int:
        return int(self.lengths[-1])

    def layout(self) -> Layout:
        """The rows as rectangles; made once a batch, where they are needed."""
        if self._layout is None:
            self._layout = laid_out_rows(self.lengths.numpy(), self.offsets.device)
        return self._layout


def rectangle_edges(lengths: NDArray[np.integer]) -> list[int]:
    """Where to cut rows that are sorted by length into rectangles, longest rows first."""
    edges, stop, wasted = [len(lengths)], len(lengths), 0
    longest = int(lengths[-1])
    for row in range(len(lengths) - 1, -1, -1):
        length = int(lengths[row])
        wasted += longest * longest - length * length
        if length != longest and (longest >= _LONG or wasted > _CALL_SCORES):
            edges.append(row + 1)
            stop, longest, wasted = row + 1, length, 0
    assert stop > 0
    return [*edges, 0][::-1]


def laid_out_rows(lengths: NDArray[np.int64], device: torch.device) -> Layout:
    """Rows of these lengths, shortest first, as rectangles."""
    edges = rectangle_edges(lengths)
    starts = np.cumsum(lengths) - lengths
    found: list[Rectangle] = []
    tokens: list[NDArray[np.int64]] = []
    places: list[NDArray[np.int64]] = []
    first = 0
    for begin, end in itertools.pairwise(edges):
        own, length = lengths[begin:end], int(lengths[end - 1])
        place = np.arange(length)
        is_real = place < own[:, None]
        bias = real = None
        if own[0] != length:
            mask = torch.from_numpy(is_real).to(device)
            bias = torch.zeros(mask.shape, device=device).masked_fill_(~mask, float("-inf"))[:, None, None]
            real = mask[:, None, :, None]
        # A place of padding repeats its row's first token, which no masked score lets through.
        tokens.append((starts[begin:end, None] + np.where(is_real, place, 0)).ravel())
        places.append(first + np.flatnonzero(is_real))
        is_long = length >= _LONG and device.type == "cpu"
        found.append(Rectangle(end - begin, length, first, is_long, bias, real))
        first += (end - begin) * length
    return Layout(found, np.concatenate(tokens), np.concatenate(places), device)


def flat_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    flat_rows: FlatRows | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: `[1, H, T, D]` in, `[1, T, H, D]` out."""
    if flat_rows is None:
        raise ValueError(
            f"attention {NAME!r} needs the keyword `flat_rows`: batches without padding say where rows lie"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    turned = [part[0].transpose(0, 1) for part in (query, key, value)]
    if has_fused_kernel(query):
        found = _by_fused_kernel(turned, flat_rows, scale, sliding_window)
    else:
        found = _ByRectangles.apply(*turned, flat_rows.layout(), scale, dropout, sliding_window)
    return found.unsqueeze(0), None


AttentionInterface.register(NAME, flat_attention)


def has_fused_kernel(query: Tensor) -> bool:
    """Whether a kernel for rows of unequal length computes with these numbers where they are."""
    is_there = query.device.type == "cuda" and query.dtype in _FUSED_TYPES and _varlen is not None
    return is_there and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _by_fused_kernel(turned_THD: list[Tensor], rows: FlatRows, scale: float, window: int | None) -> Tensor:
    """The kernel for rows of unequal length; it drops no scores."""
    assert _varlen is not None
    query, key, value = turned_THD
    sides = -1 if window is None else window - 1
    offsets, longest = rows.offsets, rows.longest
    found = _varlen(query, key, value, offsets, offsets, longest, longest, scale=scale, window_size=(sides, sides))
    assert isinstance(found, Tensor)
    return found


_FUSED_TYPES = (torch.bfloat16, torch.float16)
_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _ByRectangles(torch.autograd.Function):
    """Rectangle by rectangle, forwards and backwards by hand: autograd's slicing would cost more than the work.

    Lightning trains inside autocast, backward passes included; these products are meant to be as they are written.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_THD: Tensor,
        key_THD: Tensor,
        value_THD: Tensor,
        rows: Layout,
        scale: float,
        dropout: float,
        window: int | None,
    ) -> Tensor:
        shape = query_THD.shape
        there, back = rows.by_head(shape[1])
        query, key, value = (_laid_out(part, there) for part in (query_THD, key_THD, value_THD))
        query *= scale
        answer = torch.empty_like(query)
        kept: list[Tensor] = []
        with torch.autocast(query.device.type, enabled=False):
            for part in rows.rectangles:
                own = _views((query, key, value, answer), part, shape[1])
                if part.is_long and dropout == 0:
                    kept += _fused_forward(own, part, window)
                else:
                    kept += _plain_forward(own, part, window, dropout)
        ctx.save_for_backward(query, key, value, answer, *kept)
        ctx.rows, ctx.scale, ctx.dropout, ctx.window = rows, scale, dropout, window
        return answer.index_select(0, back).view(shape).to(query_THD.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_THD,) = gradients
        rows, shape = ctx.rows, gradient_THD.shape
        there, back = rows.by_head(shape[1])
        query, key, value, answer, *kept = ctx.saved_tensors
        incoming = _laid_out(gradient_THD, there)
        outgoing = [torch.empty_like(query) for _ in range(3)]
        with torch.autocast(query.device.type, enabled=False):
            for part in rows.rectangles:
                own = _views((query, key, value, answer, incoming, *outgoing), part, shape[1])
                if part.is_long and ctx.dropout == 0:
                    _fused_back(own, part, ctx.window, kept.pop(0))
                else:
                    _plain_back(own, kept.pop(0), kept.pop(0) if ctx.dropout else None)
        outgoing[0] *= ctx.scale
        found = [part.index_select(0, back).view(shape).to(gradient_THD.dtype) for part in outgoing]
        return (*found, None, None, None, None)


def _laid_out(values_THD: Tensor, there: Tensor) -> Tensor:
    """`[P*H, D]` fp32: rectangle after rectangle, each `[N, H, L, D]`."""
    return values_THD.flatten(0, 1).float().index_select(0, there)


def _views(values: tuple[Tensor, ...], part: Rectangle, heads: int) -> list[Tensor]:
    """Each of the tensors as `[N, H, L, D]` of one rectangle, in place."""
    own = slice(part.first * heads, (part.first + part.places) * heads)
    return [each[own].view(part.rows, heads, part.length, -1) for each in values]


def _near(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """`[L, L]` zero within the window and -inf beyond; None where the window holds every place."""
    if window is None or length <= window:
        return None
    place = torch.arange(length, device=device)
    is_far = (place - place[:, None]).abs() >= window
    return torch.zeros(length, length, device=device).masked_fill_(is_far, float("-inf"))


def _plain_forward(own: list[Tensor], part: Rectangle, window: int | None, dropout: float) -> list[Tensor]:
    query, key, value, answer = own
    scores = torch.matmul(query, key.transpose(2, 3))
    if part.bias is not None:
        scores += part.bias
    if (near := _near(part.length, window, query.device)) is not None:
        scores += near
    shares = scores.softmax(-1)
    if part.real is not None:
        shares *= part.real  # a padded place asks nothing, so that it has no gradient either
    if not dropout:
        _product(shares, value, answer)
        return [shares]
    stays, share = kept_places(shares.shape, dropout, shares.device)
    stays = stays.float().mul_(share)
    _product(shares * stays, value, answer)
    return [shares, stays]


def _plain_back(own: list[Tensor], shares: Tensor, stays: Tensor | None) -> None:
    query, key, value, answer, incoming, to_query, to_key, to_value = own
    through = shares if stays is None else shares * stays
    _product(through.transpose(2, 3), incoming, to_value)
    to_scores = torch.matmul(incoming, value.transpose(2, 3))
    if stays is not None:
        to_scores *= stays
    to_scores -= (incoming * answer).sum(-1, keepdim=True)
    to_scores *= shares
    _product(to_scores, key, to_query)
    _product(to_scores.transpose(2, 3), query, to_key)


def _product(left: Tensor, right: Tensor, target: Tensor) -> None:
    """Matrices of every row and head multiplied, into a place that is there already."""
    torch.bmm(left.flatten(0, 1), right.flatten(0, 1), out=target.flatten(0, 1))


def _fused_forward(own: list[Tensor], part: Rectangle, window: int | None) -> list[Tensor]:
    query, key, value, answer = own
    found, total = _fused(query, key, value, 0.0, False, attn_mask=_near(part.length, window, query.device), scale=1.0)
    answer.copy_(found)
    return [total]


def _fused_back(own: list[Tensor], part: Rectangle, window: int | None, total: Tensor) -> None:
    query, key, value, answer, incoming, *outgoing = own
    near = _near(part.length, window, query.device)
    found = _fused_backward(incoming, query, key, value, answer, total, 0.0, False, attn_mask=near, scale=1.0)
    for target, gradient in zip(outgoing, found, strict=True):
        target.copy_(gradient)
