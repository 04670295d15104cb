"""Describe the case of a ladder: sizes and settings that a usual program and a run of ours share.

`_PROGRAMS` names the usual program of each model and the settings that it can follow; any other
setting must have its default, or is refused by its key. Where no ladder is named, `choose_ladder`
takes the rungs of the ladder for the same program. Open this file to give another model a ladder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import torch

from flatout.data.texts.settings import TextDataConfig
from flatout.data.tokens.subwords import Subwords
from flatout.engine.optimizer import OptimConfig, ScaleRate
from flatout.errors import require
from flatout.ladder.rows import ProgramData, read_rows, way_of
from flatout.ladder.rungs import (
    LEARNING,
    OF_BITS,
    OF_ENCODERS,
    Ladder,
    Rung,
    find_ladder,
    read_ladder,
)
from flatout.ladder.usual.program import Case
from flatout.models import kind_of
from flatout.models.bilstm import BiLSTMConfig
from flatout.models.bit_mlp import BitMLPConfig
from flatout.models.contract import ModelConfig, recommended_lr
from flatout.models.encoder.families import read_setting
from flatout.models.encoder.transformer import TransformerConfig
from flatout.models.rnn import RNNConfig

# The usual program of each model, and which of its settings the program follows. All others must
# have their default.
_PROGRAMS: dict[type, tuple[str, tuple[str, ...]]] = {
    BiLSTMConfig: ("headlines", ("embedding", "hidden", "layers", "dropout", "embedding_dropout")),
    TransformerConfig: (
        OF_ENCODERS,
        ("pretrained", "family", "hidden", "layers", "heads", "intermediate"),
    ),
    BitMLPConfig: (OF_BITS, ("widths", "dropout", "detectors", "straight", "blend", "start")),
    RNNConfig: ("battery", ("hidden", "layers")),
}


def program_of(model: object) -> str:
    require(
        type(model) in _PROGRAMS,
        "model",
        f"there is no ladder for {kind_of(model)}",
        allowed=", ".join(map(kind_of, (known() for known in _PROGRAMS))),
    )
    return _PROGRAMS[type(model)][0]


def describe(
    data: ProgramData,
    model: ModelConfig,
    optim: OptimConfig,
    *,
    reading: Mapping[str, Any],
    **about: Any,
) -> Case:
    """The case of a run whose rows lie in a folder; `about`: folder, clip, epochs and seed."""
    require_followed(model)
    require(
        optim.scale_lr is ScaleRate.none, "optim.scale_lr", "is a rung's own", hint="Leave it out."
    )
    lr = recommended_lr(model) if optim.lr is None else optim.lr
    rows_at_once, _ = data.batches(1)
    return Case(
        model={name: getattr(model, name) for name in _PROGRAMS[type(model)][1]},
        reading={**way_of(data).reading(data), **reading},
        batch=rows_at_once,
        lr=float(optim.highest if lr is None else lr),
        **about,
    )


def require_followed(model: ModelConfig) -> None:
    """Refuse settings that the usual program does not have."""
    program = program_of(model)
    default = type(model)()
    followed = _PROGRAMS[type(model)][1]
    for field in fields(model):
        value = getattr(model, field.name)
        require(
            field.name in followed or value == getattr(default, field.name),
            f"model.{field.name}",
            f"{value} is not in the usual program",
            hint="Leave it out.",
        )
    if program == OF_BITS:
        bits = cast(BitMLPConfig, model)
        require(
            not (bits.detectors or bits.straight or bits.blend) and bool(bits.widths),
            "model",
            "the usual program is a plain network on the bits",
            hint=(
                "Set model.detectors=false model.straight=false model.blend=false task.recombine=0."
            ),
        )


def encoder_folder(
    model: TransformerConfig, data: TextDataConfig, texts: Path, folder: Path, seed: int
) -> Path:
    """The named folder of a pretrained encoder, or a new one.

    A new one has random weights, and word pieces of the training rows.
    """
    if model.pretrained is not None:
        return Path(model.pretrained)
    from transformers import AutoModel
    from transformers.utils import logging

    tokens = Subwords.train([read_rows(texts)["text"].combine_chunks()], data.vocabulary)
    folder.mkdir(parents=True, exist_ok=True)
    tokens.save(folder)
    described = model.read_description()
    described.vocab_size = tokens.size
    described.pad_token_id = tokens.frame.padding
    most = read_setting(described, "max_position_embeddings", data.max_length)
    require(
        data.max_length <= most, "data.max_length", f"{data.max_length}", allowed=f"{most} at most"
    )
    torch.manual_seed(seed)
    logging.disable_progress_bar()
    AutoModel.from_config(described).save_pretrained(folder)
    return folder


def choose_ladder(data: ProgramData, model: ModelConfig, folders: Sequence[Path]) -> Ladder:
    """A ladder for these data and this model, with the rungs of the ladder for its program.

    The promises of a guide are about other rows, and are left out.
    """
    kind = way_of(data).kind
    program = program_of(model)
    # The file of a ladder has the name of its program.
    ladder = read_ladder(find_ladder(program, folders))
    require(ladder.kind == kind, "model", f"{type(model).__name__} does not fit {kind}")
    title = f"{type(model).__name__.removesuffix('Config')} on your data"
    # The larger batch of `tweets`, and what is only learned otherwise, belong to the guide's batch
    # sizes.
    rows_at_once, _ = data.batches(1)
    rungs = list[Rung]()
    for rung in ladder.rungs:
        if rung.name == "batch 64" or rung.measures == LEARNING:
            continue
        of_rates = ("optim.scale_lr", "optim.base_batch")
        words = tuple(word for word in rung.words if not word.startswith(of_rates))
        keywords = rung.keywords
        if program == OF_ENCODERS and keywords is not None:
            # Its rungs change the batch size; your learning rate was chosen for yours.
            keywords = {**keywords, "base_rows": rows_at_once, "scale_lr": "sqrt"}
            if "batch" in keywords:
                keywords["batch"] = rows_at_once
        rungs.append(replace(rung, promised="", factor=None, words=words, keywords=keywords))
    return replace(
        ladder, name=f"own_{program}", title=title, rungs=tuple(rungs), in_all="", settings=()
    )
