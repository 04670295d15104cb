"""Build the network of a model's Config for some texts.

Its sizes come from the data, and limits such as its longest row are checked before training.
"""

from __future__ import annotations

import torch
from torch import nn

from flatout.data.info import DataInfo, TokenInfo
from flatout.data.tokens.subwords import Subwords, pair_separator
from flatout.errors import require
from flatout.models.contract import ModelConfig, contract
from flatout.models.encoder.transformer import Outputs, Transformer, TransformerConfig
from flatout.models.words import WordsConfig
from flatout.run_log import RunLog


def require_no_windows(info: TokenInfo) -> None:
    """Refuse data in windows for a network that a user built: it does not join their answers."""
    require(
        not info.long_texts.window,
        "data.long",
        "windows, which a network of your own does not read",
        hint="Set data.long=cut.",
    )


def build_text_network(config: ModelConfig, info: DataInfo, outputs: Outputs) -> nn.Module:
    """The network that reads the data's vocabulary and answers `outputs`."""
    assert isinstance(info, TokenInfo)  # the task has looked (`take_info`)
    encoder = info.vocabulary
    if not isinstance(config, TransformerConfig):
        require(
            not info.long_texts.window,
            "data.long",
            "windows are for encoders",
            hint="Set model=transformer.",
        )
        words = None
        if isinstance(config, WordsConfig) and config.vectors:
            words = encoder.tokenizer.get_vocab()
        return config.build(
            num_outputs=len(outputs.names), vocabulary_size=encoder.size, vocabulary=words
        )
    assert isinstance(encoder, Subwords)  # encoders read no others
    model = config.build(
        outputs,
        vocabulary_size=encoder.size,
        padding_id=encoder.frame.padding,
        separator_id=pair_separator(encoder, info.roles),
    )
    model.set_windows(info.long_texts.window, config.windows)
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
    num_known = len(model.net.get_input_embeddings().weight)
    require(
        encoder.size <= num_known,
        "data.tokenizer",
        f"{encoder.size:,} entries, but the encoder knows {num_known:,}",
        hint="Leave it out: the model's own tokenizer is used.",
    )
    return model


def report_network(
    network: nn.Module, config: ModelConfig | None, info: DataInfo, log: RunLog
) -> None:
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
    if isinstance(config, WordsConfig) and config.vectors and isinstance(info, TokenInfo):
        found = contract(network).vectors_found or 0.0
        words = f"{info.vocabulary.size:,} words"
        log.say(f"word vectors: {found:.1%} of {words} found in {config.vectors}")


def report_attention(
    network: nn.Module, device: torch.device, dtype: torch.dtype, log: RunLog
) -> None:
    """Report the kernel of a flat encoder's attention, and its dropout.

    `dtype`: the number format of products, on which the choice depends.
    """
    if isinstance(network, Transformer) and network.is_flat:
        choice = network.kernel_choice(device, dtype)
        drops = f"dropout {network.attention_dropout:g}"
        log.decision(
            "attention kernel", str(choice.value), choice.why, f"{choice.evidence}; {drops}"
        )
