"""The layers of an encoder over `[T, H]` tokens of a flat batch, one class for each kind of layer.

A layer takes over the modules of the library's own layer, and with them the names of its weights.
So whatever knows these names works: checkpoints, folders of transformers, LoRA, freezing, layer
decay. Only `forward` is ours: queries, keys and values are one product, and the sum that runs
through the layers is cast nowhere. A layer is attention, which mixes the tokens of a row, and then
`finish`, which treats each token alone. `finish` has no branch on data and no random numbers of a
CPU, so torch compiles it whole.

- `PostNormLayer`: BERT and its kin, which normalise after each sum.
- `DisentangledLayer`: DeBERTa, whose scores also depend on distances.
- `PreNormLayer`: ModernBERT, which normalises before each product.
- `GroupedLayer`: EuroBERT, whose heads share keys and values.

Shapes: T tokens, K tokens that are read further on, B rows, H numbers a token (in attention H
heads, D numbers each), R rows of a table of distances.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from flatout.models.casts import Joined, Weights, join_weights
from flatout.models.encoder.attention import Scores
from flatout.models.encoder.families import FlatForm, activation_of
from flatout.models.lean import draw_words, drop_by_words

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from flatout.models.encoder.flat_rows import FlatRows
    from flatout.models.encoder.relative import Distances

Rotary = tuple[Tensor, Tensor]  # cosines and sines `[T, 1, 1, D]`


@dataclass(slots=True)
class Pass:
    """What all layers of one forward pass share."""

    rows: FlatRows
    rotary: dict[str, Rotary]  # rotary positions by kind of layer
    # [K] the tokens that are read after the last layer; None: all
    read_at_last: Tensor | None = None
    are_first: bool = False  # whether these are the first tokens of the rows
    distances: Distances | None = None  # in families whose scores depend on them
    joined: Joined = field(default_factory=dict)  # weights that were joined for all layers at once


class FlatLayer(nn.Module, ABC):
    """The modules of a layer of transformers, with a forward of our own."""

    def __init__(self, block: nn.Module, config: PretrainedConfig, form: FlatForm) -> None:
        """`config` is the library's configuration of the encoder."""
        super().__init__()
        self._modules.update(block._modules)
        # For each part's dotted name the modules beside it, and its own name among them.
        self._places: dict[str, tuple[dict[str, nn.Module | None], str]] = {}
        for path, module in self.named_modules():
            for name in module._modules:
                self._places[f"{path}.{name}" if path else name] = (module._modules, name)
        self.heads: int = config.num_attention_heads
        self.head_size: int = config.hidden_size // config.num_attention_heads
        self.activate = activation_of(getattr(config, form.activation))
        # `finish` as torch compiled it, for training
        self.compiled: Callable[..., Tensor] | None = None

    def part(self, name: str) -> Any:
        """A module by its dotted name."""
        # LoRA replaces modules, so the module itself is not kept, but where it is.
        modules_beside, own_name = self._places[name]
        return modules_beside[own_name]

    def run_finish(self, *inputs: Any) -> Tensor:
        """All that follows attention; by the compiled function in training, where there is one."""
        if self.compiled and self.training:
            return self.compiled(self, *inputs)
        return self.finish(*inputs)

    def groups(self, *, are_first: bool) -> list[tuple[str, ...]]:
        """Names of linear layers that are one product with others.

        `are_first`: whether it is the last layer, and only first tokens are read.
        """
        return []

    def prepare(self, own_KH: Tensor) -> tuple[Any, ...]:
        """What `finish` needs besides states.

        Made outside of `finish`, so that the compiled function stays the same at each step.
        """
        return ()

    @abstractmethod
    def finish(self, *inputs: Any) -> Tensor:
        """All that follows attention: `[K, H]` from states and what was read, `[K, H]` each."""


