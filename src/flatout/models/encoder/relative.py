"""Attention whose scores also depend on how far apart two tokens are, as DeBERTa's and MPNet's do.

The distances of a row of L tokens are 2 L - 1, far fewer than its pairs. So a query meets one vector for each distance,
in one product. Read one place further on in each row, these products stand where their pairs are, without a gather.
Rows of nearly equal lengths go through it together, laid out by head, as autograd has it. Such layers are wide, so the
calls cost little beside their products. On a CPU it computes in fp32. Where the device is none, all rows are padded to
the longest.

Shapes: T tokens, B rows, H heads, D numbers a head, R rows of a table; in a group of N rows L tokens a row, Q of them
ask; W distances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flatout.models.encoder.attention import RowGroup, RowGroups
from flatout.models.lean import draw_words, drop_by_words


@dataclass(frozen=True, slots=True)
class Distances:
    """Rows of a table for distances, of which a batch has these at most."""

    rows_W: Tensor
    """[2 * longest + 1] from -longest to longest; a distance is the query's place less the key's."""
    longest: int
    table: Tensor
    """`[R, ...]` the rows that may be met."""

    def between(self, first: int, last: int) -> Tensor:
        """The rows of these distances, both included."""
        return self.rows_W[first + self.longest : last + self.longest + 1]

    def as_bias(self, scale: float, dropout: float) -> RelativeScores:
        """Scores to which the table adds numbers."""
        return RelativeScores(DistanceBias(self), scale, dropout)

    def as_vectors(self, key: Tensor | None, query: Tensor | None, scale: float, dropout: float) -> RelativeScores:
        """Scores to which it adds products with vectors `[R, H, D]`, which a layer has made of the table."""
        return RelativeScores(Disentangled(self, key, None if query is None else query * scale), scale, dropout)


@dataclass(frozen=True, slots=True)
class Disentangled:
    """DeBERTa's: a query meets a vector of the distance, and so does a key."""

    distances: Distances
    key_RHD: Tensor | None
    """What queries meet."""
    query_RHD: Tensor | None
    """What keys meet, scaled."""

    def add_to(self, scores_HNQL: Tensor, query_HPD: Tensor, key_HPD: Tensor) -> None:
        """Add it in place: distances stand so that each place reads its own from the next one on."""
        asked, length = scores_HNQL.shape[2:]
        if self.key_RHD is not None:
            rows = self.distances.between(-length, asked - 1).flip(0)
            scores_HNQL += _by_pair(query_HPD @ _of_rows(self.key_RHD, rows), asked, length)
        if self.query_RHD is not None:
            rows = self.distances.between(1 - length, asked)
            scores_HNQL += _by_pair(key_HPD @ _of_rows(self.query_RHD, rows), length, asked).transpose(2, 3)


