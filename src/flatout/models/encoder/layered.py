"""The layers of an encoder: freezing, thawing, rates by depth; LoRA by peft; weights with two
names; counted products.

A weight with two names, such as word embeddings that a head of masked words reads too, is one
parameter. A state holds it once, under the name of the embedding. The exported model of
transformers has both names.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import xxhash
from torch import Tensor, nn

from flatout.errors import UserError, check_settings, require, setting
from flatout.models.contract import Lengths, Network, Product, look_up, through
from flatout.models.encoder.families import FLAT_FAMILIES

_BESIDE_BLOCKS = {"deberta-v2": ("encoder.LayerNorm", "encoder.conv")}
"""What families declare after their layers although it serves the first of them, or all; tables are
found anyway."""
_OF_THE_HEAD = (
    "_name_or_path",
    "id2label",
    "label2id",
    "problem_type",
    "num_labels",
    "transformers_version",
)
"""What of an encoder's own configuration changes nothing below its head."""
_QUERIES = {"query", "q_lin", "q", "q_proj"}  # what families call the layers that make queries
# and those that make keys and values
_KEYS = {"key", "value", "k_lin", "v_lin", "k", "v", "k_proj", "v_proj"}
_JOINT = "Wqkv"  # what makes all three at once


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """Small matrices beside the frozen ones; the head is trained whole."""

    rank: int = setting(
        0, "Rank of the small matrices; 0: none, all weights are trained.", least=0, example="8"
    )
    alpha: float | None = setting(
        None,
        "Their weight, over the rank; null: twice it.",
        above=0,
        example="model.lora.rank=8 model.lora.alpha=16",
    )
    dropout: float = setting(
        0.0, "Dropout rate.", least=0, below=1, example="model.lora.rank=8 model.lora.dropout=0.1"
    )
    targets: list[str] = setting(
        list,
        "Names of the layers that get them; empty: every linear layer of the encoder.",
        example="model.lora.rank=8 model.lora.targets=[query,value]",
    )

    def __post_init__(self) -> None:
        check_settings(self, "model.lora")


class LayeredEncoder(Network, nn.Module):
    """An encoder of transformers whose layers can be frozen, thawed, and trained at rates of their
    own.
    """

    net: Any
    family: str
    described: Any
    is_flat: bool
    # first layers that stay as they are, and whose outputs a batch may bring as its `states`
    stored_layers = 0
    _waiting: list[list[str]]
    _frozen_at_first = 0
    _weights_then = ""

    def blocks(self) -> list[Any]:
        """The encoder's layers, first to last."""
        stacks = [module for module in self.net.modules() if isinstance(module, nn.ModuleList)]
        return list(
            max(
                stacks,
                key=lambda stack: (len(stack), sum(map(Tensor.numel, stack.parameters()))),
                default=[],
            )
        )

    def drop_before_output(self, share: float) -> None:
        """Drop so much in the head, also where a family's configuration has no word for it."""
        found = [module for module in self.head_modules() if isinstance(module, nn.Dropout)]
        require(
            bool(found) or not share,
            "model.head_dropout",
            f"{self.family} drops nothing before its output",
            hint="Leave it out.",
        )
        for module in found:
            module.p = share

    def freeze(self, layers: int, *, embeddings: bool) -> None:
        """Keep the first layers, and the embeddings, as they are."""
        blocks = self.blocks()
        require(
            layers <= len(blocks),
            "model.freeze_layers",
            f"{layers}",
            allowed=f"at most {len(blocks)} layers",
        )
        if layers or embeddings:
            for weight in self._below_blocks():
                weight.requires_grad_(False)
        for block in blocks[:layers]:
            block.requires_grad_(False)

    def wait(self, epochs: float) -> None:
        """Remember what is frozen, to thaw it over these epochs."""
        self.unfreeze_epochs = epochs
        names = {
            id(weight): name for name, weight in self.named_parameters() if not weight.requires_grad
        }
        blocks = [list(block.parameters()) for block in self.blocks()]
        frozen_blocks = [
            [names.pop(id(each)) for each in block]
            for block in reversed(blocks)
            if id(block[0]) in names
        ]
        self._waiting = [*frozen_blocks, *([list(names.values())] if names else [])]
        self._frozen_at_first = len(self._waiting)

    def thaw(self, epochs: float) -> bool:
        """Let frozen layers train as epochs pass, the last first, embeddings last; whether any has
        joined just now.
        """
        if not self._waiting:
            return False
        waited = len(self._waiting)
        weights = dict(self.named_parameters())
        due = self._frozen_at_first * min(1.0, epochs / self.unfreeze_epochs)
        while self._waiting and self._frozen_at_first - len(self._waiting) < int(due):
            for name in self._waiting.pop(0):
                weights[name].requires_grad_(True)
        is_changed = len(self._waiting) < waited
        if is_changed and self.stored_layers:
            self.keep_layers_still(0)
        return is_changed

    def epochs_frozen(self) -> float:
        """Epochs before the first frozen layer joins; infinite where none does."""
        return self.unfreeze_epochs / self._frozen_at_first if self._waiting else math.inf

    def frozen_layers(self) -> int:
        """How many first layers stay as they are, with all that lies below; 0 where rows are
        padded.
        """
        if not self.is_flat or any(weight.requires_grad for weight in self._below_blocks()):
            return 0
        trains = (
            any(weight.requires_grad for weight in layer.parameters()) for layer in self.in_order()
        )
        return sum(1 for _ in itertools.takewhile(operator.not_, trains))

    def keep_layers_still(self, layers: int) -> None:
        """Let the first layers drop nothing, as batches may bring what they answer; 0:
        as before.
        """
        self.stored_layers = layers
        self._weights_then = self.frozen_digest() if layers else ""
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        below = getattr(self.net.base_model, "embeddings", self.net.get_input_embeddings())
        for module in [below, *self.in_order()[: self.stored_layers]] if self.stored_layers else []:
            module.eval()
        return self

    def frozen_digest(self) -> str:
        """Names the content of all frozen weights of the encoder, and how its layers are put
        together.
        """
        described = {
            name: value
            for name, value in self.described.to_dict().items()
            if name not in _OF_THE_HEAD
        }
        digest = xxhash.xxh3_128(json.dumps(described, sort_keys=True, default=str).encode())
        for name, weight in self.net.base_model.named_parameters():
            if not weight.requires_grad:
                digest.update(name.encode())
                digest.update(weight.detach().cpu().contiguous().numpy())
        return digest.hexdigest()

    def depths(self) -> dict[str, int]:
        """How many layers lie above each weight: 0 for the head, most for the embeddings."""
        blocks = self.blocks()
        depth = dict.fromkeys(map(id, self._below_blocks()), len(blocks) + 1)
        depth |= {
            id(weight): above
            for above, block in enumerate(blocks[::-1], 1)
            for weight in block.parameters()
        }
        return {name: depth.get(id(weight), 0) for name, weight in self.named_parameters()}

    def in_order(self) -> list[Any]:
        """The layers as tokens go through them; ALBERT's come again and again."""
        layers = list(self.net.base_model.get_submodule(FLAT_FAMILIES[self.family].layers))
        if self.family != "albert":
            return layers
        times = self.described.num_hidden_layers
        return [layers[int(number / (times / len(layers)))] for number in range(times)]

    def head_modules(self) -> list[nn.Module]:
        """What is no part of the backbone; some families declare it first."""
        backbone = set(self.net.base_model.modules())
        return [module for module in self.net.modules() if module not in backbone]

    def _below_blocks(self) -> list[nn.Parameter]:
        """The embeddings: what a row meets before the first layer, and tables outside of them that
        all layers read.
        """
        blocks = self.blocks()
        late = _BESIDE_BLOCKS.get(self.family, ())
        in_blocks = {id(module) for block in blocks for module in block.modules()}
        found = list[nn.Parameter]()
        is_below = bool(blocks)
        for name, module in self.net.base_model.named_modules():
            is_below = is_below and module is not blocks[0]
            if id(module) not in in_blocks and (
                is_below or isinstance(module, nn.Embedding) or name.startswith(late)
            ):
                found += module.parameters(recurse=False)
        return found


