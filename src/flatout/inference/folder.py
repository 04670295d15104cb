"""A run's `model/` folder: weights, the names of the outputs, and the settings that rebuild the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flatout.errors import UserError, require

_MOST_CHARACTERS = 50_000_000
WEIGHTS, SETTINGS, LABELS = "model.safetensors", "config.json", "labels.json"

KINDS = {
    "BiLSTMConfig": "bilstm",
    "TextCNNConfig": "textcnn",
    "BitMLPConfig": "bitmlp",
    "TransformerConfig": "transformer",
}
"""Kinds of models by the names of their Configs; a folder needs no code of a model."""


class ModelFolder:
    """Reads and writes one `model/` folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def find(cls, run: str | Path) -> ModelFolder:
        """The folder of a run, given the run's folder or the folder itself."""
        path = Path(run)
        for folder in (path, path / "model"):
            if (folder / SETTINGS).is_file() and (folder / WEIGHTS).is_file():
                return cls(folder)
        if not path.exists():
            raise UserError(str(path), "no such run", hint="Name a folder below outputs/.")
        raise UserError(
            str(path), "no finished run: it has no model/ folder", hint="Name a run whose summary.json says finished."
        )

    def settings(self) -> dict[str, Any]:
        with self.read():
            settings = self.read_json(SETTINGS)
            what = f"{SETTINGS} holds no settings of a model"
            require(isinstance(settings, dict) and settings.get("schema") == 1, str(self.path), what)
            kind = settings["model"]["kind"]
            kinds = list(KINDS.values())
            require(kind in kinds, f"{self.path}: {SETTINGS}", f"no model {kind!r}", allowed=", ".join(kinds))
            return settings

    def weights(self) -> dict[str, Tensor]:
        return load_file(self.path / WEIGHTS)

    def labels(self) -> list[str]:
        """Names of the outputs."""
        labels = self.read_json(LABELS)
        is_plain = isinstance(labels, list) and bool(labels) and all(isinstance(name, str) for name in labels)
        require(is_plain, f"{self.path}: {LABELS}", "is no list of names")
        return labels

    def read_json(self, name: str) -> Any:
        text = (self.path / name).read_text(encoding="utf-8")
        require(len(text) <= _MOST_CHARACTERS, f"{self.path}: {name}", f"{len(text):,} characters")
        return json.loads(text)

    @contextmanager
    def read(self) -> Iterator[None]:
        """Say of a folder that cannot be read what is wrong: it may come from anybody."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # tokenizers raises Exception itself for bytes that are odd
            reason = next(iter(str(error).strip().splitlines()), "")
            hint = "It is damaged, or was not written by this program."
            where, what = f"{self.path}", f"no model that can be read ({type(error).__name__}: {reason})"
            raise UserError(where, what, hint=hint) from error

    def write(self, model: nn.Module, model_config: Any, labels: list[str], settings: dict[str, Any]) -> None:
        """`model_config` must be of a class in KINDS."""
        self.path.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()}
        save_file(tensors, self.path / WEIGHTS)
        self.write_json(LABELS, labels)
        described = {"kind": KINDS[type(model_config).__name__], "config": asdict(model_config)}
        self.write_json(SETTINGS, {"schema": 1, "model": described, **settings})

    def write_json(self, name: str, value: Any) -> None:
        (self.path / name).write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
