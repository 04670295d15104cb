"""Attention whose scores also depend on how far apart two tokens are, as DeBERTa's and MPNet's do.

A row of L tokens has L * L pairs, but only 2 L - 1 distances. So a query is multiplied with one
vector for each distance, in one product. `_by_pair` then reads this product so that each number
stands where its pair is, without a gather. Rows of nearly equal lengths go through it together, by
the rectangles of rectangles.py; gradients are autograd's. Such layers are wide, so the calls cost
little beside their products. On a CPU it computes in fp32. Elsewhere all rows are padded.

    one row of 3 tokens; the distance of a pair is the query's place less the key's
    distances of query 0    0 -1 -2
    distances of query 1    1  0 -1
    distances of query 2    2  1  0
    products of each query with the vectors of 2 1 0 -1 -2 -3, one row further left each time

Shapes: T tokens, B rows, H heads, D a head, R rows of a table, W distances; in a rectangle N rows
of L tokens, Q queries a row, P = N * Q or N * L vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flatout.data.batches.kept_tensors import on_device
from flatout.models.encoder.attention import Scores
from flatout.models.lean import drop

if TYPE_CHECKING:
    from flatout.models.encoder.rectangles import Rectangle, RectangleLayout

_LEAST_KEPT = 512
"""Rows are kept for distances up to this at least, which few texts pass."""

# Adds in place to scores `[H, N, Q, L]` what distances say, from queries and keys `[H, P, D]`.
Add = Callable[[Tensor, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class Distances:
    """For each distance in a batch its row in a table of the encoder.

    A distance is the query's place less the key's.
    """

    # [2 * longest + 1] the rows of the distances from -longest to longest
    rows_W: Tensor
    longest: int
    table: Tensor  # `[R, ...]` the rows that may be met

    def between(self, first: int, last: int) -> Tensor:
        """The rows of the distances from `first` to `last`, both included."""
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
        """`[T, H, D]`: each token reads the tokens of its row; `add` puts distances into scores.

        `is_first`: only first tokens read, by queries `[B, H, D]`, and the answer has this shape.
        """
        dtype = query.dtype
        is_cpu = query.device.type == "cpu"
        if is_cpu:
            query = query.float()
            kv_T2HD = kv_T2HD.float()
        answers = list[Tensor]()
        with torch.autocast("cpu", enabled=False) if is_cpu else nullcontext():
            for rectangle in rows.rectangles:
                tokens = rows.tokens.narrow(0, rectangle.first_place, rectangle.places)
                kv_2HPD = kv_T2HD.index_select(0, tokens).permute(1, 2, 0, 3).contiguous()
                key, value = kv_2HPD.unbind(0)
                if is_first:
                    query_PHD = query.narrow(0, rectangle.first_row, rectangle.rows)
                else:
                    query_PHD = query.index_select(0, tokens)
                query_HPD = query_PHD.transpose(0, 1).contiguous()
                answers.append(_attend(query_HPD, key, value, rectangle, how, add))
            answer = torch.cat(answers)
            if not is_first:
                answer = answer.index_select(0, rows.places)
            return answer.to(dtype)

    def add_numbers(self, scores_HNQL: Tensor, query_HPD: Tensor, key_HPD: Tensor) -> None:
        """MPNet: add in place a number for each distance and head, whatever the tokens are."""
        queries, length = scores_HNQL.shape[2:]
        place = torch.arange(length, device=scores_HNQL.device)
        distance_QL = place[:queries, None] - place
        rows_QL = self.rows_W[distance_QL + self.longest]
        scores_HNQL += self.table[rows_QL].permute(2, 0, 1).unsqueeze(1)

    def add_products(
        self,
        key: Tensor | None,
        query: Tensor | None,
        scores_HNQL: Tensor,
        query_HPD: Tensor,
        key_HPD: Tensor,
    ) -> None:
        """DeBERTa: add in place the products of tokens with vectors `[R, H, D]` of distances.

        Queries meet the vectors `key`, and keys the vectors `query`; None: these products are not
        part of the scores.
        """
        queries, length = scores_HNQL.shape[2:]
        if key is not None:
            vectors_WHD = key.index_select(0, self.between(-length, queries - 1).flip(0))
            products_HPW = query_HPD @ vectors_WHD.permute(1, 2, 0)
            scores_HNQL += _by_pair(products_HPW, queries, length)
        if query is not None:
            vectors_WHD = query.index_select(0, self.between(1 - length, queries))
            products_HPW = key_HPD @ vectors_WHD.permute(1, 2, 0)
            scores_HNQL += _by_pair(products_HPW, length, queries).transpose(2, 3)


def _attend(
    query_HPD: Tensor,
    key_HPD: Tensor,
    value_HPD: Tensor,
    rectangle: Rectangle,
    how: Scores,
    add: Add,
) -> Tensor:
    """`[N*Q, H, D]` the answers of one rectangle."""
    heads, queries, size = query_HPD.shape
    by_row = (heads * rectangle.rows, -1, size)
    query_HPD = query_HPD * how.scale
    scores = torch.bmm(query_HPD.view(by_row), key_HPD.view(by_row).transpose(1, 2))
    queries_a_row = queries // rectangle.rows
    scores_HNQL = scores.view(heads, rectangle.rows, queries_a_row, rectangle.length)
    add(scores_HNQL, query_HPD, key_HPD)
    if rectangle.bias is not None:
        scores_HNQL += rectangle.bias.squeeze(1)
    shares = drop(scores_HNQL.softmax(-1), how.dropout).view_as(scores)
    answer = torch.bmm(shares.to(value_HPD.dtype), value_HPD.view(by_row))
    return answer.view(heads, queries, size).transpose(0, 1)


def _by_pair(products_HPW: Tensor, places: int, others: int) -> Tensor:
    """`[H, N, places, others]` of products with W = places + others distances.

    Each place reads its row one further left. 2 places, 2 others, so 4 distances: the products of
    place 0 are a0 a1 a2 a3, those of place 1 b0 b1 b2 b3. Flattened they are read from a1 on in
    steps of 3, which gives a1 a2 and b0 b1.
    """
    step = places + others - 1
    first = places - 1
    flat = products_HPW.unflatten(1, (-1, places)).flatten(2)
    steps = flat[..., first : first + places * step].unflatten(-1, (places, step))
    return steps[..., :others]


def reads_distances(backbone: nn.Module) -> bool:
    """Whether an encoder's scores depend on how far apart two tokens are."""
    encoder = backbone._modules.get("encoder")
    return hasattr(encoder, "relative_attention_bias") or hasattr(encoder, "rel_embeddings")


