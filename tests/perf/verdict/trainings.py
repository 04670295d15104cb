"""Trainings in plain Trainers of which a verdict is given."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import Dataset

from tests.callbacks.plain import Small
from tests.trainers import QUIET


class Notes:
    """A log that is read afterwards."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def decision(self, name: str, value: object, why: str, evidence: str) -> None:
        self.say(f"{name}: {value}")


class Drawing(Dataset[Any]):
    """Rows with noise from every kind of generator, its own too."""

    def __init__(self, rows: int = 80) -> None:
        self.rows = rows
        self.own = np.random.default_rng(5)
        self.read = 0
        self.table = torch.arange(100_000, dtype=torch.float32)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> Any:
        self.read += 1
        noise = self.own.normal() + np.random.normal() + random.random()
        return self.table[number : number + 3] / self.rows + noise + torch.randn(3), number % 2


class Noisy(Small):
    """Draws in its step, and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(
            torch.nn.Linear(3, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(),
            torch.nn.Linear(8, 2),
        )
        self.kept: list[float] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.kept.append(float(loss.detach()))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trainer_of(folder: Path, *callbacks: L.Callback, **settings: Any) -> L.Trainer:
    given = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "enable_checkpointing": False,
        "default_root_dir": folder,
    }
    return L.Trainer(callbacks=list(callbacks), **(QUIET | given | settings))
