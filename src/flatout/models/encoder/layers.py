"""Layers of an encoder over `[T, H]` tokens of a flat batch: one that normalises after each sum, one before products.

A layer takes over the modules of the library's own layer, and with them the names of its weights. So whatever knows
these names works: checkpoints, folders of transformers, LoRA, freezing, layer decay. Only `forward` is ours: queries,
keys and values are one product, the sum that runs through the layers is cast nowhere, and where only some tokens are
read after the last layer, only these are computed there.

`finish`, all that follows attention, has no branch on data and no random numbers of a CPU, so torch compiles it whole.

Shapes: T tokens, K tokens that are kept, B rows, H numbers a token (in attention H heads, D numbers each).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from flatout.models.encoder.attention import Rows, Scores
from flatout.models.encoder.families import PostNormNames, activation_of
from flatout.models.lean import draw_words, drop_by_words

Finish = Callable[..., Tensor]


@dataclass(slots=True)
class Pass:
    """What all layers of one forward pass share."""

    rows: Rows
    turns: dict[str, tuple[Tensor, Tensor]]
    """Cosines and sines `[T, 1, 1, D]` of the places of tokens, for each kind of layer."""
    kept: Tensor | None = None
    """[K] the tokens that are read after the last layer; None: all."""
    are_first: bool = False
    """Whether these are the first tokens of the rows."""


class FlatLayer(nn.Module):
    """What both kinds of layers have: the modules of a layer of transformers, and their own `finish`."""

    def __init__(self, block: nn.Module, config: Any, activation: Any) -> None:
        super().__init__()
        self._modules.update(block._modules)
        self.heads: int = config.num_attention_heads
        self.head_size: int = config.hidden_size // config.num_attention_heads
        self.activate = activation_of(activation)
        self.compiled: Finish | None = None
        """`finish` as torch compiled it, for training."""

    def part(self, name: str) -> Any:
        """A module by its dotted name; looked up each time, as LoRA puts others in place."""
        found: Any = self
        for each in name.split("."):
            found = found._modules[each]
        return found

    def run_finish(self, *inputs: Any) -> Tensor:
        """Everything after attention, compiled where a run has chosen that."""
        if self.compiled is not None and self.training:
            return self.compiled(self, *inputs)
        return self.finish(*inputs)

    def draw(self, own_KH: Tensor) -> tuple[Tensor | None, ...]:
        """The random numbers of `finish`, from outside: what is compiled then stays the same each time."""
        return ()

    def finish(self, *inputs: Any) -> Tensor:
        """Everything after attention."""
        raise NotImplementedError


class PostNormLayer(FlatLayer):
    """BERT's layer, under the names of a family."""

    def __init__(self, block: nn.Module, config: Any, names: PostNormNames, activation: Any) -> None:
        super().__init__(block, config, activation)
        self.names = names

    def project(self, states_TH: Tensor, *names: str) -> Tensor:
        """`[T, parts, H, D]`: several linear layers as one product, where they are plain ones."""
        layers = [self.part(name) for name in names]
        if any(type(layer) is not nn.Linear for layer in layers):
            joined = torch.stack([layer(states_TH) for layer in layers], 1)
            return joined.view(len(states_TH), len(names), self.heads, self.head_size)
        kind = _product_type(states_TH)
        weight = _Joined.apply(kind, *(layer.weight for layer in layers))
        bias = None if layers[0].bias is None else _Joined.apply(kind, *(layer.bias for layer in layers))
        return functional.linear(states_TH.to(kind), weight, bias).view(-1, len(names), self.heads, self.head_size)

    def forward(self, states_TH: Tensor, shared: Pass, is_last: bool = False) -> Tensor:
        """`[T, H]`, or `[K, H]` after the last layer."""
        names, kept = self.names, shared.kept if is_last else None
        scores = Scores(self.head_size**-0.5, _share(self.part(names.attention_dropout)), None)
        own_KH = states_TH if kept is None else states_TH.index_select(0, kept)
        if kept is not None and shared.are_first:
            query = self.project(own_KH, names.query).squeeze(1)
            read = shared.rows.attend_first(query, self.project(states_TH, names.key, names.value), scores)
        else:
            read = shared.rows.attend(self.project(states_TH, names.query, names.key, names.value), scores)
            read = read if kept is None else read.index_select(0, kept)
        return self.run_finish(own_KH, read.flatten(1), *self.draw(own_KH))

    def draw(self, own_KH: Tensor) -> tuple[Tensor | None, ...]:
        """Random words for the two dropouts of `finish`."""
        names = (self.names.out_dropout, self.names.down_dropout)
        return tuple(_draw_words(own_KH, self.part(name) if name else None) for name in names)

    def finish(self, own_KH: Tensor, read_KH: Tensor, out_words: Tensor | None, down_words: Tensor | None) -> Tensor:
        """The sums, their norms, and the two products between."""
        names = self.names
        found = self.part(names.out)(read_KH)
        if names.out_dropout:
            found = _drop(found, self.part(names.out_dropout), out_words)
        middle_KH = _norm(self.part(names.out_norm), found + own_KH)
        found = self.part(names.down)(self.activate(self.part(names.up)(middle_KH)))
        if names.down_dropout:
            found = _drop(found, self.part(names.down_dropout), down_words)
        return _norm(self.part(names.down_norm), found + middle_KH)


