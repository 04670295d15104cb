"""The matrix products of an encoder's forward pass, counted for MFU.

A token meets the weights of every layer (2 operations a weight) and, in attention, each token of
its row (4 operations a pair and number). What nothing reads is not computed, so not counted: in the
last layer often only first tokens, or masked ones, go through what follows attention. Only families
of linear layers and plain attention are counted. `models/contract.py` says how products become the
operations of a training step.

    one layer of BERT, rows of 3 and 2 tokens, hidden size H
    queries, keys, values    5 tokens through 3 H x H weights
    attention                9 + 4 = 13 pairs of tokens, 4 H operations a pair
    the linear layers after  5 tokens each; 2 tokens in the last layer, where first tokens are read
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from torch import nn

from flatout.models.contract import Lengths, Product, look_up, through
from flatout.models.encoder.families import family_of, read_setting

# Names that families give to the layers that make queries, to those that make keys and values, and
# to the one that makes all three at once.
_QUERIES = {"query", "q_lin", "q", "q_proj"}
_KEYS_AND_VALUES = {"key", "value", "k_lin", "v_lin", "k", "v", "k_proj", "v_proj"}
_JOINT = "Wqkv"


class CountedEncoder(Protocol):
    """What counting asks of an encoder."""

    net: Any
    family: str
    described: Any
    stored_layers: int
    is_flat: bool
    is_narrow: bool
    is_tagging: bool
    means_answers: bool
    predicts_words: bool
    read_share: float

    def blocks(self) -> list[nn.Module]: ...

    def head_modules(self) -> list[nn.Module]: ...


def encoder_products(model: CountedEncoder, lengths: Lengths) -> list[Product]:
    """The products in the order in which they are computed; empty for families not counted."""
    family = family_of(model.family)
    has_inner_layers = read_setting(model.described, "inner_group_num", 1) != 1
    if family.flat is None or not family.is_counted or has_inner_layers:
        return []
    tokens = float(lengths.sum())
    blocks = model.blocks()
    in_blocks = {id(module) for block in blocks for module in block.modules()}
    reads_store = model.stored_layers > 0
    products = list[Product]()
    if not reads_store:
        products.append(look_up(model.net.get_input_embeddings().weight))
    vectors = tokens  # through a linear layer at this height of the network
    is_below = True
    for module in [*model.net.base_model.modules(), *model.head_modules()]:
        if module is blocks[0]:
            products += _block_products(model, blocks, lengths)
            is_below = False
            vectors = _vectors_of_head(model, lengths)
            continue
        is_computed = not (is_below and reads_store)
        if isinstance(module, nn.Linear) and id(module) not in in_blocks and is_computed:
            products.append(through(vectors, module.weight))
    return products


def _vectors_of_head(model: CountedEncoder, lengths: Lengths) -> float:
    """How many vectors the head reads: masked tokens, all tokens, or one vector a row."""
    tokens = float(lengths.sum())
    if model.predicts_words:
        return tokens * model.read_share
    if model.is_tagging or model.means_answers:
        return tokens
    return len(lengths)


def _block_products(
    model: CountedEncoder, blocks: Sequence[nn.Module], lengths: Lengths
) -> list[Product]:
    """The products of all layers that are computed; ALBERT goes through the same ones again."""
    hidden = model.described.hidden_size
    times = model.described.num_hidden_layers // len(blocks)
    layers = [block for block in blocks for _ in range(times)]
    computed_layers = layers[model.stored_layers :]
    products = list[Product]()
    for layer in computed_layers:
        products += _layer_products(layer, lengths, hidden, is_narrow=False)
    if not computed_layers:
        return products
    if model.is_narrow:
        last = _layer_products(blocks[-1], lengths, hidden, is_narrow=True)
        products[-len(last) :] = last
    elif model.predicts_words and model.is_flat:
        # Queries, keys, values and attention of all tokens; what follows, of masked ones alone.
        _, _, *after_attention = _layer_products(blocks[-1], lengths, hidden, is_narrow=False)
        share = model.read_share
        products[-len(after_attention) :] = [
            replace(product, flops=product.flops * share, trained=product.trained * share)
            for product in after_attention
        ]
    return products


def _layer_products(
    block: nn.Module, lengths: Lengths, hidden: int, *, is_narrow: bool
) -> list[Product]:
    """The products of one layer: inputs of attention, attention, and the linear layers after it.

    `is_narrow`: only first tokens ask, and only they are read afterwards.
    """
    tokens = float(lengths.sum())
    asking = len(lengths) if is_narrow else tokens
    linear = list[tuple[str, nn.Linear]]()
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            linear.append((name, module))
    # Beside LoRA's small matrices a joint product stays whole, so all tokens ask.
    has_lora_beside_joint = any(
        _JOINT in name.split(".") and not name.endswith(_JOINT) for name, _ in linear
    )
    all_ask = not is_narrow or has_lora_beside_joint
    inputs = list[Product]()
    others = list[Product]()
    for name, module in linear:
        names = set(name.split("."))
        is_joint = _JOINT in names
        makes_keys = is_joint or not names.isdisjoint(_KEYS_AND_VALUES)
        if is_joint and not all_ask:
            products = [
                through(asking, module.weight[:hidden]),
                through(tokens, module.weight[hidden:]),
            ]
        else:
            products = [through(tokens if makes_keys else asking, module.weight)]
        # LoRA's second small matrix reads what the first one made, not the input of the layer.
        reads_input = makes_keys or not names.isdisjoint(_QUERIES)
        if reads_input and "lora_B" not in name:
            inputs += products
        else:
            others += products
    pairs = _count_pairs(lengths, _window_of(block), all_ask=all_ask)
    attention = Product(4.0 * pairs * hidden, is_between=True)
    return [sum(inputs[1:], inputs[0]), attention, *others]


def _window_of(block: nn.Module) -> int | None:
    """How far the tokens see each other in this layer; None: over the whole row."""
    for module in block.modules():
        if hasattr(module, "sliding_window"):
            window: Any = module.sliding_window
            return window
    return None


def _count_pairs(lengths: Lengths, window: int | None, *, all_ask: bool) -> float:
    """How many pairs of tokens see each other, as all tokens ask or only first tokens."""
    # A row of 5 tokens, window 3: two tokens are 3 or more away from the first one (beyond = 2).
    # Of the 25 pairs 2 * 3 = 6 are too far apart: (0, 3), (0, 4), (1, 4), and the same turned.
    lengths = lengths.astype(np.float64)
    beyond = np.zeros(1) if window is None else np.maximum(lengths - window, 0)
    pairs_B = lengths**2 - beyond * (beyond + 1) if all_ask else lengths - beyond
    return float(pairs_B.sum())