def require_same_weights(model: Any, _: Any) -> None:
    """Refuse weights under which stored outputs of frozen layers would be those of
    another encoder.
    """
    is_same = not model.stored_layers or model.frozen_digest() == model._weights_then
    require(
        is_same,
        "model.reuse",
        "the frozen weights loaded here are not those whose outputs are stored",
        hint="Set model.reuse=false, or model.pretrained to the encoder of before.",
    )


def keep_tied_once(model: nn.Module) -> None:
    """Leave other names of a weight out of the model's state, and give all of them its value when
    it is loaded.
    """
    if aliases := _aliases(model):
        vars(model)["aliases"] = aliases
        model.register_state_dict_post_hook(_leave_out)
        model.register_load_state_dict_pre_hook(_put_in)


def _aliases(model: nn.Module) -> dict[str, str]:
    """For each other name of a weight the one that is kept: an embedding's, else the first."""
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    tables = {
        f"{name}.weight" for name, each in model.named_modules() if isinstance(each, nn.Embedding)
    }
    found: dict[str, str] = {}
    for group in names.values():
        kept = next((name for name in group if name in tables), group[0])
        found |= {name: kept for name in group if name != kept}
    return found


def _leave_out(model: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for name in model.aliases:
        state.pop(prefix + name, None)


def _put_in(model: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for name, kept in model.aliases.items():
        if prefix + name in state:  # a running mean of the weights goes by their first name
            state[prefix + kept] = state[prefix + name]
        elif prefix + kept in state:
            state[prefix + name] = state[prefix + kept]


def add_lora(net: Any, config: LoraConfig) -> None:
    """Put the matrices into an encoder in place; everything but them and the head is frozen."""
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model

        # the linear layer of GPT-2, its matrix turned round
        from transformers.pytorch_utils import Conv1D
    except ImportError:
        raise UserError(
            "model.lora.rank",
            "needs the package peft",
            hint="Install it with pip install 'flatout[lora]'.",
        ) from None
    backbone = net.base_model
    modules = list(backbone.named_modules())
    linear = [name for name, module in modules if isinstance(module, nn.Linear | Conv1D)]
    targets = config.targets or linear
    tables = [
        f".{name}" for name, each in modules if getattr(getattr(each, "weight", 0), "ndim", 0) == 2
    ]
    is_there = all(any(name.endswith(f".{each}") for name in tables) for each in targets)
    allowed = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
    require(is_there, "model.lora.targets", f"no layer named {', '.join(targets)}", allowed=allowed)
    alpha: Any = 2 * config.rank if config.alpha is None else config.alpha
    backbone.requires_grad_(False)
    is_turned = any(isinstance(each, Conv1D) for _, each in modules)
    how: dict[str, Any] = {
        "lora_dropout": config.dropout,
        "target_modules": targets,
        "fan_in_fan_out": is_turned,
    }
    made = PeftConfig(r=config.rank, lora_alpha=alpha, **how)
    inject_adapter_in_model(made, backbone)


def merge_lora(net: Any) -> None:
    """Add the trained matrices to the ones they stand beside, so that the model is a plain one
    again.
    """
    from peft.tuners.lora import LoraLayer

    for name, module in list(net.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            parent, _, own = name.rpartition(".")
            setattr(net.get_submodule(parent), own, module.get_base_layer())


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