class PostNormLayer(FlatLayer):
    """BERT's layer, with the modules' names of a family."""

    def __init__(self, block: nn.Module, config: PretrainedConfig, form: FlatForm) -> None:
        super().__init__(block, config, form)
        self.names = form.names
        # the three linear layers of `finish`, a product each
        self._later: list[tuple[str, ...]] = [
            (self.names.out,),
            (self.names.up,),
            (self.names.down,),
        ]

    def forward(self, states_TH: Tensor, shared: Pass, is_last: bool = False) -> Tensor:
        """`[T, H]`, or `[K, H]` after the last layer."""
        read_tokens = shared.read_at_last if is_last else None
        are_first = read_tokens is not None and shared.are_first
        groups = self.groups(are_first=are_first)
        weights = self.weights(states_TH, [*groups, *self._later], shared.joined)
        scores = self.score(shared)
        own_KH = _select(states_TH, read_tokens)
        if are_first:
            query = self.project(own_KH, groups[0], weights[0]).squeeze(1)
            others = self.project(states_TH, groups[1], weights[1])
            read = shared.rows.attend(others, scores, query)
        else:
            others = self.project(states_TH, groups[0], weights[0])
            read = _select(shared.rows.attend(others, scores), read_tokens)
        later_weights = weights[len(groups) :]
        return self.run_finish(own_KH, read.flatten(1), *self._draw(own_KH), *later_weights)

    def groups(self, *, are_first: bool) -> list[tuple[str, ...]]:
        names = self.names
        # Where first tokens alone ask, queries come from fewer tokens than keys and values.
        if are_first:
            return [(names.query,), (names.key, names.value)]
        return [(names.query, names.key, names.value)]

    def score(self, shared: Pass) -> Scores:
        """How scores become shares in this pass."""
        scale = self.head_size**-0.5
        dropout = _share(self.part(self.names.attention_dropout))
        distances = shared.distances
        if distances is None:
            return Scores(scale, dropout, None)
        return Scores(scale, dropout, None, partial(distances.attend, distances.add_numbers))

    def weights(
        self, states_TH: Tensor, groups: list[tuple[str, ...]], joined_before: Joined
    ) -> list[Weights | None]:
        """Weight and bias of each group of linear layers, joined, in the number format of products.

        None where LoRA has put matrices beside one of them: then each is called by itself.
        """
        device = states_TH.device.type
        dtype = states_TH.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        weights = list[Weights | None]()
        numbers_to_join = list[int]()
        groups_to_join = list[list[nn.Linear]]()
        for number, group in enumerate(groups):
            layers = [self.part(name) for name in group]
            if not all(type(layer) is nn.Linear for layer in layers):
                weights.append(None)
                continue
            if tuple(layers) in joined_before:
                weights.append(joined_before[tuple(layers)])
                continue
            weights.append((layers[0].weight, layers[0].bias))
            if len(layers) > 1 or layers[0].weight.dtype != dtype:
                numbers_to_join.append(number)
                groups_to_join.append(layers)
        joined = join_weights(dtype, groups_to_join)
        for number, joined_weights in zip(numbers_to_join, joined, strict=True):
            weights[number] = joined_weights
        return weights

    def project(self, states_TH: Tensor, names: tuple[str, ...], weights: Weights | None) -> Tensor:
        """`[T, parts, H, D]`: the linear layers of these names, as one product by `weights`."""
        if weights is None:
            made = torch.stack([self.part(name)(states_TH) for name in names], 1)
        else:
            made = functional.linear(states_TH, *weights)
        return made.view(-1, len(names), self.heads, self.head_size)

    def prepare(self, own_KH: Tensor) -> tuple[Any, ...]:
        """Random words for the two dropouts, and the weights of the three products."""
        return *self._draw(own_KH), *self.weights(own_KH, self._later, {})

    def finish(self, own_KH: Tensor, read_KH: Tensor, *prepared: Any) -> Tensor:
        """The two sums with their norms, and the feed-forward products between."""
        names = self.names
        out_words, down_words, out, up, down = prepared
        made_KH = self._multiply(names.out, read_KH, out)
        if names.out_dropout:
            made_KH = _drop(made_KH, self.part(names.out_dropout), out_words)
        middle_KH = self.part(names.out_norm)(made_KH + own_KH)
        wide = self.activate(self._multiply(names.up, middle_KH, up))
        made_KH = self._multiply(names.down, wide, down)
        if names.down_dropout:
            made_KH = _drop(made_KH, self.part(names.down_dropout), down_words)
        return cast(Tensor, self.part(names.down_norm)(made_KH + middle_KH))

    def _multiply(self, name: str, states: Tensor, weights: Weights | None) -> Tensor:
        if weights is None:
            return self.part(name)(states)
        return functional.linear(states, *weights)

    def _draw(self, own_KH: Tensor) -> list[Tensor | None]:
        """Random words for a CPU's dropouts of these states.

        None: nothing is dropped, or another device draws inside its kernels.
        """
        words = list[Tensor | None]()
        for name in (self.names.out_dropout, self.names.down_dropout):
            share = 0.0
            if name and own_KH.device.type == "cpu":
                share = _share(self.part(name))
            words.append(draw_words(own_KH.shape) if 0 < share < 1 else None)
        return words


