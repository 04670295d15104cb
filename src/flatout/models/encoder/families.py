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
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Value = TypeVar("Value")
# Reads or makes states with modules of the library's model, or of its backbone, whose names
# differ by family.
Read = Callable[["PreTrainedModel", Tensor], Tensor]
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


def classify_tokens(net: PreTrainedModel, states_NH: Tensor) -> Tensor:
    """`[N, C]` logits of tags; most families have the same head."""
    if net.config.model_type == "modernbert":
        return _read_through("head", "drop", "classifier")(net, states_NH)
    modules = ["dropout", "classifier"] if "dropout" in net._modules else ["classifier"]
    return _read_through(*modules)(net, states_NH)


def _read_through(*steps: str | Activation) -> Read:
    """States through modules of the library's model, each by its dotted name, and functions.

    `_read_through("dense", torch.tanh, "classifier")`: `classifier(tanh(dense(states)))`.
    """

    def read(net: PreTrainedModel, states_NH: Tensor) -> Tensor:
        for step in steps:
            # looked up in each pass, as LoRA replaces modules
            apply = net.get_submodule(step) if isinstance(step, str) else step
            states_NH = apply(states_NH)
        return states_NH

    return read


def _as_first_tokens(states_NH: Tensor) -> Tensor:
    """`[N, 1, H]` rows of one token, for a pooler that takes rows and reads their first token."""
    return states_NH.unsqueeze(1)


def _predict_deberta(net: PreTrainedModel, states_NH: Tensor) -> Tensor:
    if "cls" in net._modules:  # weights in the older format
        return net.get_submodule("cls")(states_NH)
    return net.get_submodule("lm_predictions")(states_NH, net.get_input_embeddings())


def _drop_twice(activate: Activation) -> Read:
    """The head of RoBERTa and ELECTRA: dropout before each of its two linear layers."""
    drop = "classifier.dropout"
    return _read_through(drop, "classifier.dense", activate, drop, "classifier.out_proj")


def _roberta_form(family: str) -> FlatForm:
    return _flat_form(family, pool=_drop_twice(torch.tanh), predict=_read_through("lm_head"))


# by transformers' name of the family, its `model_type`
FLAT_FAMILIES = {
    "albert": _flat_form(
        "albert",
        pool=_read_through("albert.pooler", torch.tanh, "dropout", "classifier"),
        predict=_read_through("predictions"),
    ),
    "bert": _flat_form(
        "bert",
        pool=_read_through("bert.pooler.dense", torch.tanh, "dropout", "classifier"),
        predict=_read_through("cls"),
    ),
    "camembert": _roberta_form("camembert"),
    "deberta-v2": _flat_form(
        "deberta-v2",
        pool=_read_through(_as_first_tokens, "pooler", "dropout", "classifier"),
        predict=_predict_deberta,
    ),
    "distilbert": _flat_form(
        "distilbert",
        pool=_read_through("pre_classifier", torch.relu, "dropout", "classifier"),
        predict=_read_through(
            "vocab_transform", "activation", "vocab_layer_norm", "vocab_projector"
        ),
    ),
    "electra": _flat_form(
        "electra",
        pool=_drop_twice(functional.gelu),
        predict=_read_through("generator_predictions", "generator_lm_head"),
    ),
    "eurobert": _flat_form(
        "eurobert",
        pool=_read_through("dense", "activation", "classifier"),
        predict=_read_through("lm_head"),
        embed=_read_through("embed_tokens"),
    ),
    "modernbert": _flat_form(
        "modernbert",
        pool=_read_through("head", "drop", "classifier"),
        predict=_read_through("head", "decoder"),
        embed=_read_through("embeddings"),
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


def read_setting(config: PretrainedConfig, name: str, otherwise: Value) -> Value:
    """A setting of the library's configuration; `otherwise` where its family has none, or null."""
    value = getattr(config, name, None)
    return otherwise if value is None else value


def why_not_flat(config: PretrainedConfig) -> str:
    """Why an encoder with this configuration of the library cannot run flat; empty where it can."""
    family = config.model_type
    if family not in FLAT_FAMILIES:
        return f"{family} has no flat attention"
    if read_setting(config, "conv_kernel_size", 0):
        return f"{family} with a convolution has no flat layers"
    if read_setting(config, "is_decoder", False):
        return f"{family} has no flat attention as a decoder"
    head_size = read_setting(config, "attention_head_size", 0)
    if head_size and head_size * config.num_attention_heads != config.hidden_size:
        return f"{family} with heads of {head_size} numbers has no flat layers"
    return ""


def missing_part(net: PreTrainedModel, form: FlatForm) -> str:
    """A module or setting that our layers read and this release of transformers does not have.

    Empty where it has all of them, as each release has that `pyproject.toml` allows.
    """
    if not hasattr(net.config, form.activation):
        return form.activation
    modules = dict(net.base_model.named_modules())
    if form.last_norm not in modules:
        return form.last_norm
    layers = list(modules.get(form.layers, nn.Module()).children())
    if not layers:
        return form.layers
    names = WRITTEN["parts"].get(form.layer_kind) or [*filter(None, astuple(form.names))]
    for layer in layers:
        for block in layer._modules.get("albert_layers", nn.ModuleList([layer])).children():
            parts = dict(block.named_modules())
            for name in names:
                if name not in parts:
                    return f"{form.layers}.*.{name}"
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
