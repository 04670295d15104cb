"""Attention over a flat batch: each token reads the tokens of its own row, and nothing is padded.

Four kernels compute it. `choose_kernel` (network.py) chooses one for a device and a number format,
and the run's log says which. All take queries, keys and values, and the bounds of the rows. First
tokens may be the only ones that read: then there is one query a row. No kernel copies to the host
or waits for the device.

- `varlen`: torch's flash kernel for rows of unequal length. CUDA, sixteen bits, compute capability
  8.0 and later.
- `efficient`: torch's memory-efficient kernel for such rows, for other CUDA devices and formats. It
  takes no memory for scores either.
- `padded`: scaled_dot_product_attention over padded rows with a mask, for what neither kernel
  takes. Scores that depend on distances are padded as well, and computed in relative.py.
- `rectangles`: a CPU. See rectangle_attention.py.

Shapes: T tokens, B rows, H heads, D numbers a head, L the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from flatout.data.batches.kept_tensors import count_up

if TYPE_CHECKING:
    from flatout.models.encoder.rectangles import RectangleLayout

# Both CUDA kernels take heads whose size is a multiple of it. Others are padded with zeros, which
# changes no answer.
_HEAD_MULTIPLE = 8  # numbers
_NO_MASK = 0  # of the memory-efficient kernel
Kernel = StrEnum("Kernel", "varlen efficient padded rectangles")


class AttendByDistance(Protocol):
    """Attention of an encoder whose scores also depend on how far apart two tokens are."""

    def __call__(
        self,
        query: Tensor,
        keys_and_values: Tensor,
        rows: RectangleLayout,
        how: Scores,
        /,
        *,
        is_first: bool,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores become shares of attention."""

    scale: float  # what scores are multiplied by
    dropout: float  # fraction of the shares that is dropped now; 0 outside of training
    # Tokens this far apart, or further, do not see each other. None: all tokens of a row do.
    window: int | None
    by_distance: AttendByDistance | None = None  # None: distances do not matter


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where rows begin, and how long they are at most."""

    offsets: Tensor  # [B+1] int32 on the tokens' device
    longest: int  # upper bound of the lengths, known to the host


Parts = tuple[Tensor, Tensor, Tensor]  # queries, keys and values, `[T, H, D]` each


class AttentionKernel(Protocol):
    """Attention of queries to keys and values.

    `is_first`: only first tokens read; then queries and answers are `[B, H, D]`.
    """

    def __call__(self, parts: Parts, rows: Bounds, how: Scores, *, is_first: bool) -> Tensor: ...


def pad_heads(size: int, *parts: Tensor) -> list[Tensor]:
    """The parts with zeros after each head, up to a multiple of `size`; products do not change."""
    missing = -parts[0].shape[-1] % size
    if not missing:
        return list(parts)
    return [functional.pad(part, (0, missing)) for part in parts]


def _attend_varlen(parts: Parts, rows: Bounds, how: Scores, *, is_first: bool) -> Tensor:
    """The operator below torch's varlen_attn, which has no dropout; gradients are torch's own."""
    query = parts[0]
    query_offsets, longest_query = _query_bounds(query, rows, is_first)
    # Window 3: two tokens to each side are seen.
    side = None if how.window is None else how.window - 1
    outputs = torch.ops.aten._flash_attention_forward(
        *pad_heads(_HEAD_MULTIPLE, *parts),
        query_offsets,
        rows.offsets,
        longest_query,
        rows.longest,
        how.dropout,
        False,  # not causal
        False,  # no mask of what was dropped is returned
        scale=how.scale,
        window_size_left=side,
        window_size_right=side,
    )
    answer: Tensor = outputs[0]
    return answer[..., : query.shape[-1]]


def _attend_efficient(parts: Parts, rows: Bounds, how: Scores, *, is_first: bool) -> Tensor:
    """Torch's memory-efficient kernel, which takes `[1, T, H, D]` and offsets."""
    # Its backward refuses a bound above the number of tokens, and draws other numbers than its
    # forward (pytorch#115590).
    assert not how.dropout, "choose_kernel pads rows whose scores are dropped"
    query, key, _ = parts
    query_offsets, longest_query = _query_bounds(query, rows, is_first)
    padded = pad_heads(_HEAD_MULTIPLE, *parts)
    outputs = torch.ops.aten._efficient_attention_forward(
        *(part.unsqueeze(0) for part in padded),
        None,
        query_offsets,
        rows.offsets,
        min(longest_query, len(query)),
        min(rows.longest, len(key)),
        how.dropout,
        _NO_MASK,
        torch.is_grad_enabled(),  # the sums of scores are needed for gradients alone
        scale=how.scale,
    )
    answer: Tensor = outputs[0]
    return answer[0, ..., : query.shape[-1]]


def _attend_padded(parts: Parts, rows: Bounds, how: Scores, *, is_first: bool) -> Tensor:
    """Rows padded on the device, from their offsets alone; the mask `[B, 1, L, L]` is booleans."""
    query, key, value = parts
    index_BL, is_token_BL, back_T = pad_rows(rows, len(key))
    position = torch.arange(rows.longest, device=query.device)
    mask = is_token_BL[:, None, None]
    if how.window is not None:
        mask = mask & ((position - position.unsqueeze(1)).abs() < how.window)
        # A place of padding beyond every window would read nothing, and its answer would not be a
        # number. It reads itself.
        is_itself = position == position.unsqueeze(1)
        mask = mask | (is_itself & ~mask.any(-1, keepdim=True))
    queries = query.unsqueeze(2) if is_first else query[index_BL].transpose(1, 2)
    keys = key[index_BL].transpose(1, 2)
    values = value[index_BL].transpose(1, 2)
    answer = functional.scaled_dot_product_attention(
        queries, keys, values, mask, how.dropout, False, scale=how.scale
    )
    if is_first:
        return answer.squeeze(2)
    return answer.transpose(1, 2).flatten(0, 1).index_select(0, back_T)


def pad_rows(rows: Bounds, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Indices between `tokens` tokens of a flat batch and rows padded to their bound.

    Returns `[B, L]` the token at each place, `[B, L]` whether there is one, and `[T]` the place of
    each token in the flattened rows. Offsets [0, 1, 3], bound 2: tokens [[0, 1], [1, 2]], the
    second of which is padding; places [0, 2, 3].
    """
    device = rows.offsets.device
    starts_B = rows.offsets[:-1].long()
    lengths_B = (rows.offsets[1:] - rows.offsets[:-1]).long()
    place_L = torch.arange(rows.longest, device=device)
    index_BL = (starts_B.unsqueeze(1) + place_L).clamp_max(tokens - 1)
    row_B = torch.arange(len(starts_B), device=device)
    row_T = torch.repeat_interleave(row_B, lengths_B, output_size=tokens)
    place_T = torch.arange(tokens, device=device) - starts_B[row_T]
    return index_BL, place_L < lengths_B.unsqueeze(1), row_T * rows.longest + place_T


def _query_bounds(query: Tensor, rows: Bounds, is_first: bool) -> tuple[Tensor, int]:
    """Where the queries of each row begin, and how many a row has at most."""
    if not is_first:
        return rows.offsets, rows.longest
    return count_up(len(query) + 1, query.device, torch.int32), 1


KERNELS: dict[Kernel, AttentionKernel] = {
    Kernel.varlen: _attend_varlen,
    Kernel.efficient: _attend_efficient,
    Kernel.padded: _attend_padded,
}
"""The kernels of all devices but a CPU."""
