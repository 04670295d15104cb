"""Layers of an encoder over `[T, H]` tokens of a flat batch: one that normalises after each sum,
one before products.

A layer takes over the modules of the library's own layer, and with them the names of its weights.
So whatever knows these names works: checkpoints, folders of transformers, LoRA, freezing, layer
decay. Only `forward` is ours: queries, keys and values are one product, the sum that runs through
the layers is cast nowhere. `finish`, all that follows attention, has no branch on data and no
random numbers of a CPU, so torch compiles it whole.

Shapes: T tokens, K tokens that are kept, B rows, H numbers a token (in attention H heads, D numbers
each).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from flatout.models.encoder.attention import Scores
from flatout.models.encoder.families import FlatForm, activation_of
from flatout.models.lean import draw_words, drop_by_words

if TYPE_CHECKING:
    from flatout.models.encoder.flat_rows import FlatRows
    from flatout.models.encoder.relative import Distances

Weights = tuple[Tensor, Tensor]  # of a product, and its bias


@dataclass(slots=True)
class Pass:
    """What all layers of one forward pass share."""

    rows: FlatRows
    # cosines and sines `[T, 1, 1, D]` of rotary positions, by kind of layer
    rotary: dict[str, tuple[Tensor, Tensor]]
    kept: Tensor | None = None  # [K] the tokens that are read after the last layer; None: all
    are_first: bool = False  # whether these are the first tokens of the rows
    # of tokens of a row, in families whose scores depend on them
    distances: Distances | None = None


class FlatLayer(nn.Module, ABC):
    """What both kinds of layers have: the modules of a layer of transformers, and their own
    `finish`.
    """

    def __init__(self, block: nn.Module, config: Any, form: FlatForm) -> None:
        super().__init__()
        self._modules.update(block._modules)
        self.heads: int = config.num_attention_heads
        self.head_size: int = config.hidden_size // config.num_attention_heads
        self.activate = activation_of(getattr(config, form.activation))
        # `finish` as torch compiled it, for training
        self.compiled: Callable[..., Tensor] | None = None

    def part(self, name: str) -> Any:
        """A module by its dotted name; looked up each time, as LoRA puts others in place."""
        found: Any = self
        for each in name.split("."):
            found = found._modules[each]
        return found

    def run_finish(self, *inputs: Any) -> Tensor:
        """Everything after attention, compiled where a run has chosen that."""
        return (
            self.compiled(self, *inputs)
            if self.compiled and self.training
            else self.finish(*inputs)
        )

    def prepare(self, own_KH: Tensor) -> tuple[Any, ...]:
        """What `finish` needs besides states, made outside of it: what is compiled then stays the
        same each time.
        """
        return ()

    @abstractmethod
    def finish(self, *inputs: Any) -> Tensor:
        """Everything after attention."""


class PostNormLayer(FlatLayer):
    """BERT's layer, under the names of a family."""

    def __init__(self, block: nn.Module, config: Any, form: FlatForm) -> None:
        super().__init__(block, config, form)
        self.names = form.names
        self._later: list[tuple[str, ...]] = [
            (self.names.out,),
            (self.names.up,),
            (self.names.down,),
        ]

    def forward(self, states_TH: Tensor, shared: Pass, is_last: bool = False) -> Tensor:
        """`[T, H]`, or `[K, H]` after the last layer."""
        names = self.names
        kept = shared.kept if is_last else None
        are_first = kept is not None and shared.are_first
        inputs = (
            [(names.query,), (names.key, names.value)]
            if are_first
            else [(names.query, names.key, names.value)]
        )
        weights = self.weights(states_TH, [*inputs, *self._later])
        scores = self.score(shared)
        own_KH = _select(states_TH, kept)
        if are_first:
            query = self.project(own_KH, inputs[0], weights[0]).squeeze(1)
            read = shared.rows.attend(self.project(states_TH, inputs[1], weights[1]), scores, query)
        else:
            read = _select(
                shared.rows.attend(self.project(states_TH, inputs[0], weights[0]), scores), kept
            )
        return self.run_finish(
            own_KH, read.flatten(1), *self._draw(own_KH), *weights[len(inputs) :]
        )

    def score(self, shared: Pass) -> Scores:
        """How scores become shares in this pass."""
        scale = self.head_size**-0.5
        share = _share(self.part(self.names.attention_dropout))
        apart = shared.distances
        return Scores(
            scale, share, None, None if apart is None else partial(apart.attend, apart.add_numbers)
        )

    def weights(self, states_TH: Tensor, groups: list[tuple[str, ...]]) -> list[Weights | None]:
        """Weight and bias of each group of linear layers, joined; None where LoRA has put matrices
        beside one.
        """
        device = states_TH.device.type
        layers = [[self.part(name) for name in group] for group in groups]
        kind = (
            torch.get_autocast_dtype(device)
            if torch.is_autocast_enabled(device)
            else states_TH.dtype
        )
        plain = [all(type(layer) is nn.Linear for layer in group) for group in layers]
        found = [
            (group[0].weight, group[0].bias) if own else None
            for group, own in zip(layers, plain, strict=True)
        ]
        made = [
            n
            for n, each in enumerate(layers)
            if plain[n] and (len(each) > 1 or each[0].weight.dtype != kind)
        ]
        for number, joined in zip(made, _join(kind, [layers[n] for n in made]), strict=True):
            found[number] = joined
        return found

    def project(self, states_TH: Tensor, names: tuple[str, ...], weights: Weights | None) -> Tensor:
        """`[T, parts, H, D]`: several linear layers as one product, where they are plain ones."""
        if weights is None:
            found = torch.stack([self.part(name)(states_TH) for name in names], 1)
        else:
            found = functional.linear(states_TH, *weights)
        return found.view(-1, len(names), self.heads, self.head_size)

    def prepare(self, own_KH: Tensor) -> tuple[Any, ...]:
        """Random words for the two dropouts, and the weights of the three products."""
        return *self._draw(own_KH), *self.weights(own_KH, self._later)

    def finish(self, own_KH: Tensor, read_KH: Tensor, *prepared: Any) -> Tensor:
        """The sums, their norms, and the two products between."""
        names = self.names
        out_words, down_words, out, up, down = prepared
        found = self._multiply(names.out, read_KH, out)
        if names.out_dropout:
            found = _drop(found, self.part(names.out_dropout), out_words)
        middle_KH = self.part(names.out_norm)(found + own_KH)
        found = self._multiply(
            names.down, self.activate(self._multiply(names.up, middle_KH, up)), down
        )
        if names.down_dropout:
            found = _drop(found, self.part(names.down_dropout), down_words)
        return cast(Tensor, self.part(names.down_norm)(found + middle_KH))

    def _multiply(self, name: str, states: Tensor, weights: Weights | None) -> Tensor:
        return self.part(name)(states) if weights is None else functional.linear(states, *weights)

    def _draw(self, own_KH: Tensor) -> list[Tensor | None]:
        """Random words for a CPU's dropouts of these states; other devices draw inside their
        kernels.
        """
        names = (self.names.out_dropout, self.names.down_dropout)
        shares = [
            _share(self.part(name)) if name and own_KH.device.type == "cpu" else 0 for name in names
        ]
        return [draw_words(own_KH.shape) if 0 < share < 1 else None for share in shares]


