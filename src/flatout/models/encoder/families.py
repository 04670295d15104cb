"""Families of encoders in transformers (BERT, DeBERTa, ...): what is special about each of them.

Each family has one record, `Family`. `family_of(name)` gives it; families not listed here have the
defaults. Families that run flat (nothing padded) also have a `FlatForm`: where the library keeps
their weights, and how their heads read tokens. Plain values stand in `families.toml`; what is code
stands here. To support another family, or to correct one, change its rows in these two files.

Names of modules are those of the weights on disk, so they change as seldom as checkpoints do.

Shapes: N tokens or rows, H numbers each, C outputs, V words.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Reads or makes states with modules of the library's model, or of its backbone, whose classes
# differ by family.
Read = Callable[[Any, Tensor], Tensor]
Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PostNormNames:
    """Names of the modules in a layer that normalises after each sum; the defaults are BERT's.

    An empty name says that the family has no such module.
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
class FlatForm:
    """How a family runs flat: where its parts are in the library's model, and how its heads read.

    The defaults are BERT's.
    """

    layers: str = "encoder.layer"  # name of the list of layers inside the backbone
    layer_kind: str = "post_norm"  # which of our layers takes the place of the library's
    names: PostNormNames = PostNormNames()  # only layers of the kind `post_norm` read them
    activation: str = "hidden_act"  # the setting that names the activation between the products
    last_norm: str = ""  # name of the norm after the last layer; empty: there is none
    # `[N, H]` states of first tokens to `[N, C]` logits, with the head's dropout
    pool: Read
    # `[N, H]` states of masked tokens to `[N, V]` logits of their words
    predict: Read
    # Tokens to their states before the first layer. None: as in BERT, the vectors of word, position
    # and text of a pair are added.
    embed: Read | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What is special about a family, however its batches are laid out; the defaults are common."""

    flat: FlatForm | None = None  # None: the family cannot run flat, its batches are padded
    # It tells the two texts of a pair apart by a number beside each token (0 or 1). Families not
    # listed do so where they have a table for it.
    numbers_pairs: bool = False
    # Its code hides padding by a number that sixteen bits cannot hold, so it fails under autocast.
    needs_fp32: bool = False
    # Its answer to a row depends on the padding beside it, so rows of one length go together.
    reads_padding: bool = False
    # It adds to the mask that it gets, as decoders do, so a finished mask would be taken for all.
    masks_itself: bool = False
    has_windows: bool = False  # some layers see only a window of tokens around each token
    repeats_layers: bool = False  # tokens go through the same few layers again and again
    is_counted: bool = True  # whether linear layers and plain attention are all that it multiplies
    # Modules that it declares after its layers although several layers read them. They belong to
    # the embeddings when layers are frozen.
    read_by_all_layers: tuple[str, ...] = ()


WRITTEN = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))


def _flat_form(family: str, *, pool: Read, predict: Read, embed: Read | None = None) -> FlatForm:
    """The form of a family: its rows of the table, with the code that reads for its heads."""
    names = PostNormNames(**WRITTEN["names"].get(family, {}))
    values = WRITTEN["flat"].get(family, {})
    return FlatForm(names=names, pool=pool, predict=predict, embed=embed, **values)


def classify_tokens(net: Any, states_NH: Tensor) -> Tensor:
    """`[N, C]` logits of tags; most families have the same head."""
    if net.config.model_type == "modernbert":
        return _pool_modernbert(net, states_NH)
    return net.classifier(net.dropout(states_NH) if hasattr(net, "dropout") else states_NH)


def _pool_albert(net: Any, states_NH: Tensor) -> Tensor:
    pooled_NH = torch.tanh(net.albert.pooler(states_NH))
    return net.classifier(net.dropout(pooled_NH))


def _pool_bert(net: Any, states_NH: Tensor) -> Tensor:
    pooled_NH = torch.tanh(net.bert.pooler.dense(states_NH))
    return net.classifier(net.dropout(pooled_NH))


def _pool_deberta(net: Any, states_NH: Tensor) -> Tensor:
    # its pooler takes whole rows and reads their first token
    pooled_NH = net.pooler(states_NH.unsqueeze(1))
    return net.classifier(net.dropout(pooled_NH))


def _predict_deberta(net: Any, states_NH: Tensor) -> Tensor:
    if net.legacy:
        return net.cls(states_NH)
    return net.lm_predictions(states_NH, net.get_input_embeddings())


def _pool_distilbert(net: Any, states_NH: Tensor) -> Tensor:
    pooled_NH = torch.relu(net.pre_classifier(states_NH))
    return net.classifier(net.dropout(pooled_NH))


def _predict_distilbert(net: Any, states_NH: Tensor) -> Tensor:
    hidden_NH = net.activation(net.vocab_transform(states_NH))
    return net.vocab_projector(net.vocab_layer_norm(hidden_NH))


def _pool_eurobert(net: Any, states_NH: Tensor) -> Tensor:
    return net.classifier(net.activation(net.dense(states_NH)))


def _pool_modernbert(net: Any, states_NH: Tensor) -> Tensor:
    return net.classifier(net.drop(net.head(states_NH)))


def _drop_twice(activate: Activation) -> Read:
    """The head of RoBERTa and ELECTRA: dropout before each of its two linear layers."""

    def pool(net: Any, states_NH: Tensor) -> Tensor:
        head = net.classifier
        hidden_NH = activate(head.dense(head.dropout(states_NH)))
        return head.out_proj(head.dropout(hidden_NH))

    return pool


def _roberta_form(family: str) -> FlatForm:
    return _flat_form(
        family,
        pool=_drop_twice(torch.tanh),
        predict=lambda net, states_NH: net.lm_head(states_NH),
    )


# by transformers' name of the family, its `model_type`
FLAT_FAMILIES = {
    "albert": _flat_form(
        "albert",
        pool=_pool_albert,
        predict=lambda net, states_NH: net.predictions(states_NH),
    ),
    "bert": _flat_form(
        "bert",
        pool=_pool_bert,
        predict=lambda net, states_NH: net.cls(states_NH),
    ),
    "camembert": _roberta_form("camembert"),
    "deberta-v2": _flat_form("deberta-v2", pool=_pool_deberta, predict=_predict_deberta),
    "distilbert": _flat_form("distilbert", pool=_pool_distilbert, predict=_predict_distilbert),
    "electra": _flat_form(
        "electra",
        pool=_drop_twice(functional.gelu),
        predict=lambda net, states_NH: net.generator_lm_head(net.generator_predictions(states_NH)),
    ),
    "eurobert": _flat_form(
        "eurobert",
        pool=_pool_eurobert,
        predict=lambda net, states_NH: net.lm_head(states_NH),
        embed=lambda backbone, tokens_T: backbone.embed_tokens(tokens_T),
    ),
    "modernbert": _flat_form(
        "modernbert",
        pool=_pool_modernbert,
        predict=lambda net, states_NH: net.decoder(net.head(states_NH)),
        embed=lambda backbone, tokens_T: backbone.embeddings(tokens_T),
    ),
    "mpnet": _roberta_form("mpnet"),
    "roberta": _roberta_form("roberta"),
    "xlm-roberta": _roberta_form("xlm-roberta"),
}


def _read_family(name: str) -> Family:
    """The record of a family from its rows of the table."""
    values = dict(WRITTEN["families"].get(name, {}))
    late_modules = tuple(values.pop("read_by_all_layers", ()))
    return Family(flat=FLAT_FAMILIES.get(name), read_by_all_layers=late_modules, **values)


_FAMILIES = {name: _read_family(name) for name in {**FLAT_FAMILIES, **WRITTEN["families"]}}
_NOT_LISTED = Family()


def family_of(name: str) -> Family:
    """The record of a family by transformers' name for it (`model_type`)."""
    return _FAMILIES.get(name, _NOT_LISTED)


