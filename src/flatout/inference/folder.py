"""A run's `model/` folder: weights, the names of the outputs, and the settings that rebuild the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flatout.errors import UserError, require

_MOST_CHARACTERS = 50_000_000
WEIGHTS, SETTINGS, LABELS = "model.safetensors", "config.json", "labels.json"
TOKENIZER, ENCODER = "tokenizer.json", "encoder.json"
"""Of a model that reads texts, and of an encoder what transformers needs to build it."""


class Answers(Protocol):
    """What answers for new rows after training."""

    def predict(self, rows: Sequence[Any]) -> list[Any]: ...

    def save(self, folder: Path, model_config: Any) -> None: ...


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
        inside = sorted(each.parent for each in path.glob(f"*/model/{WEIGHTS}"))
        hint = f"Did you mean {inside[-1].parent}?" if inside else "Name a run whose summary.json says finished."
        raise UserError(str(path), "no finished run: it has no model/ folder", hint=hint)

    def settings(self) -> dict[str, Any]:
        with self.read():
            settings = self.read_json(SETTINGS)
            what = f"{SETTINGS} holds no settings of a model"
            require(isinstance(settings, dict) and settings.get("schema") == 1, str(self.path), what)
            return settings

    @property
    def settings_file(self) -> str:
        """The file of the settings, for messages."""
        return f"{self.path}: {SETTINGS}"

    def weights(self) -> dict[str, Tensor]:
        return load_file(self.path / WEIGHTS)

    def labels(self) -> list[str]:
        """Names of the outputs."""
        labels = self.read_json(LABELS)
        is_plain = isinstance(labels, list) and bool(labels) and all(isinstance(name, str) for name in labels)
        require(
            is_plain,
            f"{self.path}: {LABELS}",
            "is no list of names",
            hint="The folder was changed, or comes from another version: train again.",
        )
        return labels

    def read_json(self, name: str) -> Any:
        text = (self.path / name).read_text(encoding="utf-8")
        require(
            len(text) <= _MOST_CHARACTERS,
            f"{self.path}: {name}",
            f"{len(text):,} characters",
            hint="The folder was changed, or comes from another version: train again.",
        )
        return json.loads(text)

    @contextmanager
    def read(self) -> Iterator[None]:
        """Say of a folder that cannot be read what is wrong: it may come from anybody."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # no narrower class: for damaged files tokenizers raises Exception itself
            reason = next(iter(str(error).strip().splitlines()), "")
            hint = "It is damaged, or was not written by this program."
            where, what = f"{self.path}", f"no model that can be read ({type(error).__name__}: {reason})"
            raise UserError(where, what, hint=hint) from error

    def write(
        self, model: nn.Module, kind: str, model_config: Any, labels: list[str], settings: dict[str, Any]
    ) -> None:
        """`kind`: the name of the Config's class among the models."""
        self.path.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()}
        save_file(tensors, self.path / WEIGHTS)
        self.write_json(LABELS, labels)
        described = {"kind": kind, "config": asdict(model_config)}
        self.write_json(SETTINGS, {"schema": 1, "model": described, **settings})

    def write_json(self, name: str, value: Any) -> None:
        (self.path / name).write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
