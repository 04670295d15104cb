"""The network of a model's Config for some texts: sizes from the data, limits checked before
training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flatout.data.tokens.long_texts import CUT
from flatout.data.tokens.subwords import pair_separator
from flatout.errors import require
from flatout.models.contract import contract
from flatout.models.encoder.transformer import Outputs, Transformer, TransformerConfig
from flatout.run_log import RunLog


def require_no_windows(task: Any, info: Any) -> None:
    """Refuse windows where the network was given: it does not know of them."""
    is_whole = not (task.is_built and getattr(info, "long_texts", CUT).window)
    require(
        is_whole,
        "data.long",
        "windows, which a network of your own does not read",
        hint="Set data.long=cut.",
    )


def build_text_network(config: Any, info: Any, outputs: Outputs) -> nn.Module:
    """The network that reads the data's vocabulary and answers `outputs`."""
    encoder = info.vocabulary
    if not isinstance(config, TransformerConfig):
        require(
            not info.long_texts.window,
            "data.long",
            "windows are for encoders",
            hint="Set model=transformer.",
        )
        words = encoder.tokenizer.get_vocab() if getattr(config, "vectors", None) else None
        return config.build(
            num_outputs=len(outputs.names), vocabulary_size=encoder.size, vocabulary=words
        )
    ids = {"padding_id": encoder.frame.padding, "separator_id": pair_separator(encoder, info.roles)}
    model = config.build(outputs, vocabulary_size=encoder.size, **ids)
    model.read_windows(info.long_texts.window, config.windows)
    longest = model.longest_row()
    read = model.window or info.max_length
    where = "data.window" if model.window else "data.max_length"
    require(
        read <= longest,
        where,
        f"{read}",
        allowed=f"at most {longest} for {model.family}",
        hint=f"Set {where}={longest}.",
    )
    known = len(model.net.get_input_embeddings().weight)
    require(
        encoder.size <= known,
        "data.tokenizer",
        f"{encoder.size:,} entries, but the encoder knows {known:,}",
        hint="Leave it out: the model's own tokenizer is used.",
    )
    return model


def report_network(network: nn.Module, config: Any, info: Any, log: RunLog) -> None:
    """Report how an encoder's batches are laid out, and how many words have vectors."""
    if isinstance(network, Transformer) and network.is_flat:
        log.decision(
            "batches",
            "flat",
            f"{network.family} runs without padding",
            "equal to padded rows, by test",
        )
    elif isinstance(network, Transformer):
        log.decision("batches", "padded", network.why_padded, "rows of like length go together")
    if vectors := getattr(config, "vectors", None):
        found = contract(network).vectors_found or 0.0
        log.say(f"word vectors: {found:.1%} of {info.vocabulary.size:,} words found in {vectors}")


def report_attention(
    network: nn.Module, device: torch.device, dtype: torch.dtype, log: RunLog
) -> None:
    """Report what computes the attention of a flat encoder, and what it drops, in this number
    format of products.
    """
    if isinstance(network, Transformer) and network.is_flat:
        choice = network.kernel_choice(device, dtype)
        drops = f"drops {network.attention_dropout:g} of the scores in training, as set"
        log.decision(
            "attention kernel", str(choice.value), choice.why, f"{choice.evidence}; {drops}"
        )