class DisentangledLayer(PostNormLayer):
    """DeBERTa's layer: queries and keys also meet vectors of distances.

    The layer's own linear layers make these vectors from a table that all layers share.
    """

    def score(self, shared: Pass) -> Scores:
        """How scores become shares in this pass, with the vectors of distances."""
        attention = self.part("attention.self")
        distances = shared.distances
        # "c2p": queries of tokens meet keys of distances; "p2c": queries of distances meet keys
        kinds: Sequence[str] = attention.pos_att_type
        dropout = _share(attention.dropout)
        # a score is a sum of up to three products, and scaled as one of three times the size
        num_products = 1 + ("c2p" in kinds) + ("p2c" in kinds)
        scale = (self.head_size * num_products) ** -0.5
        if distances is None:
            return Scores(scale, dropout, None)
        table_RH = attention.pos_dropout(distances.table)
        prefix = "" if attention.share_att_key else "pos_"
        key = None
        query = None
        if "c2p" in kinds:
            key = self._vectors(f"{prefix}key_proj", table_RH)
        if "p2c" in kinds:
            query = self._vectors(f"{prefix}query_proj", table_RH) * scale
        add = partial(distances.add_products, key, query)
        return Scores(scale, dropout, None, partial(distances.attend, add))

    def _vectors(self, name: str, table_RH: Tensor) -> Tensor:
        """`[R, H, D]`, in the number format in which they meet tokens."""
        made: Tensor = self.part(f"attention.self.{name}")(table_RH)
        vectors_RHD = made.view(-1, self.heads, self.head_size)
        return vectors_RHD.float() if vectors_RHD.device.type == "cpu" else vectors_RHD


class LayerGroup(nn.Module):
    """ALBERT's group of layers; tokens go through it again and again."""

    def __init__(self, layers: list[PostNormLayer]) -> None:
        super().__init__()
        self.albert_layers = nn.ModuleList(layers)

    def forward(self, states_TH: Tensor, shared: Pass, is_last: bool = False) -> Tensor:
        """`is_last`: whether this pass through the group is the encoder's last."""
        for number, layer in enumerate(self.albert_layers, 1):
            states_TH = layer(states_TH, shared, is_last and number == len(self.albert_layers))
        return states_TH


