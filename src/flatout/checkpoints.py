"""Checkpoints as folders: tensors in safetensors, everything else in JSON, checksums last. Nothing is pickled.

A checkpoint is `step-N/` with `tensors.safetensors`, `state.json` and `MANIFEST.json`, written beside its place and
renamed when it is whole. `best` and `last` are links to two of them; others are taken away.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from flatout.data.store import file_checksum
from flatout.errors import UserError, require
from flatout.metrics import BEST_MODE

CHECKPOINTS = "checkpoints"
"""Their folder in a run's folder."""
TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "MANIFEST.json"


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """What counts as best, and when to stop waiting for better."""

    metric: str | None = None
    """Validation metric to choose by, such as accuracy or macro_f1; null: the problem's usual one."""
    patience: int | None = 5
    """Validations without a better metric before training stops; null: never."""
    min_delta: float = 0.0
    """Least change that counts as better."""

    def __post_init__(self) -> None:
        ok = self.patience is None or self.patience >= 1
        require(ok, "checkpoint.patience", f"{self.patience}", allowed="1 or more, or null")
        require(self.min_delta >= 0, "checkpoint.min_delta", f"{self.min_delta}", allowed="0 or more")


class FolderCheckpointIO(CheckpointIO):
    """Writes and reads Lightning's checkpoint dictionaries as folders."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        target = Path(path)
        beside = target.with_name(f".{target.name}-{os.getpid()}")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        tensors: dict[str, Tensor] = {}
        state = _without_tensors(checkpoint, "", tensors)
        save_file(tensors, beside / TENSORS)
        (beside / STATE).write_text(json.dumps(state), encoding="utf-8")
        files = {
            name: {"bytes": (beside / name).stat().st_size, "xxh3": file_checksum(beside / name)}
            for name in (TENSORS, STATE)
        }
        (beside / MANIFEST).write_text(json.dumps({"schema": 1, "files": files}), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        folder = Path(path)
        require_whole(folder)
        tensors = load_file(folder / TENSORS, device="cpu")
        return _with_tensors(json.loads((folder / STATE).read_text(encoding="utf-8")), tensors)

    def remove_checkpoint(self, path: Any) -> None:
        shutil.rmtree(path, ignore_errors=True)


def require_whole(folder: Path) -> None:
    """Refuse a checkpoint whose bytes are not those that were written."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        broken = [name for name, written in files.items() if file_checksum(folder / name) != written["xxh3"]]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"checkpoint {folder}", f"not a whole checkpoint: {error}") from None
    if broken:
        raise UserError(f"checkpoint {folder}", f"damaged: {', '.join(broken)} differ from what was written")


def load_weights(module: torch.nn.Module, folder: Path) -> None:
    """The `state_dict` of a checkpoint, into a module; the running mean of a model's weights where there is one."""
    checkpoint = FolderCheckpointIO().load_checkpoint(folder)
    means = {f"model.{name}": mean for name, mean in checkpoint.get("average", {}).items()}
    module.load_state_dict(checkpoint["state_dict"] | means)


class BestAndLast(Checkpoint):
    """Saves after each validation; keeps the newest checkpoint and the one with the best metric."""

    def __init__(self, folder: Path, metric: str, min_delta: float = 0.0) -> None:
        self.folder, self.metric, self.min_delta = folder, metric, min_delta
        self.best_value: float | None = None

    @property
    def best(self) -> Path:
        return self.folder / "best"

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        value = float(trainer.callback_metrics[f"val/{self.metric}"])
        name = f"step-{trainer.global_step}"
        is_best = self._is_better(value)
        if is_best:
            self.best_value = value
        trainer.save_checkpoint(self.folder / name)
        if trainer.is_global_zero:
            _link(self.folder / "last", name)
            if is_best or not self.best.exists():
                _link(self.best, name)
            self._remove_others()

    def state_dict(self) -> dict[str, Any]:
        return {"best_value": self.best_value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_value = state_dict["best_value"]

    def _is_better(self, value: float) -> bool:
        if self.best_value is None or self.best_value != self.best_value:
            return True
        gain = value - self.best_value if best_mode(self.metric) == "max" else self.best_value - value
        return gain > self.min_delta

    def _remove_others(self) -> None:
        kept = {(self.folder / link).resolve() for link in ("best", "last")}
        for path in self.folder.glob("step-*"):
            if path.resolve() not in kept:
                shutil.rmtree(path)


def best_mode(metric: str) -> str:
    """Whether a metric is better when higher (`max`) or lower (`min`)."""
    return "min" if metric == "loss" else BEST_MODE[metric]


def _link(link: Path, target: str) -> None:
    """Point a link at a neighbour in one step, so that it never dangles."""
    new = link.with_name(f".{link.name}-new")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(link)


def _without_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON, its tensors moved out under their paths. What JSON cannot say is tagged."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach().contiguous().clone()
        return {"~tensor": path}
    if isinstance(value, dict):
        pairs = [[key, _without_tensors(item, f"{path}/{key}", tensors)] for key, item in value.items()]
        is_plain = all(isinstance(key, str) and not key.startswith("~") for key in value)
        return dict(pairs) if is_plain else {"~pairs": pairs}
    if isinstance(value, list | tuple):
        items = [_without_tensors(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
        return {"~tuple": items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"checkpoint value {path} is a {type(value).__name__}: only plain values and tensors are kept")


def _with_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_with_tensors(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "~tensor" in value:
        return tensors[value["~tensor"]]
    if "~tuple" in value:
        return tuple(_with_tensors(item, tensors) for item in value["~tuple"])
    if "~pairs" in value:
        return {key: _with_tensors(item, tensors) for key, item in value["~pairs"]}
    return {key: _with_tensors(item, tensors) for key, item in value.items()}