def why_not_flat(config: Any) -> str:
    """Why an encoder with this configuration of the library cannot run flat; empty where it can."""
    if config.model_type not in FLAT_FAMILIES:
        return f"{config.model_type} has no flat attention"
    if getattr(config, "conv_kernel_size", 0):
        return f"{config.model_type} with a convolution has no flat layers"
    if getattr(config, "is_decoder", False):
        return f"{config.model_type} has no flat attention as a decoder"
    head_size = getattr(config, "attention_head_size", None)
    if head_size is not None and head_size * config.num_attention_heads != config.hidden_size:
        return f"{config.model_type} with heads of {head_size} numbers has no flat layers"
    return ""


_ACTIVATIONS: dict[str, Activation] = {
    "gelu": functional.gelu,
    "gelu_new": lambda values: functional.gelu(values, approximate="tanh"),
    "gelu_pytorch_tanh": lambda values: functional.gelu(values, approximate="tanh"),
    "relu": torch.relu,
    "silu": functional.silu,
}


def activation_of(name: str | Activation) -> Activation:
    """An activation by the name that configurations use; they may also hold the function itself."""
    if not isinstance(name, str):
        return name
    # The usual ones are one kernel each; the library's classes for some of them are several.
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name]
    from transformers.activations import ACT2FN

    return ACT2FN[name]
