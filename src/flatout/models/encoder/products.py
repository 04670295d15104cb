"""The matrix products of an encoder's forward pass, counted for MFU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from flatout.models.contract import Lengths, Product, look_up, through
from flatout.models.encoder.families import FLAT_FAMILIES

_QUERIES = {"query", "q_lin", "q", "q_proj"}  # what families call the layers that make queries
# and those that make keys and values
_KEYS = {"key", "value", "k_lin", "v_lin", "k", "v", "k_proj", "v_proj"}
_JOINT = "Wqkv"  # what makes all three at once


def encoder_products(model: Any, lengths: Lengths) -> list[Product]:
    """A token meets the weights of every layer (2 N forwards) and, in attention, each token of its
    row (4 L H T).
    """
    # The head sees rows; so does the last layer of a flat encoder whose head reads first tokens,
    # but for its keys and values. A head of masked words, and what follows attention in the last
    # layer, see these words alone. Only families of linear layers and plain attention are counted.
    if (
        model.family not in {*FLAT_FAMILIES} - {"deberta-v2"}
        or getattr(model.described, "inner_group_num", 1) != 1
    ):
        return []
    tokens = float(lengths.sum())
    blocks = model.blocks()
    stored = model.stored_layers
    each = model.is_tagging or model.means_answers
    read = tokens * model.read_share if model.predicts_words else tokens if each else len(lengths)
    in_blocks = {id(module) for block in blocks for module in block.modules()}
    found = [] if stored else [look_up(model.net.get_input_embeddings().weight)]
    below = True
    for module in [*model.net.base_model.modules(), *model.head_modules()]:
        if module is blocks[0]:
            found += _block_products(model, blocks, lengths)
            below = False
        elif (
            isinstance(module, nn.Linear) and id(module) not in in_blocks and not (below and stored)
        ):
            found.append(through(tokens if below else read, module.weight))
    return found


def _block_products(model: Any, blocks: list[Any], lengths: Lengths) -> list[Product]:
    """Of all layers that are computed in training; ALBERT goes through the same ones again."""
    hidden = model.described.hidden_size
    times = model.described.num_hidden_layers // len(blocks)
    computed = [block for block in blocks for _ in range(times)][model.stored_layers :]
    found = [
        each
        for block in computed
        for each in _layer_products(block, lengths, hidden, is_narrow=False)
    ]
    if computed and model.is_narrow:
        last = _layer_products(blocks[-1], lengths, hidden, is_narrow=True)
        found[-len(last) :] = last
    elif computed and model.predicts_words and model.is_flat:
        _, _, *after = _layer_products(blocks[-1], lengths, hidden, is_narrow=False)
        share = model.read_share
        found[-len(after) :] = [
            replace(each, flops=each.flops * share, trained=each.trained * share) for each in after
        ]
    return found


def _layer_products(block: Any, lengths: Lengths, hidden: int, *, is_narrow: bool) -> list[Product]:
    """`is_narrow`: only first tokens ask, and only they are read afterwards."""
    tokens = float(lengths.sum())
    rows = len(lengths) if is_narrow else float(lengths.sum())
    linear = [
        (set(name.split(".")), name, each)
        for name, each in block.named_modules()
        if isinstance(each, nn.Linear)
    ]
    # Beside LoRA's small matrices a joint product stays whole, and all tokens ask.
    all_ask = not is_narrow or any(
        _JOINT in kinds and not name.endswith(_JOINT) for kinds, name, _ in linear
    )
    inputs = list[Product]()
    others = list[Product]()
    for kinds, name, module in linear:
        # A small matrix of LoRA's second kind reads what the first one made.
        is_input = "lora_B" not in name and not (_QUERIES | _KEYS | {_JOINT}).isdisjoint(kinds)
        if _JOINT in kinds and not all_ask:
            parts = [through(rows, module.weight[:hidden]), through(tokens, module.weight[hidden:])]
        else:
            parts = [
                through(rows if (_KEYS | {_JOINT}).isdisjoint(kinds) else tokens, module.weight)
            ]
        (inputs if is_input else others).extend(parts)
    window = next(
        (each.sliding_window for each in block.modules() if hasattr(each, "sliding_window")), None
    )
    # Pairs of tokens that see each other; so many are the window or more away from the row's first.
    lengths = lengths.astype(np.float64)
    beyond = np.zeros(1) if window is None else np.maximum(lengths - window, 0)
    pairs_B = lengths**2 - beyond * (beyond + 1) if all_ask else lengths - beyond
    return [
        sum(inputs[1:], inputs[0]),
        Product(4.0 * float(pairs_B.sum()) * hidden, is_between=True),
        *others,
    ]
