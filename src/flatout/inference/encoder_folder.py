"""An encoder in a `model/` folder: its weights, its tokenizer, and what transformers needs to build it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flatout.data.tokens.subwords import Subwords, read_encoder
from flatout.inference.dotted_settings import built
from flatout.inference.folder import ModelFolder
from flatout.models.encoder.transformer import Outputs, Transformer, TransformerConfig

TOKENIZER, ENCODER = "tokenizer.json", "encoder.json"


def save_encoder(folder: Path, model: Transformer) -> None:
    """Beside the weights, what transformers needs to build the same encoder."""
    ModelFolder(folder).write_json(ENCODER, model.described.to_diff_dict())


def load_encoder(folder: ModelFolder, outputs: Outputs, *, separator: bool) -> tuple[Transformer, Subwords]:
    """An encoder with its weights, and its tokenizer; `separator` says whether its rows are pairs."""
    described = folder.settings()["model"]
    config = built(TransformerConfig, {**described["config"], **without_files(described["config"])})
    vocabulary = read_encoder((folder.path / TOKENIZER).read_text(encoding="utf-8"))
    assert isinstance(vocabulary, Subwords)
    model = config.rebuild(outputs, folder.read_json(ENCODER), vocabulary.frame.separator if separator else None)
    model.load_state_dict(folder.weights())
    return model, vocabulary


def without_files(config: dict[str, Any]) -> dict[str, Any]:
    """Settings that name files which are needed only to begin training."""
    without = {"vectors": None, "freeze_vectors": False, "pretrained": None}
    return {name: value for name, value in without.items() if name in config}