@dataclass(frozen=True, slots=True)
class DistanceBias:
    """MPNet's: a number for each distance and head."""

    distances: Distances

    def add_to(self, scores_HNQL: Tensor, query_HPD: Tensor, key_HPD: Tensor) -> None:
        """Add it in place, the same for all rows and layers."""
        asked, length = scores_HNQL.shape[2:]
        place = torch.arange(length, device=scores_HNQL.device)
        apart = place[:asked, None] - place + self.distances.longest
        bias = self.distances.table[self.distances.rows_W[apart]]
        scores_HNQL += bias.permute(2, 0, 1).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class RelativeScores:
    """How scores that depend on distances become shares."""

    relative: Disentangled | DistanceBias
    scale: float
    dropout: float

    def attend(self, query: Tensor, kv_T2HD: Tensor, rows: RowGroups, *, is_first: bool) -> Tensor:
        """`[T, H, D]`: each token reads the tokens of its row; `is_first`: `[B, H, D]`, only first tokens ask."""
        if query.device.type != "cpu":
            return self._attend_groups(query, kv_T2HD, rows, is_first)
        with torch.autocast("cpu", enabled=False):
            return self._attend_groups(query.float(), kv_T2HD.float(), rows, is_first).to(query.dtype)

    def _attend_groups(self, query: Tensor, kv_T2HD: Tensor, rows: RowGroups, is_first: bool) -> Tensor:
        found: list[Tensor] = []
        for group in rows.groups:
            key, value = kv_T2HD.index_select(0, group.tokens).permute(1, 2, 0, 3).contiguous().unbind(0)
            first = group.first_row
            own = query[first : first + group.rows] if is_first else query.index_select(0, group.tokens)
            found.append(self._attend_group(own.transpose(0, 1).contiguous(), key, value, group))
        whole = torch.cat(found)
        return whole if is_first else whole.index_select(0, rows.places)

    def _attend_group(self, query_HPD: Tensor, key_HPD: Tensor, value_HPD: Tensor, group: RowGroup) -> Tensor:
        """`[N*Q, H, D]`: answers to queries `[H, N*Q, D]` from keys and values `[H, N*L, D]`."""
        heads, asked, size = query_HPD.shape
        by_row = (heads * group.rows, -1, size)
        query_HPD = query_HPD * self.scale
        scores = torch.bmm(query_HPD.view(by_row), key_HPD.view(by_row).transpose(1, 2))
        scores_HNQL = scores.view(heads, group.rows, asked // group.rows, group.length)
        self.relative.add_to(scores_HNQL, query_HPD, key_HPD)
        if group.bias is not None:
            scores_HNQL += group.bias
        shares = _drop(scores_HNQL.softmax(-1), self.dropout).view_as(scores)
        return torch.bmm(shares.to(value_HPD.dtype), value_HPD.view(by_row)).view(heads, asked, size).transpose(0, 1)


def _of_rows(table_RHD: Tensor, rows_W: Tensor) -> Tensor:
    """`[H, D, W]` vectors of these rows of a table."""
    return table_RHD.index_select(0, rows_W).permute(1, 2, 0)


def _by_pair(products_HPW: Tensor, places: int, others: int) -> Tensor:
    """`[H, N, places, others]` of products with W = places + others distances: each row is read one further left."""
    step = places + others - 1
    whole = products_HPW.unflatten(1, (-1, places)).flatten(2)
    return whole[..., places - 1 : places - 1 + places * step].unflatten(-1, (places, step))[..., :others]


def _drop(shares: Tensor, share: float) -> Tensor:
    if not share:
        return shares
    if shares.device.type != "cpu":
        return functional.dropout(shares, share)
    return drop_by_words(shares, draw_words(shares.shape), share)


def reads_distances(backbone: Any) -> bool:
    """Whether scores of an encoder depend on how far apart two tokens are."""
    encoder = getattr(backbone, "encoder", None)
    return hasattr(encoder, "relative_attention_bias") or hasattr(encoder, "rel_embeddings")


def measure_distances(encoder: nn.Module, longest: int) -> Distances:
    """The rows of an encoder's own table for distances up to this one."""
    net: Any = encoder
    device = next(encoder.parameters()).device
    apart = torch.arange(-longest, longest + 1, device=device)
    if hasattr(net, "relative_attention_bias"):  # MPNet's
        return Distances(net.relative_position_bucket(-apart), longest, net.relative_attention_bias.weight)
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    span = len(net.rel_embeddings.weight) // 2
    if net.position_buckets > 0:
        apart = make_log_bucket_position(apart, net.position_buckets, net.max_relative_positions).long()
    # A bucket is never further than its distances, so a batch of short rows meets few of them.
    first, stop = max(span - longest, 0), min(span + longest + 1, 2 * span)
    table = net.rel_embeddings.weight[first:stop]
    if "layer_norm" in net.norm_rel_ebd:
        table = net.LayerNorm(table)
    return Distances((apart + span).clamp(0, 2 * span - 1) - first, longest, table)
