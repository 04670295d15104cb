"""Attention over a flat batch: each token reads its own row's tokens and no others, and nothing is
padded around it.

Which kernel does it is decided once for a device and a number format, by `choose_kernel`
(network.py), and reported. A layer calls `attend` of its rows, with queries where first tokens
alone read; it neither copies to the host nor waits.

- `varlen`: torch's flash kernel for rows of unequal length. CUDA, sixteen bits, compute capability
  8.0 and later.
- `efficient`: torch's memory-efficient kernel for such rows. CUDA otherwise; no memory for scores
  either.
- `padded`: scaled_dot_product_attention over padded rows with a mask, for what neither kernel
  takes. Scores that depend on distances are padded so, too, and computed in relative.py.
- `rectangles`: a CPU. See rectangle_attention.py.

Shapes: T tokens, B rows, H heads, D numbers a head, L the longest row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional

# both CUDA kernels take heads of multiples of it; others are padded with zeros, to the same answers
_HEAD_MULTIPLE = 8
Kernel = StrEnum("Kernel", "varlen efficient padded rectangles")


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores become shares."""

    scale: float
    dropout: float
    # tokens this far apart, or further, do not see each other; None: all of a row do
    window: int | None
    # of queries, keys, values and a Layout; None: no distances
    by_distance: Callable[..., Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where rows begin, and how long they are at most."""

    offsets: Tensor  # [B+1] int32 on the tokens' device
    longest: int  # upper bound of the lengths, known to the host


def pad_heads(size: int, *parts: Tensor) -> list[Tensor]:
    """The parts with zeros after each head, up to a multiple of `size`; a score and an answer stay
    what they were.
    """
    missing = -parts[0].shape[-1] % size
    return [functional.pad(part, (0, missing)) if missing else part for part in parts]


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, rows: Bounds, how: Scores, *, is_first: bool
) -> Tensor:
    """The operator below torch's varlen_attn, which drops no scores; gradients are torch's own."""
    queries, most = _query_offsets(query, rows, is_first)
    side = None if how.window is None else how.window - 1
    parts = pad_heads(_HEAD_MULTIPLE, query, key, value)
    bounds = (queries, rows.offsets, most, rows.longest)
    sides = {"window_size_left": side, "window_size_right": side}
    made = torch.ops.aten._flash_attention_forward(
        *parts, *bounds, how.dropout, False, False, scale=how.scale, **sides
    )
    return made[0][..., : query.shape[-1]]


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, rows: Bounds, how: Scores, *, is_first: bool
) -> Tensor:
    """The kernel takes `[1, T, H, D]` and offsets; it needs the sums of scores only for
    gradients.
    """
    # Its backward refuses a bound above the number of tokens, and draws other numbers than its
    # forward (pytorch#115590).
    assert not how.dropout, "choose_kernel pads rows whose scores are dropped"
    queries, most = _query_offsets(query, rows, is_first)
    parts = (part.unsqueeze(0) for part in pad_heads(_HEAD_MULTIPLE, query, key, value))
    bounds = queries, rows.offsets, min(most, len(query)), min(rows.longest, len(key))
    found = torch.ops.aten._efficient_attention_forward(  # 0: no mask
        *parts, None, *bounds, how.dropout, 0, torch.is_grad_enabled(), scale=how.scale
    )
    return found[0][0, ..., : query.shape[-1]]


def _padded(
    query: Tensor, key: Tensor, value: Tensor, rows: Bounds, how: Scores, *, is_first: bool
) -> Tensor:
    """Padded on the device from offsets alone; `[B, 1, L, L]` of the mask are booleans."""
    index_BL, is_token_BL, back_T = pad_rows(rows, len(key))
    place = torch.arange(rows.longest, device=query.device)
    mask = is_token_BL[:, None, None]
    if how.window is not None:
        mask = mask & ((place - place.unsqueeze(1)).abs() < how.window)
        # A place of padding beyond every window would read nothing, which is not a number.
        mask = mask | ((place == place.unsqueeze(1)) & ~mask.any(-1, keepdim=True))
    asking, read, values = (
        part[index_BL].transpose(1, 2) for part in (key if is_first else query, key, value)
    )
    if is_first:
        asking = query.unsqueeze(2)
    found = functional.scaled_dot_product_attention(
        asking, read, values, mask, how.dropout, False, scale=how.scale
    )
    return (
        found.squeeze(2)
        if is_first
        else found.transpose(1, 2).flatten(0, 1).index_select(0, back_T)
    )


def pad_rows(rows: Bounds, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """`[B, L]` the token at each place, and whether there is one; `[T]` the place of each token."""
    device = rows.offsets.device
    starts = rows.offsets[:-1].long()
    lengths = (rows.offsets[1:] - rows.offsets[:-1]).long()
    place = torch.arange(rows.longest, device=device)
    index_BL = (starts.unsqueeze(1) + place).clamp_max(tokens - 1)
    row_T = torch.repeat_interleave(
        torch.arange(len(starts), device=device), lengths, output_size=tokens
    )
    place_T = torch.arange(tokens, device=device) - starts[row_T]
    return index_BL, place < lengths.unsqueeze(1), row_T * rows.longest + place_T


def _query_offsets(query: Tensor, rows: Bounds, is_first: bool) -> tuple[Tensor, int]:
    """Where the queries of each row begin, and the most of a row."""
    if not is_first:
        return rows.offsets, rows.longest
    return torch.arange(len(query) + 1, dtype=torch.int32, device=query.device), 1


KERNELS = {Kernel.varlen: _varlen, Kernel.efficient: _efficient, Kernel.padded: _padded}
"""What computes attention where it is no CPU: queries, keys and values `[T, H, D]`, bounds, scores,
is_first."""
