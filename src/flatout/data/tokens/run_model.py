"""Start from the encoder of a finished run: its configuration, weights and tokenizer.

`model.pretrained` and `data.tokenizer` take a run's folder, or the `model` folder in it. Everything
in that folder is data: json and safetensors, which run no code when they are opened.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flatout.errors import UserError, first_line, is_failure, require

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")
_ENCODER = "encoder.json"
_SETTINGS = "config.json"
_WEIGHTS = "model.safetensors"
_NET = "net."  # what the names of weights begin with, before those of transformers
_KEY = "model.pretrained"
MOST_BYTES = 500_000_000
"""Of a file beside the weights. A tokenizer of 256,000 entries takes 70 MB: its text stands there
twice."""


@dataclass(frozen=True, slots=True)
class RunModel:
    """The `model` folder of a run that trained an encoder."""

    folder: Path

    def configuration(self) -> dict[str, Any]:
        """The settings of the encoder, as transformers writes them."""
        settings = self.read(lambda: json.loads(self.text(_ENCODER)))
        if not isinstance(settings, dict):
            raise self._damaged(f"{_ENCODER} holds no settings")
        return settings

    def load_into(self, net: nn.Module) -> nn.Module:
        """Load the run's weights into a model of transformers, and return the model.

        A head of another kind or size keeps its new weights.
        """
        from safetensors.torch import load_file  # imports torch, which checking data does without

        weights = self.read(lambda: load_file(self.folder / _WEIGHTS))
        require(
            not any("lora_" in name for name in weights),
            _KEY,
            f"{self.folder} has small matrices beside its weights",
            hint="Export it first: python -m flatout export RUN. Then name the exported folder.",
        )
        shapes = {f"{_NET}{name}": weight.shape for name, weight in net.state_dict().items()}
        # A run that answered three classes has a head of three rows: it does not fit one of five.
        fitting = {
            name.removeprefix(_NET): weight
            for name, weight in weights.items()
            if shapes.get(name) == weight.shape
        }
        if not fitting:
            raise self._damaged("none of its weights fits its configuration")
        net.load_state_dict(fitting, strict=False)
        return net

    def read(self, load: Callable[[], T]) -> T:
        """What `load` reads from the folder; a UserError that names the folder if it fails."""
        try:
            return load()
        except UserError:
            raise
        except BaseException as error:
            # no narrower class: tokenizers raises Exception itself for damaged files, or panics
            if not is_failure(error):
                raise
            raise self._damaged(first_line(error)) from None

    def text(self, name: str) -> str:
        """The text of a file in the folder."""
        path = self.folder / name
        # A folder may come from others: a pipe never ends, a huge file would fill the memory.
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            raise self._damaged(f"{name} is no file of at most {MOST_BYTES:,} bytes")
        return path.read_text(encoding="utf-8")

    def _damaged(self, why: str) -> UserError:
        return UserError(
            _KEY, f"{self.folder} cannot be read ({why})", hint="It is damaged, or no run wrote it."
        )


def model_of_run(name: str) -> RunModel | None:
    """The model of a run, by its folder or the `model` folder in it; None for any other name."""
    try:
        Path(name).exists()
    except (OSError, ValueError) as error:
        reason = f"{name!r:.40} cannot be a folder or a model ({first_line(error)!s:.60})"
        raise UserError(_KEY, reason, hint="Name another one.") from None
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