class LayerGroup(nn.Module):
    """ALBERT's layers that follow each other and are gone through together, again and again."""

    def __init__(self, layers: list[PostNormLayer]) -> None:
        super().__init__()
        self.albert_layers = nn.ModuleList(layers)

    def forward(self, states_TH: Tensor, shared: Pass, is_last: bool = False) -> Tensor:
        """`[T, H]`, or `[K, H]` after the last layer."""
        last = len(self.albert_layers) - 1
        for number, layer in enumerate(self.albert_layers):
            states_TH = layer(states_TH, shared, is_last and number == last)
        return states_TH


class PreNormLayer(FlatLayer):
    """ModernBERT's layer: queries and keys are turned by the places of their tokens, some layers see a window."""

    def __init__(self, block: Any, config: Any, activation: Any) -> None:
        super().__init__(block, config, activation)
        self.kind: str = block.attention_type

    def forward(self, states_TH: Tensor, shared: Pass, is_last: bool = False) -> Tensor:
        """`[T, H]`, or `[K, H]` after the last layer."""
        kept, attention = shared.kept if is_last else None, self.part("attn")
        share = attention.attention_dropout if self.training else 0.0
        scores = Scores(self.head_size**-0.5, share, attention.sliding_window)
        normed_TH, turns = _norm(self.part("attn_norm"), states_TH), shared.turns[self.kind]
        if kept is not None and shared.are_first and type(attention.Wqkv) is nn.Linear:
            query, kv = self.project_first(normed_TH, kept)
            kv = torch.cat((_turn(kv[:, :1], *turns), kv[:, 1:]), 1)
            read = shared.rows.attend_first(query, kv, scores)  # a first token's place is 0: it turns nothing
        else:
            qkv = attention.Wqkv(normed_TH).view(-1, 3, self.heads, self.head_size)
            read = shared.rows.attend(torch.cat((_turn(qkv[:, :2], *turns), qkv[:, 2:]), 1), scores)
            read = read if kept is None else read.index_select(0, kept)
        own_KH = states_TH if kept is None else states_TH.index_select(0, kept)
        return self.run_finish(own_KH, read.flatten(1))

    def project_first(self, normed_TH: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, H, D]` queries of first tokens, `[T, 2, H, D]` keys and values of all."""
        layer, size = self.part("attn.Wqkv"), self.heads * self.head_size
        weights = layer.weight.split((size, 2 * size))
        biases = (None, None) if layer.bias is None else layer.bias.split((size, 2 * size))
        query = functional.linear(normed_TH.index_select(0, kept), weights[0], biases[0])
        others = functional.linear(normed_TH, weights[1], biases[1])
        return query.view(-1, self.heads, self.head_size), others.view(-1, 2, self.heads, self.head_size)

    def finish(self, own_KH: Tensor, read_KH: Tensor) -> Tensor:
        """The two sums, and the gated products between."""
        attention, mlp = self.part("attn"), self.part("mlp")
        own_KH = own_KH + attention.out_drop(attention.Wo(read_KH))
        up, gate = mlp.Wi(_norm(self.part("mlp_norm"), own_KH)).chunk(2, dim=-1)
        return own_KH + cast(Tensor, mlp.Wo(mlp.drop(self.activate(up) * gate)))


class _Joined(torch.autograd.Function):
    """Weights one below the other in the number format of the product: joined and cast in one go."""

    @staticmethod
    def forward(ctx: Any, kind: torch.dtype, *weights: Tensor) -> Tensor:
        ctx.sizes, ctx.kind = [len(weight) for weight in weights], weights[0].dtype
        joined = weights[0].new_empty((sum(ctx.sizes), *weights[0].shape[1:]), dtype=kind)
        return torch.cat(weights, out=joined) if kind == ctx.kind else _cast_into(joined, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *gradients[0].to(ctx.kind).split(ctx.sizes)


def _cast_into(joined: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    torch._foreach_copy_(list(joined.split([len(weight) for weight in weights])), list(weights))
    return joined


def _product_type(states: Tensor) -> torch.dtype:
    """The number format of products here: autocast's, where that is on."""
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


def _norm(norm: Any, states: Tensor) -> Tensor:
    """ModernBERT's first layer has no norm of attention."""
    if isinstance(norm, nn.Identity):
        return states
    return functional.layer_norm(states, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def _share(dropout: nn.Dropout) -> float:
    return dropout.p if dropout.training else 0.0


def _draw_words(states: Tensor, dropout: nn.Dropout | None) -> Tensor | None:
    """Random words for a CPU's dropout of these states; other devices draw inside their kernels."""
    if dropout is None or states.device.type != "cpu" or not 0 < _share(dropout) < 1:
        return None
    return draw_words(states.shape)


def _drop(states: Tensor, dropout: nn.Dropout, words: Tensor | None) -> Tensor:
    if words is None:
        return functional.dropout(states, _share(dropout)) if _share(dropout) else states
    return drop_by_words(states, words, dropout.p)


def _turn(parts_TKHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys turned by the places of their tokens, in fp32."""
    plain = parts_TKHD.float()
    low, high = plain.chunk(2, -1)
    return (plain * cos + torch.cat((-high, low), -1) * sin).to(parts_TKHD.dtype)
