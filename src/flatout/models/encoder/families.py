"""Families of encoders that run flat: where transformers keeps their weights, and how their heads
read tokens.

The names are those of the weights on disk, so they change as seldom as checkpoints do.

Shapes: N tokens or rows, H numbers each, C outputs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class PostNormNames:
    """Modules of a layer that normalises after each sum, by their names; what is not named has
    BERT's name.
    """

    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    attention_dropout: str = "attention.self.dropout"
    out: str = "attention.output.dense"
    out_dropout: str = "attention.output.dropout"
    out_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    down_dropout: str = "output.dropout"
    down_norm: str = "output.LayerNorm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What differs between families."""

    layers: str = "encoder.layer"  # the list of layers, by its name inside the backbone
    # read by layers that normalise after each sum, and by no others
    names: PostNormNames = PostNormNames()
    # `[N, H]` states of first tokens to what a classifier reads, with dropout
    pool: Callable[[Any, Tensor], Tensor]
    # `[N, H]` states of masked tokens to `[N, V]` logits of their words
    predict: Callable[[Any, Tensor], Tensor]
    activation: str = "hidden_act"  # the setting that names the activation between the products
    last_norm: str = ""  # the norm after the last layer; empty: there is none
    kind: str = "post_norm"  # which of our layers takes the place of the library's
    embed: Callable[[Any, Tensor], Tensor] | None = None
    """States of tokens before the first layer, by the backbone; None: word, place and text of a
    pair add up."""


WRITTEN = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
_KNOWN = {
    family: {**known, "names": PostNormNames(**WRITTEN["names"].get(family, {}))}
    for family, known in WRITTEN["families"].items()
}


def _pool_modernbert(net: Any, states_NH: Tensor) -> Tensor:
    return net.classifier(net.drop(net.head(states_NH)))


def classify_tokens(net: Any, states_NH: Tensor) -> Tensor:
    """`[N, C]` logits of tags; most families have the same head."""
    if net.config.model_type == "modernbert":
        return _pool_modernbert(net, states_NH)
    return net.classifier(net.dropout(states_NH) if hasattr(net, "dropout") else states_NH)


def _drop_twice(activate: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def pool(net: Any, states_NH: Tensor) -> Tensor:
        head = net.classifier
        return head.out_proj(head.dropout(activate(head.dense(head.dropout(states_NH)))))

    return pool


_ROBERTA = Family(
    pool=_drop_twice(torch.tanh), predict=lambda net, states_NH: net.lm_head(states_NH)
)
FLAT_FAMILIES = {
    "albert": Family(
        **_KNOWN["albert"],
        pool=lambda net, states_NH: net.classifier(
            net.dropout(torch.tanh(net.albert.pooler(states_NH)))
        ),
        predict=lambda net, states_NH: net.predictions(states_NH),
    ),
    "bert": Family(
        pool=lambda net, states_NH: net.classifier(
            net.dropout(torch.tanh(net.bert.pooler.dense(states_NH)))
        ),
        predict=lambda net, states_NH: net.cls(states_NH),
    ),
    "camembert": _ROBERTA,
    "deberta-v2": Family(
        **_KNOWN["deberta-v2"],
        pool=lambda net, states_NH: net.classifier(net.dropout(net.pooler(states_NH.unsqueeze(1)))),
        predict=lambda net, x_NH: (
            net.cls(x_NH) if net.legacy else net.lm_predictions(x_NH, net.get_input_embeddings())
        ),
    ),
    "distilbert": Family(
        **_KNOWN["distilbert"],
        pool=lambda net, states_NH: net.classifier(
            net.dropout(torch.relu(net.pre_classifier(states_NH)))
        ),
        predict=lambda net, x_NH: net.vocab_projector(
            net.vocab_layer_norm(net.activation(net.vocab_transform(x_NH)))
        ),
    ),
    "electra": Family(
        pool=_drop_twice(functional.gelu),
        predict=lambda net, states_NH: net.generator_lm_head(net.generator_predictions(states_NH)),
    ),
    "eurobert": Family(
        **_KNOWN["eurobert"],
        pool=lambda net, states_NH: net.classifier(net.activation(net.dense(states_NH))),
        predict=lambda net, states_NH: net.lm_head(states_NH),
        embed=lambda backbone, tokens_T: backbone.embed_tokens(tokens_T),
    ),
    "modernbert": Family(
        **_KNOWN["modernbert"],
        pool=_pool_modernbert,
        predict=lambda net, states_NH: net.decoder(net.head(states_NH)),
        embed=lambda backbone, tokens_T: backbone.embeddings(tokens_T),
    ),
    "mpnet": replace(_ROBERTA, **_KNOWN["mpnet"]),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
}


def why_not_flat(config: Any) -> str:
    """Why an encoder cannot run flat; empty where it can."""
    if config.model_type not in FLAT_FAMILIES:
        return f"{config.model_type} has no flat attention"
    if getattr(config, "conv_kernel_size", 0):
        return f"{config.model_type} with a convolution has no flat layers"
    if getattr(config, "is_decoder", False):
        return f"{config.model_type} has no flat attention as a decoder"
    heads = getattr(config, "attention_head_size", None)
    if heads is not None and heads * config.num_attention_heads != config.hidden_size:
        return f"{config.model_type} with heads of {heads} numbers has no flat layers"
    return ""


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": lambda values: functional.gelu(values, approximate="tanh"),
    "gelu_pytorch_tanh": lambda values: functional.gelu(values, approximate="tanh"),
    "relu": torch.relu,
    "silu": functional.silu,
}


def activation_of(name: Any) -> Callable[[Tensor], Tensor]:
    """An activation by the name that configurations use; the usual ones are one kernel each."""
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name]
    from transformers.activations import ACT2FN

    return ACT2FN[name] if isinstance(name, str) else name
