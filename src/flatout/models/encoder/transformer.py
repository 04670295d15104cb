"""Any encoder of transformers, run over flat batches: not one padded token where the family allows it.

The model is the library's own `AutoModelForSequenceClassification` or `AutoModelForTokenClassification`, so its weights
load from and save to the plain classes. It is given `[1, T]` tokens, positions that start anew with each row, and an
attention function that keeps the rows apart (`flat_attention`). Where a head reads a row's first token it would find
only the first of the whole batch; so, just before the head, the first token of every row is put in the rows' place.

Families that cannot be run so are given padded rows of like length, and the run says that they are.

Shapes: T tokens, B rows, L longest row, C outputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from flatout.errors import UserError, as_choice, did_you_mean, require
from flatout.models.encoder.lora import LoraConfig, add_lora
from flatout.models.flops import Lengths, Product, between, look_up, through, training_flops
from flatout.models.lean import make_lean

if TYPE_CHECKING:
    from flatout.data.batches.flat_batch import FlatBatch

FLAT_FAMILIES = {
    "albert": "albert.encoder",
    "bert": "bert.encoder",
    "camembert": "roberta.encoder",
    "distilbert": "distilbert.transformer",
    "electra": "electra.encoder",
    "modernbert": "model",
    "roberta": "roberta.encoder",
    "xlm-roberta": "roberta.encoder",
}
"""Families that run flat, and the module after which a head begins to read rows."""
_POSITIONS_AFTER_PADDING = {"camembert", "roberta", "xlm-roberta"}
"""Families that number a row's places from the padding id plus one."""
_NUMBERED_PAIRS = {"albert", "bert", "electra", "deberta-v2", "deberta"}
"""Families that tell the texts of a pair apart by numbers beside the tokens; others do where they have a table."""
_NARROW_FAMILIES = {"bert", "camembert", "electra", "roberta", "xlm-roberta"}
"""Families whose layers end in a feed-forward part; in the last layer only a row's first token needs it."""
_COUNTED_FAMILIES = {*FLAT_FAMILIES, "mpnet"}
"""Families whose layers are linear layers and plain attention, so that their operations can be counted."""
_BESIDE_BLOCKS = {"deberta-v2": ("encoder.LayerNorm", "encoder.conv")}
"""What families declare after their layers although it serves the first of them, or all; tables are found anyway."""
_ATTENTION_INPUTS = {"query", "key", "value", "q_lin", "k_lin", "v_lin", "q", "k", "v", "Wqkv"}
"""What families call the layers that make queries, keys and values."""
_SIZES = {
    "distilbert": {"hidden": "dim", "layers": "n_layers", "heads": "n_heads", "intermediate": "hidden_dim"},
}
_DROPOUTS = {
    "dropout": ("hidden_dropout_prob", "dropout", "embedding_dropout", "mlp_dropout"),
    "attention_dropout": ("attention_probs_dropout_prob", "attention_dropout"),
    "head_dropout": ("classifier_dropout", "seq_classif_dropout", "classifier_dropout_prob", "pooler_dropout"),
}
"""Settings of ours, and what families call them."""
_CODE = ("auto_map", "attn_implementation", "experts_implementation", "quantization_config", "use_kernels")
"""Settings of an encoder's own configuration that can name code to be fetched and run."""


class Compute(StrEnum):
    """Whether an encoder runs over flat batches; auto: wherever its family can."""

    auto = "auto"
    flat = "flat"
    padded = "padded"