class DistanceRows:
    """The table rows of an encoder's distances, kept on its device from the first batch on.

    The host computes them once, for distances up to 512 or more: a step copies nothing. They are no
    part of a checkpoint.
    """

    def __init__(self) -> None:
        self._rows_W: Tensor | None = None  # of the distances from -longest to longest
        self._earlier: list[Tensor] = []  # of shorter ones, which captured steps may still read
        self._longest = 0

    def measure(self, encoder: Any, longest: int) -> Distances:
        """The rows of the encoder's table that distances up to `longest` need."""
        device = next(encoder.parameters()).device
        if self._rows_W is None or longest > self._longest or self._rows_W.device != device:
            self._longest = max(longest, _LEAST_KEPT)
            if self._rows_W is not None:
                self._earlier.append(self._rows_W)
            # A validation may be the first to need them, but training saves them for its backward
            # pass, which torch refuses for tensors that were made in inference mode.
            with torch.inference_mode(False):
                self._rows_W = on_device(_rows_of(encoder, self._longest), device)
        rows_W = self._rows_W[self._longest - longest : self._longest + longest + 1]
        if hasattr(encoder, "relative_attention_bias"):  # MPNet's
            return Distances(rows_W, longest, encoder.relative_attention_bias.weight)
        # A bucket is never further than its distances, so a batch of short rows meets few of them.
        span = len(encoder.rel_embeddings.weight) // 2
        first = max(span - longest, 0)
        stop = min(span + longest + 1, 2 * span)
        table = encoder.rel_embeddings.weight[first:stop]
        if "layer_norm" in encoder.norm_rel_ebd:
            table = encoder.LayerNorm(table)
        return Distances(rows_W - first if first else rows_W, longest, table)


def _rows_of(encoder: Any, longest: int) -> Tensor:
    """`[2 * longest + 1]` rows of the table, of the distances from -longest to longest.

    On the host: DeBERTa's own function copies a number to where its distances are, and waits for
    that.
    """
    distances = torch.arange(-longest, longest + 1, device="cpu")
    if hasattr(encoder, "relative_attention_bias"):
        buckets: Tensor = encoder.relative_position_bucket(-distances)
        return buckets
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    if encoder.position_buckets > 0:
        with torch.device("cpu"):
            buckets = make_log_bucket_position(
                distances, encoder.position_buckets, encoder.max_relative_positions
            )
        distances = buckets.long()
    span = len(encoder.rel_embeddings.weight) // 2
    return (distances + span).clamp(0, 2 * span - 1)