class PreNormLayer(FlatLayer):
    """ModernBERT's layer: queries and keys have rotary positions, and some layers see a window."""

    def __init__(self, block: nn.Module, config: PretrainedConfig, form: FlatForm) -> None:
        super().__init__(block, config, form)
        self.kind = str(block.attention_type)

    def forward(self, states_TH: Tensor, shared: Pass, is_last: bool = False) -> Tensor:
        """`[T, H]`, or `[K, H]` after the last layer."""
        read_tokens = shared.read_at_last if is_last else None
        attention = self.part("attn")
        dropout = attention.attention_dropout if self.training else 0.0
        scores = Scores(self.head_size**-0.5, dropout, attention.sliding_window)
        normed_TH = self.part("attn_norm")(states_TH)
        rotary = shared.rotary[self.kind]
        # Fused kernels align a window at the end of the keys, where a first token is not. LoRA's
        # matrices cannot be split into those of queries and of the others.
        is_whole = scores.window is None and type(attention.Wqkv) is nn.Linear
        if read_tokens is not None and shared.are_first and is_whole:
            query, kv = self.project_first(normed_TH, read_tokens)
            kv = torch.cat((_rotate(kv[:, :1], *rotary), kv[:, 1:]), 1)
            # a first token's position is 0: it rotates nothing
            read = shared.rows.attend(kv, scores, query)
        else:
            qkv = attention.Wqkv(normed_TH).view(-1, 3, self.heads, self.head_size)
            qkv = torch.cat((_rotate(qkv[:, :2], *rotary), qkv[:, 2:]), 1)
            read = _select(shared.rows.attend(qkv, scores), read_tokens)
        return self.run_finish(_select(states_TH, read_tokens), read.flatten(1))

    def project_first(self, normed_TH: Tensor, read_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, H, D]` queries of first tokens, `[T, 2, H, D]` keys and values of all."""
        layer = self.part("attn.Wqkv")
        size = self.heads * self.head_size
        query_weight, others_weight = layer.weight.split((size, 2 * size))
        query_bias = None
        others_bias = None
        if layer.bias is not None:
            query_bias, others_bias = layer.bias.split((size, 2 * size))
        first_BH = normed_TH.index_select(0, read_tokens)
        query = functional.linear(first_BH, query_weight, query_bias)
        others = functional.linear(normed_TH, others_weight, others_bias)
        query_BHD = query.view(-1, self.heads, self.head_size)
        return query_BHD, others.view(-1, 2, self.heads, self.head_size)

    def finish(self, own_KH: Tensor, read_KH: Tensor) -> Tensor:
        """The two sums, and the gated products between."""
        attention = self.part("attn")
        mlp = self.part("mlp")
        own_KH = own_KH + attention.out_drop(attention.Wo(read_KH))
        up, gate = mlp.Wi(self.part("mlp_norm")(own_KH)).chunk(2, dim=-1)
        return own_KH + cast(Tensor, mlp.Wo(mlp.drop(self.activate(up) * gate)))


class GroupedLayer(FlatLayer):
    """EuroBERT's layer: several heads share keys and values, and positions are rotary.

    Its norms divide by the root mean square.
    """

    def forward(self, states_TH: Tensor, shared: Pass, is_last: bool = False) -> Tensor:
        """`[T, H]`, or `[K, H]` after the last layer."""
        read_tokens = shared.read_at_last if is_last else None
        attention = self.part("self_attn")
        are_first = read_tokens is not None and shared.are_first
        dropout = attention.attention_dropout if self.training else 0.0
        scores = Scores(attention.scaling, dropout, None)
        normed_TH = self.part("input_layernorm")(states_TH)
        rotary = shared.rotary[""]
        asking_KH = _select(normed_TH, read_tokens) if are_first else normed_TH
        made = attention.q_proj(asking_KH), attention.k_proj(normed_TH), attention.v_proj(normed_TH)
        query, key, value = (part.unflatten(1, (1, -1, attention.head_dim)) for part in made)
        kv = torch.cat((_rotate(key, *rotary), value), 1)
        kv = kv.repeat_interleave(attention.num_key_value_groups, 2)
        if are_first:  # a first token's position is 0: it rotates nothing
            read = shared.rows.attend(kv, scores, query.squeeze(1))
        else:
            qkv = torch.cat((_rotate(query, *rotary), kv), 1)
            read = _select(shared.rows.attend(qkv, scores), read_tokens)
        return self.run_finish(_select(states_TH, read_tokens), read.flatten(1))

    def finish(self, own_KH: Tensor, read_KH: Tensor) -> Tensor:
        """The two sums, and the gated products between."""
        own_KH = own_KH + self.part("self_attn").o_proj(read_KH)
        normed_KH = self.part("post_attention_layernorm")(own_KH)
        return own_KH + cast(Tensor, self.part("mlp")(normed_KH))


_LAYER_KINDS: dict[str, type[FlatLayer]] = {
    "post_norm": PostNormLayer,
    "disentangled": DisentangledLayer,
    "pre_norm": PreNormLayer,
    "grouped": GroupedLayer,
}


def replace_layers(net: PreTrainedModel, form: FlatForm) -> None:
    """Put our layers in the place of the library's, with the library's modules in them."""
    layers = net.base_model.get_submodule(form.layers)
    assert isinstance(layers, nn.ModuleList)
    config = net.config
    for number, block in enumerate(layers):
        inner_layers = block._modules.get("albert_layers")
        if isinstance(inner_layers, nn.ModuleList):
            group = [PostNormLayer(layer, config, form) for layer in inner_layers]
            layers[number] = LayerGroup(group)
        else:
            layers[number] = _LAYER_KINDS[form.layer_kind](block, config, form)


def groups_to_cast(
    net: PreTrainedModel,
    layers: Sequence[FlatLayer],
    *,
    first: int,
    are_first: bool,
    are_compiled: bool,
) -> list[list[nn.Linear]]:
    """Linear layers that `cast_in_pass` may cast; those of one group are one product.

    `first`: the layer from which on layers are computed. `are_first`: whether only first tokens are
    read after the last layer. `are_compiled`: whether compiled functions run in this pass; then
    layers are left out whose function reads weights.
    """
    # The gradients of a layer that is called twice would be added up in sixteen bits, and LoRA asks
    # in which format weights are.
    calls_twice = any(type(layer) is DisentangledLayer for layer in layers)
    if calls_twice or any("lora_" in name for name, _ in net.named_parameters()):
        return []
    groups = list[list[nn.Linear]]()
    left_out = {module for layer in layers[:first] for module in layer.modules()}
    for layer in layers[first:]:
        for names in layer.groups(are_first=are_first and layer is layers[-1]):
            groups.append([layer.part(name) for name in names])
            left_out.update(groups[-1])
        if are_compiled and not isinstance(layer, PostNormLayer):
            left_out.update(layer.modules())
    for module in net.modules():
        if type(module) is nn.Linear and module not in left_out:
            groups.append([module])
    return groups


def _select(states_TH: Tensor, kept: Tensor | None) -> Tensor:
    """`[K, H]` the states that are read further on; None: all."""
    return states_TH if kept is None else states_TH.index_select(0, kept)


def _share(dropout: nn.Dropout) -> float:
    """The fraction that is dropped now."""
    return dropout.p if dropout.training else 0.0


def _drop(states: Tensor, dropout: nn.Dropout, words: Tensor | None) -> Tensor:
    """Dropout by random words, or by the device's own random numbers where there are none."""
    if words is not None:
        return drop_by_words(states, words, dropout.p)
    return functional.dropout(states, _share(dropout)) if _share(dropout) else states


def _rotate(parts_TKHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys rotated by the positions of their tokens, in fp32."""
    plain = parts_TKHD.float()
    low, high = plain.chunk(2, -1)
    return (plain * cos + torch.cat((-high, low), -1) * sin).to(parts_TKHD.dtype)