@dataclass(kw_only=True, slots=True)
class TransformerConfig:
    """An encoder of transformers, from pretrained weights or from random ones."""

    recommended_clip: ClassVar[float] = 1.0

    pretrained: str | None = None
    """Local folder, or name of the cache or the Hub; null: random weights."""
    family: str = "bert"
    """Kind of encoder for random weights, by transformers' name: bert, roberta, modernbert, ..."""
    hidden: int = 128
    """Numbers a token, for random weights."""
    layers: int = 2
    """Layers, for random weights."""
    heads: int = 4
    """Attention heads a layer, for random weights."""
    intermediate: int | None = None
    """Width of the feed-forward layers, for random weights; null: four times `hidden`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further settings of the encoder's own configuration, by their names there."""
    compute: Compute = Compute.auto
    """Flat (nothing padded) or padded batches; auto: flat wherever the family can."""
    dropout: float | None = None
    """Share dropped from embeddings and after each sub-layer; null: as the encoder has it."""
    attention_dropout: float | None = None
    """Share of attention dropped; null: as the encoder has it. Flat attention on a GPU drops none."""
    head_dropout: float | None = None
    """Share dropped before the output; null: as the encoder has it."""
    freeze_embeddings: bool = False
    """Whether the embeddings stay as they are."""
    freeze_layers: int = 0
    """Layers, from the first on, that stay as they are; the embeddings stay too."""
    unfreeze_epochs: float = 0.0
    """Epochs over which frozen layers join the training, from the last to the first; 0: frozen ones stay frozen."""
    gradient_checkpointing: bool = False
    """Whether activations are computed anew in the backward pass: less memory, about a third more time."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Train small matrices beside the frozen ones."""

    @property
    def recommended_lr(self) -> float:
        """Pretrained weights want small steps; small matrices beside them, and random ones, larger."""
        return 5e-5 if self.pretrained is not None and not self.lora.rank else 1e-3

    def __post_init__(self) -> None:
        self.compute = as_choice(Compute, self.compute, "model.compute")
        for name in ("hidden", "layers", "heads"):
            require(getattr(self, name) >= 1, f"model.{name}", f"{getattr(self, name)}", allowed="1 or more")
        require(
            self.hidden % self.heads == 0, "model.hidden", f"{self.hidden}", allowed=f"a multiple of {self.heads} heads"
        )
        for name in ("dropout", "attention_dropout", "head_dropout"):
            share = getattr(self, name)
            require(share is None or 0 <= share < 1, f"model.{name}", f"{share}", allowed="0 to below 1, or null")
        for name in ("freeze_layers", "unfreeze_epochs"):
            require(getattr(self, name) >= 0, f"model.{name}", f"{getattr(self, name)}", allowed="0 or more")
        is_frozen = self.freeze_layers > 0 or not self.unfreeze_epochs
        require(is_frozen, "model.unfreeze_epochs", "nothing is frozen", hint="Set model.freeze_layers=N.")
        is_one_way = not (self.lora.rank and (self.freeze_layers or self.freeze_embeddings))
        what = f"{self.lora.rank} with model.freeze_layers or model.freeze_embeddings"
        allowed = "beside small matrices the whole encoder is frozen"
        require(is_one_way, "model.lora.rank", what, allowed=allowed, hint="Leave out the one or the other.")

    def build(
        self, outputs: Outputs, *, vocabulary_size: int, padding_id: int, separator_id: int | None
    ) -> Transformer:
        """The encoder with a head for these outputs, ready to train."""
        described = self._described()
        self._set(described, outputs, vocabulary_size, padding_id)
        model = Transformer(self._weighted(described, outputs), outputs.is_tagging, self.compute, separator_id)
        if self.head_dropout is not None:
            model.drop_before_output(self.head_dropout)
        if self.lora.rank:
            add_lora(model.net, self.lora)
        else:
            model.freeze(self.freeze_layers, embeddings=self.freeze_embeddings)
        if self.unfreeze_epochs:
            model.wait(self.unfreeze_epochs)
        if self.gradient_checkpointing:
            can = model.net.supports_gradient_checkpointing
            what = f"{model.family} cannot compute its activations anew"
            require(can, "model.gradient_checkpointing", what, hint="Leave it out, or set a smaller data.batch_size.")
            enable = getattr(model.net, "activation_checkpointing_enable", model.net.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
        return model.train()  # from_pretrained gives what is meant to answer, without dropout

    def rebuild(self, outputs: Outputs, described: dict[str, Any], separator_id: int | None) -> Transformer:
        """The encoder that a run saved, without weights: `described` is what its own configuration was."""
        kept = dict(described)
        _require_no_code(kept, "encoder.json")
        config = _config_class(kept.pop("model_type"))(**kept)
        model = Transformer(_auto_class(outputs).from_config(config), outputs.is_tagging, self.compute, separator_id)
        if self.lora.rank:
            add_lora(model.net, self.lora)
        return model

    def _described(self) -> Any:
        """The encoder's own configuration."""
        if self.pretrained is not None:
            from transformers import AutoConfig

            from flatout.data.tables.hub import fetched

            name = self.pretrained
            found = fetched(name, "model.pretrained", lambda: AutoConfig.from_pretrained(name, trust_remote_code=False))
            _require_no_code(vars(found), f"model.pretrained: {name}")
            return found
        names = {"hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
        names |= {"intermediate": "intermediate_size"} | _SIZES.get(self.family, {})
        sizes = {"hidden": self.hidden, "layers": self.layers, "heads": self.heads}
        sizes["intermediate"] = self.intermediate or 4 * self.hidden
        extra = {"embedding_size": self.hidden} if self.family in ("electra", "albert") else {}
        return _config_class(self.family)(**{names[name]: size for name, size in sizes.items()}, **extra)

    def _set(self, described: Any, outputs: Outputs, vocabulary_size: int, padding_id: int) -> None:
        for key, names in _DROPOUTS.items():
            share = getattr(self, key)
            taken = [name for name in names if share is not None and hasattr(described, name)]
            is_taken = share is None or bool(taken) or key == "head_dropout"  # of which the head's own modules are told
            require(is_taken, f"model.{key}", f"{described.model_type} has no such share", hint="Leave it out.")
            for name in taken:
                setattr(described, name, share)
        _require_no_code(self.settings, "model.settings")
        for name, value in self.settings.items():
            if not hasattr(described, name):
                hint = did_you_mean(name, list(described.to_dict()))
                raise UserError(f"model.settings.{name}", f"no setting of {described.model_type}", hint=hint)
            setattr(described, name, value)
        if self.pretrained is None:
            described.vocab_size, described.pad_token_id = vocabulary_size, padding_id
            for name in ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"):
                if hasattr(described, name):
                    setattr(described, name, None)
        outputs.tell(described)

    def _weighted(self, described: Any, outputs: Outputs) -> Any:
        """The library's model, with the weights of the folder or with random ones."""
        auto = _auto_class(outputs)
        if self.pretrained is None:
            return auto.from_config(described)
        from transformers.utils import logging

        from flatout.data.tables.hub import fetched

        before = logging.get_verbosity()
        logging.set_verbosity_error()  # that the head is new is no news
        logging.disable_progress_bar()
        try:
            return fetched(
                self.pretrained,
                "model.pretrained",
                lambda: auto.from_pretrained(
                    self.pretrained,
                    config=described,
                    dtype=torch.float32,
                    ignore_mismatched_sizes=True,
                    trust_remote_code=False,
                    weights_only=True,
                ),
            )
        finally:
            logging.set_verbosity(before)


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the outputs of a head mean."""

    names: Sequence[str]
    kind: str
    """single, multi, regression or tags."""

    @property
    def is_tagging(self) -> bool:
        return self.kind == "tags"

    def tell(self, described: Any) -> None:
        """Write the outputs into an encoder's configuration, as transformers knows them."""
        described.num_labels = len(self.names)
        described.id2label = dict(enumerate(self.names))
        described.label2id = {name: number for number, name in enumerate(self.names)}
        kinds = {"single": "single_label_classification", "multi": "multi_label_classification"}
        described.problem_type = None if self.is_tagging else kinds.get(self.kind, "regression")


class Transformer(nn.Module):
    """An encoder and its head, over flat or padded batches; tags are answered token by token."""

    net: Any

    def __init__(self, net: Any, is_tagging: bool, compute: Compute, separator_id: int | None) -> None:
        super().__init__()
        self.net, self.is_tagging, self.separator_id = net, is_tagging, separator_id
        self.described: Any = net.config
        self.family: str = net.config.model_type
        self.unfreeze_epochs = 0.0
        self._waiting: list[list[str]] = []
        self._frozen_at_first = 0
        can_be_flat = self.family in FLAT_FAMILIES
        if compute is Compute.flat and not can_be_flat:
            allowed = ", ".join(FLAT_FAMILIES)
            raise UserError("model.compute", f"{self.family} cannot run flat", allowed=allowed, hint="Set it to auto.")
        self.is_flat = can_be_flat and compute is not Compute.padded
        self.layout = "flat" if self.is_flat else "padded"
        self.padding_id: int = net.config.pad_token_id or 0
        self.first_position = self.padding_id + 1 if self.family in _POSITIONS_AFTER_PADDING else 0
        is_typed = not can_be_flat and (getattr(net.config, "type_vocab_size", 0) or 0) > 1
        self._numbers_pairs = separator_id is not None and (self.family in _NUMBERED_PAIRS or is_typed)
        if self.is_flat:
            from flatout.models.encoder.flat_attention import NAME

            net.set_attn_implementation(NAME)
            if not is_tagging:
                self._before_head().register_forward_hook(_rows_for_tokens, with_kwargs=True)
                if self.family in _NARROW_FAMILIES:
                    self.blocks()[-1].attention.register_forward_hook(_first_tokens, with_kwargs=True)
        else:
            _use_plain_attention(net)
        make_lean(net)

    @property
    def why_padded(self) -> str:
        """Why batches are padded; empty where they are not."""
        if self.is_flat:
            return ""
        return "asked for" if self.family in FLAT_FAMILIES else f"{self.family} has no flat attention"

    @property
    def attention_dropout(self) -> float:
        """Share of attention that the encoder's own settings drop."""
        return max((getattr(self.described, name, None) or 0.0 for name in _DROPOUTS["attention_dropout"]), default=0.0)

    def longest_row(self) -> int:
        """Most tokens a row may have."""
        most = getattr(self.described, "max_position_embeddings", None)
        return int(most) - self.first_position if most and most > 0 else 2**31 - 1

    def forward(self, batch: FlatBatch) -> Tensor:
        """`[B, C]`, or `[T, C]` for tags."""
        return self._flat(batch) if self.is_flat else self._padded(batch)

    def computed_tokens(self, batch: FlatBatch) -> int:
        """Tokens computed for a batch, padding included."""
        return batch.num_tokens if self.is_flat else batch.longest() * batch.num_rows

    def products(self, lengths: Lengths) -> list[Product]:
        """A token meets the weights of every layer (2 N forwards) and, in attention, each token of its row (4 L H T).

        The head, and in families of BERT's kind the last feed-forward part, see rows. Empty where a family has
        products of its own kind.
        """
        if self.family not in _COUNTED_FAMILIES or getattr(self.described, "inner_group_num", 1) != 1:
            return []
        tokens, blocks = float(lengths.sum()), self.blocks()
        in_blocks = {id(module) for block in blocks for module in block.modules()}
        backbone = list(self.net.base_model.modules())
        found, below = [look_up(self.net.get_input_embeddings().weight)], True
        for module in [*backbone, *self._head()]:
            if module is blocks[0]:
                found += self._block_products(blocks, lengths)
                below = False
            elif isinstance(module, nn.Linear) and id(module) not in in_blocks:
                found.append(through(tokens if below or self.is_tagging else len(lengths), module.weight))
        return found

    def _block_products(self, blocks: list[Any], lengths: Lengths) -> list[Product]:
        """Of all layers; ALBERT goes through the same ones again."""
        tokens, rows = float(lengths.sum()), len(lengths)
        found: list[Product] = []
        is_narrow = self.is_flat and not self.is_tagging and self.family in _NARROW_FAMILIES
        for block in blocks:
            inputs: list[Product] = []
            others: list[Product] = []
            ends_in_rows = is_narrow and block is blocks[-1]
            for name, module in block.named_modules():
                if not isinstance(module, nn.Linear):
                    continue
                of_rows = ends_in_rows and not name.startswith("attention.")
                part = through(rows if of_rows else tokens, module.weight)
                is_input = not _ATTENTION_INPUTS.isdisjoint(name.split("."))
                # A small matrix of LoRA's second kind reads what the first one made.
                (inputs if is_input and "lora_B" not in name else others).append(part)
            window = next((each.sliding_window for each in block.modules() if hasattr(each, "sliding_window")), None)
            attention = between(4.0 * _pairs(lengths, window) * self.described.hidden_size)
            products = [sum(inputs[1:], inputs[0]), attention, *others]
            found += products * (self.described.num_hidden_layers // len(blocks))
        return found

    def training_flops(self, lengths: Lengths) -> float | None:
        """Operations of a training step on rows of these lengths; None for families that are not counted."""
        return training_flops(self.products(lengths)) or None

    def blocks(self) -> list[Any]:
        """The encoder's layers, first to last."""
        stacks = [module for module in self.net.modules() if isinstance(module, nn.ModuleList)]
        return list(max(stacks, key=lambda stack: (len(stack), _size(stack)), default=[]))

    def drop_before_output(self, share: float) -> None:
        """Drop so much in the head, also where a family's configuration has no word for it."""
        found = [module for module in self._head() if isinstance(module, nn.Dropout)]
        what = f"{self.family} drops nothing before its output"
        require(bool(found) or not share, "model.head_dropout", what, hint="Leave it out.")
        for module in found:
            module.p = share

    def freeze(self, layers: int, *, embeddings: bool) -> None:
        """Keep the first layers, and the embeddings, as they are."""
        blocks = self.blocks()
        require(layers <= len(blocks), "model.freeze_layers", f"{layers}", allowed=f"at most {len(blocks)} layers")
        if layers or embeddings:
            for weight in self._below_blocks():
                weight.requires_grad_(False)
        for block in blocks[:layers]:
            block.requires_grad_(False)

    def wait(self, epochs: float) -> None:
        """Remember what is frozen, to thaw it over these epochs."""
        self.unfreeze_epochs = epochs
        names = {id(weight): name for name, weight in self.named_parameters() if not weight.requires_grad}
        blocks = [list(block.parameters()) for block in self.blocks()]
        frozen_blocks = [[names.pop(id(each)) for each in block] for block in reversed(blocks) if id(block[0]) in names]
        self._waiting = [*frozen_blocks, *([list(names.values())] if names else [])]
        self._frozen_at_first = len(self._waiting)

    def thaw(self, epochs: float) -> bool:
        """Let frozen layers join the training, from the last to the first, as the epochs pass; the embeddings last.

        Whether any has joined just now.
        """
        if not self._waiting:
            return False
        waited, weights = len(self._waiting), dict(self.named_parameters())
        due = self._frozen_at_first * min(1.0, epochs / self.unfreeze_epochs)
        while self._waiting and self._frozen_at_first - len(self._waiting) < int(due):
            for name in self._waiting.pop(0):
                weights[name].requires_grad_(True)
        return len(self._waiting) < waited

    def depths(self) -> dict[str, int]:
        """How many layers lie above each weight: 0 for the head, most for the embeddings."""
        blocks = self.blocks()
        place = {id(weight): number for number, block in enumerate(blocks) for weight in block.parameters()}
        below = set(map(id, self._below_blocks()))
        found: dict[str, int] = {}
        for name, weight in self.named_parameters():
            if id(weight) in place:
                found[name] = len(blocks) - place[id(weight)]
            elif id(weight) in below:
                found[name] = len(blocks) + 1
            else:
                found[name] = 0
        return found

    def _head(self) -> list[nn.Module]:
        """What is no part of the backbone; some families declare it first."""
        in_backbone = set(map(id, self.net.base_model.modules()))
        return [module for module in self.net.modules() if id(module) not in in_backbone]

    def _below_blocks(self) -> list[nn.Parameter]:
        """The embeddings: what a row meets before the first layer, and tables outside of them that all layers read."""
        blocks, late = self.blocks(), _BESIDE_BLOCKS.get(self.family, ())
        in_blocks = {id(module) for block in blocks for module in block.modules()}
        found: list[nn.Parameter] = []
        is_below = bool(blocks)
        for name, module in self.net.base_model.named_modules():
            is_below = is_below and module is not blocks[0]
            if id(module) not in in_blocks and (is_below or isinstance(module, nn.Embedding) or name.startswith(late)):
                found += module.parameters(recurse=False)
        return found

    def _flat(self, batch: FlatBatch) -> Tensor:
        from flatout.models.encoder.flat_attention import FlatRows

        rows = FlatRows.of(batch.lengths, batch.offsets)
        starts_B = batch.offsets[:-1]
        lengths_B = batch.offsets[1:] - starts_B
        begins_T = torch.repeat_interleave(starts_B, lengths_B, output_size=batch.num_tokens)
        places_T = torch.arange(batch.num_tokens, device=batch.tokens.device) - begins_T
        given: dict[str, Any] = {"position_ids": (places_T + self.first_position).unsqueeze(0), "flat_rows": rows}
        if not self.is_tagging:
            given["row_starts"] = starts_B
            given["is_narrowed"] = self.family in _NARROW_FAMILIES
            if getattr(self.described, "classifier_pooling", "") == "mean":
                given["row_lengths"] = lengths_B
        if self._numbers_pairs:
            given["token_type_ids"] = self._pair_numbers(batch.tokens, begins_T).unsqueeze(0)
        logits = self.net(input_ids=batch.tokens.unsqueeze(0), **given).logits
        return logits[0] if self.is_tagging else logits

    def _pair_numbers(self, tokens_T: Tensor, begins_T: Tensor) -> Tensor:
        """0 up to the first separator of a row, 1 after it."""
        is_separator_T = torch.eq(tokens_T, self.separator_id or 0).long()
        before_T = is_separator_T.cumsum(0) - is_separator_T
        return (before_T - before_T[begins_T]).clamp_max_(1)

    def _padded(self, batch: FlatBatch) -> Tensor:
        tokens_BL, lengths_B = batch.padded(fill=self.padding_id)
        longest = tokens_BL.shape[1]
        given: dict[str, Any] = {}
        if batch.lengths[0] != batch.lengths[-1]:  # sorted and on the host: no wait for the device
            given["attention_mask"] = (torch.arange(longest, device=tokens_BL.device) < lengths_B.unsqueeze(1)).long()
        if self._numbers_pairs:
            is_separator_BL = torch.eq(tokens_BL, self.separator_id or 0).long()
            given["token_type_ids"] = (is_separator_BL.cumsum(1) - is_separator_BL).clamp_max_(1)
        logits = self.net(input_ids=tokens_BL.long(), **given).logits
        if not self.is_tagging:
            return logits
        starts_B = batch.offsets[:-1]
        shift_B = torch.arange(batch.num_rows, device=starts_B.device) * longest - starts_B
        shift_T = torch.repeat_interleave(shift_B, lengths_B, output_size=batch.num_tokens)
        places_T = torch.arange(batch.num_tokens, device=starts_B.device) + shift_T
        return logits.flatten(0, 1).index_select(0, places_T)

    def _before_head(self) -> nn.Module:
        module: nn.Module = self.net.get_submodule(FLAT_FAMILIES[self.family])
        return module


def _rows_for_tokens(module: nn.Module, arguments: Any, given: dict[str, Any], found: Any) -> Any:
    """`[B, 1, hidden]` for `[1, T, hidden]`: the first token of each row, or their mean where a head takes means."""
    if (starts_B := given.get("row_starts")) is None:
        return found
    states_TH = found.last_hidden_state[0]
    if given.get("is_narrowed"):
        found.last_hidden_state = states_TH.unsqueeze(1)
        return found
    if (lengths_B := given.get("row_lengths")) is None:
        rows_BH = states_TH.index_select(0, starts_B)
    else:
        row_of_T = torch.repeat_interleave(
            torch.arange(len(starts_B), device=states_TH.device), lengths_B, output_size=len(states_TH)
        )
        zero = torch.zeros(len(starts_B), states_TH.shape[1], dtype=states_TH.dtype, device=states_TH.device)
        rows_BH = zero.index_add(0, row_of_T, states_TH) / lengths_B.unsqueeze(1).to(states_TH.dtype)
    found.last_hidden_state = rows_BH.unsqueeze(1)
    return found


def _first_tokens(module: nn.Module, arguments: Any, given: dict[str, Any], found: Any) -> Any:
    """After the last attention a head of rows needs their first tokens alone; the last feed-forward part sees these."""
    if (starts_B := given.get("row_starts")) is None:
        return found
    states_1TH, *others = found
    return states_1TH.index_select(1, starts_B), *others


def _pairs(lengths: Lengths, window: int | None) -> float:
    """Pairs of tokens of the same row that see each other."""
    lengths = lengths.astype(np.float64)
    if window is None:
        return float((lengths**2).sum())
    beyond = np.maximum(lengths - window, 0)  # so many tokens are the window or more away from the row's first
    return float((lengths**2 - beyond * (beyond + 1)).sum())


def _use_plain_attention(net: Any) -> None:
    """Fused attention where the family has it, else its own."""
    if not getattr(net, "_can_set_attn_implementation", lambda: True)():  # it has one, and would warn of that
        return
    for name in ("sdpa", "eager"):
        try:
            net.set_attn_implementation(name)
            return
        except (ValueError, ImportError):
            continue


def _size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _auto_class(outputs: Outputs) -> Any:
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    return AutoModelForTokenClassification if outputs.is_tagging else AutoModelForSequenceClassification


def _require_no_code(described: Mapping[str, Any], where: str) -> None:
    """Refuse a configuration that names code of others: a module beside it, or a kernel of the Hub."""
    for name, value in described.items():
        is_named = value is not None and name.removeprefix("_").removesuffix("_internal") in _CODE
        is_local = isinstance(value, str) and name != "auto_map" and not re.search(r"[/|:]", value)
        require(not is_named or is_local, f"{where}: {name}", f"{value!r} names code of others", hint="Take it out.")


def _config_class(family: str) -> Any:
    from transformers import CONFIG_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if family not in CONFIG_MAPPING or CONFIG_MAPPING[family] not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        hint = did_you_mean(family, [*FLAT_FAMILIES, "deberta-v2", "mpnet"])
        allowed = f"{', '.join(FLAT_FAMILIES)}, or another of transformers that classifies"
        raise UserError("model.family", f"no encoder {family!r}", allowed=allowed, hint=hint)
    return CONFIG_MAPPING[family]
