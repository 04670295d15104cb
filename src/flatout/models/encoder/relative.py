"""Attention whose scores also depend on how far apart two tokens are, as DeBERTa's and MPNet's do.

The distances of a row of L tokens are 2 L - 1, far fewer than its pairs. So a query meets one
vector for each distance, in one product. Read one place further on in each row, these products
stand where their pairs are, without a gather. Rows of nearly equal lengths go through it together,
laid out by head, as autograd has it. Such layers are wide, so the calls cost little beside their
products. On a CPU it computes in fp32. Elsewhere all rows are padded.

Shapes: T tokens, B rows, H heads, D a head, R rows of a table, W distances; in a rectangle N rows
of L tokens, Q ask.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flatout.data.batches.flat_batch import on_device
from flatout.models.encoder.attention import Scores
from flatout.models.lean import drop

if TYPE_CHECKING:
    from flatout.models.encoder.rectangles import Rectangle, RectangleLayout

# adds in place to scores, made of queries and keys, what distances say
Add = Callable[[Tensor, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class Distances:
    """Rows of a table for distances, of which a batch has these at most."""

    # [2 * longest + 1] from -longest to longest; a distance is the query's place less the key's
    rows_W: Tensor
    longest: int
    table: Tensor  # `[R, ...]` the rows that may be met

    def between(self, first: int, last: int) -> Tensor:
        """The rows of these distances, both included."""
        return self.rows_W[first + self.longest : last + self.longest + 1]

    def attend(
        self,
        add: Add,
        query: Tensor,
        kv_T2HD: Tensor,
        rows: RectangleLayout,
        how: Scores,
        is_first: bool,
    ) -> Tensor:
        """`[T, H, D]`: each token reads the tokens of its row; `is_first`: `[B, H, D]`, only first
        tokens ask.
        """
        kind = query.dtype
        is_cpu = query.device.type == "cpu"
        if is_cpu:
            query = query.float()
            kv_T2HD = kv_T2HD.float()
        found = list[Tensor]()
        with torch.autocast("cpu", enabled=False) if is_cpu else nullcontext():
            for part in rows.rectangles:
                tokens = rows.tokens.narrow(0, part.first, part.places)
                key, value = (
                    kv_T2HD.index_select(0, tokens).permute(1, 2, 0, 3).contiguous().unbind(0)
                )
                own = (
                    query.narrow(0, part.first_row, part.rows)
                    if is_first
                    else query.index_select(0, tokens)
                )
                found.append(_attend(own.transpose(0, 1).contiguous(), key, value, part, how, add))
            whole = torch.cat(found)
            return (whole if is_first else whole.index_select(0, rows.places)).to(kind)

    def add_numbers(self, scores_HNQL: Tensor, query_HPD: Tensor, key_HPD: Tensor) -> None:
        """MPNet's: add in place a number for each distance and head, the same for all rows and
        layers.
        """
        asked, length = scores_HNQL.shape[2:]
        place = torch.arange(length, device=scores_HNQL.device)
        apart = place[:asked, None] - place + self.longest
        scores_HNQL += self.table[self.rows_W[apart]].permute(2, 0, 1).unsqueeze(1)

    def add_products(
        self,
        key: Tensor | None,
        query: Tensor | None,
        scores_HNQL: Tensor,
        query_HPD: Tensor,
        key_HPD: Tensor,
    ) -> None:
        """DeBERTa's: add in place the products of queries, and of keys, with the `[R, H, D]` that
        they meet.
        """
        asked, length = scores_HNQL.shape[2:]
        if key is not None:
            vectors_WHD = key.index_select(0, self.between(-length, asked - 1).flip(0))
            scores_HNQL += _by_pair(query_HPD @ vectors_WHD.permute(1, 2, 0), asked, length)
        if query is not None:
            vectors_WHD = query.index_select(0, self.between(1 - length, asked))
            scores_HNQL += _by_pair(
                key_HPD @ vectors_WHD.permute(1, 2, 0), length, asked
            ).transpose(2, 3)


def _attend(
    query_HPD: Tensor, key_HPD: Tensor, value_HPD: Tensor, part: Rectangle, how: Scores, add: Add
) -> Tensor:
    """`[N*Q, H, D]`: answers to queries `[H, N*Q, D]` from keys and values `[H, N*L, D]`."""
    heads, asked, size = query_HPD.shape
    by_row = (heads * part.rows, -1, size)
    query_HPD = query_HPD * how.scale
    scores = torch.bmm(query_HPD.view(by_row), key_HPD.view(by_row).transpose(1, 2))
    scores_HNQL = scores.view(heads, part.rows, asked // part.rows, part.length)
    add(scores_HNQL, query_HPD, key_HPD)
    if part.bias is not None:
        scores_HNQL += part.bias.squeeze(1)
    shares = drop(scores_HNQL.softmax(-1), how.dropout).view_as(scores)
    return (
        torch.bmm(shares.to(value_HPD.dtype), value_HPD.view(by_row))
        .view(heads, asked, size)
        .transpose(0, 1)
    )


def _by_pair(products_HPW: Tensor, places: int, others: int) -> Tensor:
    """`[H, N, places, others]` of products with W = places + others distances: each row is read one
    further left.
    """
    step = places + others - 1
    whole = products_HPW.unflatten(1, (-1, places)).flatten(2)
    return whole[..., places - 1 : places - 1 + places * step].unflatten(-1, (places, step))[
        ..., :others
    ]


def reads_distances(backbone: Any) -> bool:
    """Whether scores of an encoder depend on how far apart two tokens are."""
    encoder = getattr(backbone, "encoder", None)
    return hasattr(encoder, "relative_attention_bias") or hasattr(encoder, "rel_embeddings")


def measure_distances(encoder: nn.Module, longest: int) -> Distances:
    """The rows of an encoder's own table for distances up to this one."""
    net: Any = encoder
    # On the host: DeBERTa's own function below copies a number to where its distances are, and
    # waits for that.
    apart = torch.arange(-longest, longest + 1, device="cpu")
    device = next(encoder.parameters()).device
    if hasattr(net, "relative_attention_bias"):  # MPNet's
        rows_W = on_device(net.relative_position_bucket(-apart), device)
        return Distances(rows_W, longest, net.relative_attention_bias.weight)
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    span = len(net.rel_embeddings.weight) // 2
    if net.position_buckets > 0:
        with torch.device("cpu"):
            apart = make_log_bucket_position(
                apart, net.position_buckets, net.max_relative_positions
            ).long()
    # A bucket is never further than its distances, so a batch of short rows meets few of them.
    first = max(span - longest, 0)
    stop = min(span + longest + 1, 2 * span)
    table = net.rel_embeddings.weight[first:stop]
    if "layer_norm" in net.norm_rel_ebd:
        table = net.LayerNorm(table)
    return Distances(
        on_device((apart + span).clamp(0, 2 * span - 1) - first, device), longest, table
    )
