"""Facts about one encoder of transformers, read once off the library's configuration and modules.

Configurations differ by family: each has some settings, and lacks others. All such questions are
asked here, so that the rest of the encoder reads plain fields of `EncoderFacts`. What is special
about a whole family stands in `families.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from torch import nn

from flatout.models.encoder.families import (
    Family,
    family_of,
    missing_part,
    read_setting,
    why_not_flat,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFacts:
    """What flatout needs to know of one encoder."""

    family_name: str  # transformers' `model_type`
    why_not_flat: str  # why it cannot run flat; empty where it can
    padding_id: int | None  # None: it has no padding token
    # the position of a row's first token in the table of positions
    first_position: int
    longest: int | None  # rows of its table of positions; None: it has no limit
    numbers_pairs: bool  # whether it tells the texts of a pair apart by numbers beside the tokens
    # how tokens become a row's answer, in families with a choice: cls, mean or late; else empty
    pooling: str
    attention_dropout: float  # fraction of attention that is dropped in training
    # Whether it adds to the mask that it gets, as decoders do, or counts by it. A finished mask
    # would be taken for the mask of all its layers.
    masks_itself: bool
    has_windows: bool  # whether some layers see a window of tokens around each token
    # kinds of layers with rotary positions of their own; one nameless kind where all have the same
    rotary_kinds: tuple[str, ...]

    @property
    def family(self) -> Family:
        # not a field: a record holds functions, and these facts travel with a pickled model
        return family_of(self.family_name)


def read_facts(net: PreTrainedModel) -> EncoderFacts:
    """The facts about a model of transformers with its head."""
    config = net.config
    family = family_of(config.model_type)
    reason = why_not_flat(config)
    # Families not in our table tell the texts of a pair apart where they have a table for it.
    is_typed = bool(reason) and read_setting(config, "type_vocab_size", 0) > 1
    if family.flat and not reason and (part := missing_part(net, family.flat)):
        release = version("transformers")
        reason = f"transformers {release} has no {part} in {config.model_type}, so it has no"
        reason += " flat layers"
    layer_kinds = read_setting(config, "layer_types", list[str]())
    longest = read_setting(config, "max_position_embeddings", 0)
    is_decoder = read_setting(config, "is_decoder", False)
    return EncoderFacts(
        family_name=config.model_type,
        why_not_flat=reason,
        padding_id=config.pad_token_id,
        first_position=_first_position(net.base_model),
        longest=int(longest) if longest > 0 else None,
        numbers_pairs=family.numbers_pairs or is_typed,
        pooling=read_setting(config, "classifier_pooling", ""),
        attention_dropout=max(read_setting(config, name, 0.0) for name in _ATTENTION_DROPOUTS),
        masks_itself=family.flat is None or family.masks_itself or is_decoder,
        has_windows="sliding_attention" in layer_kinds,
        rotary_kinds=tuple(dict.fromkeys(layer_kinds or [""])),
    )


def _first_position(backbone: nn.Module) -> int:
    """Where positions begin: after the row of padding, where the table of positions has one."""
    embeddings = backbone._modules.get("embeddings")
    if embeddings is None:
        return 0
    table = embeddings._modules.get("position_embeddings")
    if not isinstance(table, nn.Embedding) or table.padding_idx is None:
        return 0
    return table.padding_idx + 1
