"""The encoder that a finished run left behind, as a place to start from: its configuration, weights
and tokenizer.

`model.pretrained` and `data.tokenizer` take a run's folder, or the `model` folder in it. Everything
in it is data.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError

from flatout.errors import UserError, first_line, require

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")
_ENCODER = "encoder.json"
_SETTINGS = "config.json"
_WEIGHTS = "model.safetensors"
_NET = "net."  # what the names of weights begin with, before those of transformers
_KEY = "model.pretrained"
_MOST_CHARACTERS = 50_000_000


@dataclass(frozen=True, slots=True)
class RunModel:
    """The `model` folder of a run that trained an encoder."""

    folder: Path

    def configuration(self) -> dict[str, Any]:
        found = self.read(lambda: json.loads(self.text(_ENCODER)))
        if not isinstance(found, dict):
            raise self._damaged(f"{_ENCODER} holds no settings")
        return found

    def load_into(self, net: nn.Module) -> nn.Module:
        """The model of transformers with the run's weights, but for a head of another
        kind or size.
        """
        from safetensors.torch import load_file  # imports torch, which checking data does without

        weights = self.read(lambda: load_file(self.folder / _WEIGHTS))
        require(
            not any("lora_" in name for name in weights),
            _KEY,
            f"{self.folder} has small matrices beside its weights",
            hint="Export it first: python -m flatout export RUN. Then name the exported folder.",
        )
        named = {
            name.removeprefix(_NET): weight
            for name, weight in weights.items()
            if name.startswith(_NET)
        }
        shapes = {name: weight.shape for name, weight in net.state_dict().items()}
        fits = {name: weight for name, weight in named.items() if shapes.get(name) == weight.shape}
        if not fits:
            raise self._damaged("none of its weights fits its configuration")
        net.load_state_dict(fits, strict=False)
        return net

    def read(self, opening: Callable[[], T]) -> T:
        """What a function reads from the folder; files that cannot be read are named in one
        sentence.
        """
        try:
            return opening()
        except UserError:
            raise
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
            SafetensorError,
        ) as error:
            raise self._damaged(first_line(error)) from None

    def text(self, name: str) -> str:
        text = (self.folder / name).read_text(encoding="utf-8")
        if len(text) > _MOST_CHARACTERS:
            raise self._damaged(f"{name} has {len(text):,} characters")
        return text

    def _damaged(self, why: str) -> UserError:
        return UserError(
            _KEY, f"{self.folder} cannot be read ({why})", hint="It is damaged, or no run wrote it."
        )


def model_of_run(name: str) -> RunModel | None:
    """The model of a run by its folder, or by the `model` folder in it; None where the name is no
    run's.
    """
    for folder in (Path(name), Path(name) / "model"):
        if (folder / _ENCODER).is_file() and (folder / _WEIGHTS).is_file():
            return RunModel(folder)
    if (Path(name) / "model" / _SETTINGS).is_file():
        raise UserError(
            _KEY, f"{name} is a run without an encoder", hint="Name a run of model=transformer."
        )
    if (Path(name) / "summary.json").is_file() and not (Path(name) / _SETTINGS).is_file():
        raise UserError(
            _KEY,
            f"{name} is a run without a model/ folder",
            hint="Name a run of model=transformer that has ended; resume=RUN continues one.",
        )
    return None
