"""From the settings of a run to its ladder and to the case of a usual program.

The rungs are those of the ladder for the same program, on your rows. The case has the same sizes; what a usual program
cannot follow is refused with the key that asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from flatout.data.text import TextDataConfig
from flatout.data.tokens.subwords import Subwords
from flatout.engine.optimizer import OptimConfig, ScaleRate
from flatout.errors import UserError, require
from flatout.ladder.rows import read_rows, way_of
from flatout.ladder.rungs import LEARNING, Ladder, Rung, find_ladder, read_ladder
from flatout.ladder.usual.program import Case
from flatout.models.bilstm import BiLSTMConfig
from flatout.models.bit_mlp import BitMLPConfig
from flatout.models.contract import Recommended
from flatout.models.encoder.transformer import TransformerConfig
from flatout.models.rnn import RNNConfig

_SIZES: dict[type, tuple[str, ...]] = {
    BiLSTMConfig: ("embedding", "hidden", "layers", "dropout", "embedding_dropout"),
    TransformerConfig: ("pretrained", "family", "hidden", "layers", "heads", "intermediate"),
    BitMLPConfig: ("widths", "dropout", "detectors", "straight", "blend", "start"),
    RNNConfig: ("hidden", "layers"),
}
"""What the usual program of a model can follow; all else must have its default."""
PROGRAMS: dict[type, str] = {
    BiLSTMConfig: "headlines",
    TransformerConfig: "tweets",
    BitMLPConfig: "bloom",
    RNNConfig: "battery",
}
"""The usual program of each model."""
PLAIN_BITS = ("model.detectors=false", "model.straight=false", "model.blend=false", "task.recombine=0")
"""A plain network on bits: what the usual program has."""


def program_of(model: Any) -> str:
    """The usual program of a model."""
    found = PROGRAMS.get(type(model))
    allowed = "bilstm, transformer, bitmlp, rnn"
    require(found is not None, "model", f"{type(model).__name__} has no usual program", allowed=allowed)
    return str(found)


def describe(
    data: Any,
    model: Any,
    optim: OptimConfig,
    *,
    folder: Path,
    clip: float,
    epochs: int,
    seed: int,
    reading: Mapping[str, Any],
) -> Case:
    """The case of a run whose rows lie in a folder."""
    require_followed(model)
    require(optim.scale_lr is ScaleRate.none, "optim.scale_lr", "is a rung's own", hint="Leave it out.")
    recommended = Recommended.by(model).lr
    lr = optim.lr if optim.lr is not None or recommended is None else recommended
    return Case(
        kind=way_of(data).kind,
        folder=folder,
        model=_sizes(model),
        reading={**way_of(data).reading(data), **reading},
        batch=data.batch_size,
        lr=float(optim.highest if lr is None else lr),
        clip=clip,
        epochs=epochs,
        seed=seed,
    )


def _sizes(model: Any) -> dict[str, Any]:
    return {name: getattr(model, name) for name in _SIZES[type(model)]}


def require_followed(model: Any) -> None:
    """Refuse settings that the usual program does not have."""
    program_of(model)
    default = type(model)()
    for each in fields(model):
        value, usual = getattr(model, each.name), getattr(default, each.name)
        what = f"{value} is not in the usual program"
        require(each.name in _SIZES[type(model)] or value == usual, f"model.{each.name}", what, hint="Leave it out.")
    if isinstance(model, BitMLPConfig):
        is_plain = not (model.detectors or model.straight or model.blend) and bool(model.widths)
        what = "the usual program is a plain network on the bits"
        require(is_plain, "model", what, hint=f"Set {' '.join(PLAIN_BITS)}.")


def encoder_folder(model: TransformerConfig, data: TextDataConfig, texts: Path, folder: Path, seed: int) -> Path:
    """The pretrained folder that was named, or one of random weights with word pieces of the training rows."""
    if model.pretrained is not None:
        return Path(model.pretrained)
    from transformers import AutoModel
    from transformers.utils import logging

    tokens = Subwords.train([read_rows(texts)["text"].combine_chunks()], data.vocabulary)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in tokens.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    described = model.read_description()
    described.vocab_size, described.pad_token_id = tokens.size, tokens.frame.padding
    if data.max_length > getattr(described, "max_position_embeddings", data.max_length):
        raise UserError("data.max_length", f"{data.max_length}", allowed=f"{described.max_position_embeddings} at most")
    torch.manual_seed(seed)
    logging.disable_progress_bar()
    AutoModel.from_config(described).save_pretrained(folder)
    return folder


_BY_BATCH = "tweets"
"""The program whose rungs change the batch size."""
_LARGER = "batch 64"
"""A rung of `tweets` that has no meaning where you have set the batch size."""


def choose_ladder(data: Any, model: Any, folders: Sequence[Path]) -> Ladder:
    """The rungs for these data and this model; promises of guides are about other rows, and are left out."""
    kind, program = way_of(data).kind, program_of(model)
    found = read_ladder(find_ladder(program, folders))  # a ladder has the name of its program
    require(found.kind == kind, "model", f"{type(model).__name__} does not fit {kind}")
    title = f"{type(model).__name__.removesuffix('Config')} on your data"
    rungs = [_without_promise(rung) for rung in found.rungs if not _is_for_guide(rung)]
    if program == _BY_BATCH:
        rungs = [_with_batch(rung, data.batch_size) for rung in rungs]
    return replace(found, name=f"own_{program}", title=title, rungs=tuple(rungs), in_all="", settings=())


def _is_for_guide(rung: Rung) -> bool:
    """Whether a rung belongs to the guide's batch sizes."""
    return rung.name == _LARGER or rung.measures == LEARNING


def _without_promise(rung: Rung) -> Rung:
    words = [word for word in rung.words if not word.startswith(("optim.scale_lr", "optim.base_batch"))]
    return replace(rung, promised="", factor=None, words=tuple(words))


def _with_batch(rung: Rung, batch: int) -> Rung:
    """A rung with your batch size, for which your learning rate was chosen."""
    if rung.keywords is None:
        return rung
    own = {"batch": batch} if "batch" in rung.keywords else {}
    return replace(rung, keywords={**rung.keywords, "base_rows": batch, "scale_lr": "sqrt", **own})