class DisentangledLayer(PostNormLayer):
    """DeBERTa's layer: queries and keys also meet vectors of distances, which its own products
    make.
    """

    def score(self, shared: Pass) -> Scores:
        """Queries and keys of the distances in this pass."""
        attention = self.part("attention.self")
        distances = shared.distances
        kinds = attention.pos_att_type
        share = _share(attention.dropout)
        scale = (self.head_size * (1 + ("c2p" in kinds) + ("p2c" in kinds))) ** -0.5
        if distances is None:
            return Scores(scale, share, None)
        table_RH = attention.pos_dropout(distances.table)
        prefix = "" if attention.share_att_key else "pos_"
        key = self._vectors(f"{prefix}key_proj", table_RH) if "c2p" in kinds else None
        query = self._vectors(f"{prefix}query_proj", table_RH) * scale if "p2c" in kinds else None
        return Scores(
            scale,
            share,
            None,
            partial(distances.attend, partial(distances.add_products, key, query)),
        )

    def _vectors(self, name: str, table_RH: Tensor) -> Tensor:
        """`[R, H, D]`, in the number format in which distances meet them."""
        made: Tensor = self.part(f"attention.self.{name}")(table_RH).view(
            -1, self.heads, self.head_size
        )
        return made.float() if made.device.type == "cpu" else made


