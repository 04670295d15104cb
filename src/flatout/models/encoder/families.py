"""Families of encoders that run flat: where transformers keeps their weights, and how their heads read tokens.

The names are those of the weights on disk, so they change as seldom as checkpoints do.

Shapes: N tokens or rows, H numbers each, C outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class PostNormNames:
    """Modules of a layer that normalises after each sum, by their names inside the layer; empty: there is none."""

    query: str
    key: str
    value: str
    attention_dropout: str
    out: str
    out_dropout: str
    out_norm: str
    up: str
    down: str
    down_dropout: str
    down_norm: str


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between families."""

    layers: str
    """The list of layers, by its name inside the backbone."""
    names: PostNormNames | None
    """None: layers normalise before each product, and have rotary positions."""
    pool: Callable[[Any, Tensor], Tensor]
    """`[N, H]` states of first tokens to what a classifier reads, with dropout."""
    predict: Callable[[Any, Tensor], Tensor]
    """`[N, H]` states of masked tokens to `[N, V]` logits of the words that stood there."""
    activation: str = "hidden_act"
    """The setting that names the activation between the products."""


_BERT = PostNormNames(
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    attention_dropout="attention.self.dropout",
    out="attention.output.dense",
    out_dropout="attention.output.dropout",
    out_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    down_dropout="output.dropout",
    down_norm="output.LayerNorm",
)
_DISTILBERT = PostNormNames(
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    attention_dropout="attention.dropout",
    out="attention.out_lin",
    out_dropout="",
    out_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    down_dropout="ffn.dropout",
    down_norm="output_layer_norm",
)
_ALBERT = PostNormNames(
    query="attention.query",
    key="attention.key",
    value="attention.value",
    attention_dropout="attention.attention_dropout",
    out="attention.dense",
    out_dropout="attention.output_dropout",
    out_norm="attention.LayerNorm",
    up="ffn",
    down="ffn_output",
    down_dropout="",
    down_norm="full_layer_layer_norm",
)


def _pool_modernbert(net: Any, states_NH: Tensor) -> Tensor:
    return net.classifier(net.drop(net.head(states_NH)))


def classify_tokens(net: Any, states_NH: Tensor) -> Tensor:
    """`[N, C]` logits of tags; all families but ModernBERT have the same head."""
    if net.config.model_type == "modernbert":
        return _pool_modernbert(net, states_NH)
    logits: Tensor = net.classifier(net.dropout(states_NH))
    return logits


def _pool_twice_dropped(activate: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A head that drops before both of its products."""

    def pool(net: Any, states_NH: Tensor) -> Tensor:
        head = net.classifier
        return head.out_proj(head.dropout(activate(head.dense(head.dropout(states_NH)))))

    return pool


def _predict_distilbert(net: Any, states_NH: Tensor) -> Tensor:
    return net.vocab_projector(net.vocab_layer_norm(net.activation(net.vocab_transform(states_NH))))


_ROBERTA = Family(
    "encoder.layer", _BERT, _pool_twice_dropped(torch.tanh), predict=lambda net, states_NH: net.lm_head(states_NH)
)

FLAT_FAMILIES = {
    "albert": Family(
        "encoder.albert_layer_groups",
        _ALBERT,
        pool=lambda net, states_NH: net.classifier(net.dropout(torch.tanh(net.albert.pooler(states_NH)))),
        predict=lambda net, states_NH: net.predictions(states_NH),
    ),
    "bert": Family(
        "encoder.layer",
        _BERT,
        pool=lambda net, states_NH: net.classifier(net.dropout(torch.tanh(net.bert.pooler.dense(states_NH)))),
        predict=lambda net, states_NH: net.cls(states_NH),
    ),
    "camembert": _ROBERTA,
    "distilbert": Family(
        "transformer.layer",
        _DISTILBERT,
        pool=lambda net, states_NH: net.classifier(net.dropout(torch.relu(net.pre_classifier(states_NH)))),
        predict=_predict_distilbert,
        activation="activation",
    ),
    "electra": Family(
        "encoder.layer",
        _BERT,
        _pool_twice_dropped(functional.gelu),
        predict=lambda net, states_NH: net.generator_lm_head(net.generator_predictions(states_NH)),
    ),
    "modernbert": Family(
        "layers",
        None,
        _pool_modernbert,
        predict=lambda net, states_NH: net.decoder(net.head(states_NH)),
        activation="hidden_activation",
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
}
"""Families that run flat, by the name of transformers."""

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

    found: Callable[[Tensor], Tensor] = ACT2FN[name] if isinstance(name, str) else name
    return found
