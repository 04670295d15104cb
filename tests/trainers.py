"""Plain Trainers of Lightning that print and write nothing, and what is kept of their training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Arguments of a Trainer that neither logs nor prints."""


def quiet_trainer(folder: Path | None = None, **settings: Any) -> L.Trainer:
    """A plain Trainer on the CPU that trains one epoch, and prints and writes nothing."""
    defaults: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "default_root_dir": folder,
        "enable_checkpointing": False,
    }
    return L.Trainer(**(QUIET | defaults | settings))


def flat_weights(module: nn.Module) -> Tensor:
    """All weights of a module in one row."""
    return torch.cat([weight.detach().flatten() for weight in module.parameters()])


def copies_of_gradients(module: nn.Module) -> list[Tensor | None]:
    """The gradient of each weight as it is now; None where there is none."""
    copies: list[Tensor | None] = []
    for weight in module.parameters():
        copies.append(None if weight.grad is None else weight.grad.clone())
    return copies


def make_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in which each class is replaced by a new object of it: a logger, a profiler."""
    made = dict(settings)
    for name, value in settings.items():
        if isinstance(value, type):
            made[name] = value()
    return made


class KeptFlushes:
    """Keeps the values of each flush of the curves."""

    def __init__(self) -> None:
        self.flushes: list[dict[str, float]] = []

    def on_flush(self, step: int, epoch: float, values: dict[str, float]) -> None:
        self.flushes.append(values)

    def on_validation(self, step: int, epoch: float, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...
