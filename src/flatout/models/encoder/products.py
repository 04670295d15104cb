"""Operations of an encoder, counted from its layers: what MFU divides by what the device could have done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from flatout.models.encoder.families import FLAT_FAMILIES
from flatout.models.flops import Lengths, Product, between, look_up, through

_COUNTED_FAMILIES = {*FLAT_FAMILIES, "mpnet"}
"""Families whose layers are linear layers and plain attention, so that their operations can be counted."""
_QUERIES, _KEYS = {"query", "q_lin", "q"}, {"key", "value", "k_lin", "v_lin", "k", "v"}
"""What families call the layers that make queries, and those that make keys and values."""
_JOINT = "Wqkv"
"""What makes all three at once."""


def encoder_products(model: Any, lengths: Lengths) -> list[Product]:
    """A token meets the weights of every layer (2 N forwards) and, in attention, each token of its row (4 L H T).

    The head sees rows; so does the last layer of a flat encoder whose head reads first tokens, but for its keys and
    values. A head of masked words, and what follows attention in the last layer, see these words alone. Empty where a
    family has products of its own kind.
    """
    if model.family not in _COUNTED_FAMILIES or getattr(model.described, "inner_group_num", 1) != 1:
        return []
    tokens, blocks = float(lengths.sum()), model.blocks()
    read = tokens * model.read_share if model.predicts_words else tokens if model.is_tagging else len(lengths)
    in_blocks = {id(module) for block in blocks for module in block.modules()}
    found, below = [look_up(model.net.get_input_embeddings().weight)], True
    for module in [*model.net.base_model.modules(), *model.head_modules()]:
        if module is blocks[0]:
            found += _block_products(model, blocks, lengths)
            below = False
        elif isinstance(module, nn.Linear) and id(module) not in in_blocks:
            found.append(through(tokens if below else read, module.weight))
    return found


def _block_products(model: Any, blocks: list[Any], lengths: Lengths) -> list[Product]:
    """Of all layers; ALBERT goes through the same ones again."""
    found: list[Product] = []
    times = model.described.num_hidden_layers // len(blocks)
    for block in blocks:
        found += _layer_products(block, lengths, model.described.hidden_size, is_narrow=False) * times
    if model.is_narrow:
        last = _layer_products(blocks[-1], lengths, model.described.hidden_size, is_narrow=True)
        found[-len(last) :] = last
    elif model.predicts_words and model.is_flat:
        _, _, *after = _layer_products(blocks[-1], lengths, model.described.hidden_size, is_narrow=False)
        found[-len(after) :] = [_shortened(each, model.read_share) for each in after]
    return found


def _shortened(product: Product, share: float) -> Product:
    """The same product of a share of its tokens."""
    return replace(product, flops=product.flops * share, trained=product.trained * share)


def _layer_products(block: Any, lengths: Lengths, hidden: int, *, is_narrow: bool) -> list[Product]:
    """`is_narrow`: only first tokens ask, and only they are read afterwards."""
    tokens, rows = float(lengths.sum()), len(lengths) if is_narrow else float(lengths.sum())
    linear = [(set(name.split(".")), name, each) for name, each in block.named_modules() if isinstance(each, nn.Linear)]
    # Beside LoRA's small matrices a joint product stays whole, and all tokens ask.
    all_ask = not is_narrow or any(_JOINT in kinds and not name.endswith(_JOINT) for kinds, name, _ in linear)
    inputs: list[Product] = []
    others: list[Product] = []
    for kinds, name, module in linear:
        # A small matrix of LoRA's second kind reads what the first one made.
        is_input = "lora_B" not in name and not (_QUERIES | _KEYS | {_JOINT}).isdisjoint(kinds)
        if _JOINT in kinds and not all_ask:
            parts = [through(rows, module.weight[:hidden]), through(tokens, module.weight[hidden:])]
        else:
            parts = [through(rows if (_KEYS | {_JOINT}).isdisjoint(kinds) else tokens, module.weight)]
        (inputs if is_input else others).extend(parts)
    window = next((each.sliding_window for each in block.modules() if hasattr(each, "sliding_window")), None)
    attention = between(4.0 * (_pairs if all_ask else _first_pairs)(lengths, window) * hidden)
    return [sum(inputs[1:], inputs[0]), attention, *others]


def _pairs(lengths: Lengths, window: int | None) -> float:
    """Pairs of tokens of the same row that see each other."""
    lengths = lengths.astype(np.float64)
    if window is None:
        return float((lengths**2).sum())
    beyond = np.maximum(lengths - window, 0)  # so many tokens are the window or more away from the row's first
    return float((lengths**2 - beyond * (beyond + 1)).sum())


def _first_pairs(lengths: Lengths, window: int | None) -> float:
    """Pairs of a row's first token with one that it sees."""
    return float((lengths if window is None else np.minimum(lengths, window)).sum())