class LayerGroup(nn.Module):
    """ALBERT's layers that follow each other and are gone through together, again and again."""

    def __init__(self, layers: list[PostNormLayer]) -> None:
        super().__init__()
        self.albert_layers = nn.ModuleList(layers)

    def forward(self, states_TH: Tensor, shared: Pass, is_last: bool = False) -> Tensor:
        for number, layer in enumerate(self.albert_layers, 1):
            states_TH = layer(states_TH, shared, is_last and number == len(self.albert_layers))
        return states_TH


class PreNormLayer(FlatLayer):
    """ModernBERT's layer: queries and keys have rotary positions, some layers see a window."""

    def __init__(self, block: Any, config: Any, form: FlatForm) -> None:
        super().__init__(block, config, form)
        self.kind: str = block.attention_type

    def forward(self, states_TH: Tensor, shared: Pass, is_last: bool = False) -> Tensor:
        kept = shared.kept if is_last else None
        attention = self.part("attn")
        share = attention.attention_dropout if self.training else 0.0
        scores = Scores(self.head_size**-0.5, share, attention.sliding_window)
        normed_TH = self.part("attn_norm")(states_TH)
        rotary = shared.rotary[self.kind]
        # Fused kernels align a window at the end of the keys, where a first token is not.
        is_whole = scores.window is None and type(attention.Wqkv) is nn.Linear
        if kept is not None and shared.are_first and is_whole:
            query, kv = self.project_first(normed_TH, kept)
            kv = torch.cat((_rotate(kv[:, :1], *rotary), kv[:, 1:]), 1)
            # a first token's position is 0: it rotates nothing
            read = shared.rows.attend(kv, scores, query)
        else:
            qkv = attention.Wqkv(normed_TH).view(-1, 3, self.heads, self.head_size)
            qkv = torch.cat((_rotate(qkv[:, :2], *rotary), qkv[:, 2:]), 1)
            read = _select(shared.rows.attend(qkv, scores), kept)
        return self.run_finish(_select(states_TH, kept), read.flatten(1))

    def project_first(self, normed_TH: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, H, D]` queries of first tokens, `[T, 2, H, D]` keys and values of all."""
        layer = self.part("attn.Wqkv")
        size = self.heads * self.head_size
        weights = layer.weight.split((size, 2 * size))
        biases = (None, None) if layer.bias is None else layer.bias.split((size, 2 * size))
        query = functional.linear(normed_TH.index_select(0, kept), weights[0], biases[0])
        others = functional.linear(normed_TH, weights[1], biases[1])
        return query.view(-1, self.heads, self.head_size), others.view(
            -1, 2, self.heads, self.head_size
        )

    def finish(self, own_KH: Tensor, read_KH: Tensor) -> Tensor:
        """The two sums, and the gated products between."""
        attention, mlp = self.part("attn"), self.part("mlp")
        own_KH = own_KH + attention.out_drop(attention.Wo(read_KH))
        up, gate = mlp.Wi(self.part("mlp_norm")(own_KH)).chunk(2, dim=-1)
        return own_KH + cast(Tensor, mlp.Wo(mlp.drop(self.activate(up) * gate)))


class GroupedLayer(FlatLayer):
    """EuroBERT's layer: norms by the root mean square, rotary positions, keys and values that
    several heads share.
    """

    def forward(self, states_TH: Tensor, shared: Pass, is_last: bool = False) -> Tensor:
        kept = shared.kept if is_last else None
        attention = self.part("self_attn")
        are_first = kept is not None and shared.are_first
        scores = Scores(
            attention.scaling, attention.attention_dropout if self.training else 0.0, None
        )
        normed_TH = self.part("input_layernorm")(states_TH)
        rotary = shared.rotary[""]
        asking_KH = _select(normed_TH, kept) if are_first else normed_TH
        made = attention.q_proj(asking_KH), attention.k_proj(normed_TH), attention.v_proj(normed_TH)
        query, key, value = (each.unflatten(1, (1, -1, attention.head_dim)) for each in made)
        kv = torch.cat((_rotate(key, *rotary), value), 1).repeat_interleave(
            attention.num_key_value_groups, 2
        )
        if are_first:  # a first token's position is 0: it rotates nothing
            read = shared.rows.attend(kv, scores, query.squeeze(1))
        else:
            read = _select(
                shared.rows.attend(torch.cat((_rotate(query, *rotary), kv), 1), scores), kept
            )
        return self.run_finish(_select(states_TH, kept), read.flatten(1))

    def finish(self, own_KH: Tensor, read_KH: Tensor) -> Tensor:
        """The two sums, and the gated products between."""
        own_KH = own_KH + self.part("self_attn").o_proj(read_KH)
        return own_KH + cast(
            Tensor, self.part("mlp")(self.part("post_attention_layernorm")(own_KH))
        )


_KINDS: dict[str, type[FlatLayer]] = {
    "post_norm": PostNormLayer,
    "disentangled": DisentangledLayer,
    "pre_norm": PreNormLayer,
    "grouped": GroupedLayer,
}


def replace_layers(net: Any, form: FlatForm) -> None:
    """Put our layers in the place of the library's, with their modules."""
    layers = net.base_model.get_submodule(form.layers)
    config = net.config
    for number, block in enumerate(layers):
        if hasattr(block, "albert_layers"):
            layers[number] = LayerGroup(
                [PostNormLayer(each, config, form) for each in block.albert_layers]
            )
        else:
            layers[number] = _KINDS[form.layer_kind](block, config, form)


def _join(kind: torch.dtype, groups: list[list[nn.Linear]]) -> list[Weights]:
    if not groups:
        return []
    weights = [layer.weight for group in groups for layer in group]
    biases = [layer.bias for group in groups for layer in group]
    made = _Cast.apply(kind, 2 * [len(group) for group in groups], *weights, *biases)
    return list(zip(made[: len(groups)], made[len(groups) :], strict=True))


class _Cast(torch.autograd.Function):
    """Tensors cast, and joined in groups of these sizes, by one operator; gradients are cast back
    by one, too.
    """

    @staticmethod
    def forward(
        ctx: Any, kind: torch.dtype, sizes: list[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.kind = tensors[0].dtype
        ctx.lengths = []
        joined = list[Tensor]()
        targets = list[Tensor]()
        rest = list(tensors)
        for size in sizes:
            group, rest = rest[:size], rest[size:]
            ctx.lengths.append([len(tensor) for tensor in group])
            joined.append(
                group[0].new_empty((sum(ctx.lengths[-1]), *group[0].shape[1:]), dtype=kind)
            )
            targets += joined[-1].split(ctx.lengths[-1])
        torch._foreach_copy_(targets, list(tensors))
        return tuple(joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = list(gradients)
        if gradients[0].dtype != ctx.kind:
            found = [gradient.new_empty(gradient.shape, dtype=ctx.kind) for gradient in gradients]
            torch._foreach_copy_(found, list(gradients))
        parts = [
            part
            for whole, lengths in zip(found, ctx.lengths, strict=True)
            for part in whole.split(lengths)
        ]
        return None, None, *parts


def _select(states_TH: Tensor, kept: Tensor | None) -> Tensor:
    """`[K, H]` the states that are read further on; None: all."""
    return states_TH if kept is None else states_TH.index_select(0, kept)


def _share(dropout: nn.Dropout) -> float:
    return dropout.p if dropout.training else 0.0


def _drop(states: Tensor, dropout: nn.Dropout, words: Tensor | None) -> Tensor:
    if words is None:
        return functional.dropout(states, _share(dropout)) if _share(dropout) else states
    return drop_by_words(states, words, dropout.p)


def _rotate(parts_TKHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys rotated by the positions of their tokens, in fp32."""
    plain = parts_TKHD.float()
    low, high = plain.chunk(2, -1)
    return (plain * cos + torch.cat((-high, low), -1) * sin).to(parts_TKHD.dtype)
