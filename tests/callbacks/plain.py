"""A small module and loader of nobody's framework, and a plain Trainer with a table of all that is
logged.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset

ROWS = 40
BATCH = 4


class Rows(Dataset[Any]):
    """Rows of numbers, each as slow to read as asked."""

    def __init__(self, slow_s: float = 0.0) -> None:
        self.slow_s = slow_s

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> Any:
        time.sleep(self.slow_s)
        return torch.full((3,), float(number)), number % 2


class Small(L.LightningModule):
    """A linear layer whose parts are as slow as asked."""

    def __init__(self, **slow_s: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.slow_s = {
            "forward": 0.0,
            "backward": 0.0,
            "optimizer": 0.0,
            "validation": 0.0,
        } | slow_s

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        time.sleep(self.slow_s["forward"])
        numbers, targets = batch
        answers = self.layer(numbers)
        if self.slow_s["backward"]:
            answers.register_hook(lambda gradient: time.sleep(self.slow_s["backward"]))
        return torch.nn.functional.cross_entropy(answers, targets)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        time.sleep(self.slow_s["validation"])
        self.log("val/loss", self.layer(batch[0]).mean())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        time.sleep(self.slow_s["optimizer"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class TwoOptimizers(Small):
    """Each batch is a step of two optimizers, which Lightning counts as two."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=1e-4) for _ in range(2)]


def loader(slow_s: float = 0.0) -> DataLoader[Any]:
    return DataLoader(Rows(slow_s), BATCH)


def train(
    folder: Path,
    callbacks: list[L.Callback],
    module: L.LightningModule | None = None,
    *,
    slow_s: float = 0.0,
    **settings: Any,
) -> L.Trainer:
    """A plain Trainer, after training."""
    given: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": CSVLogger(str(folder), name="", version=""),
        "enable_checkpointing": False,
        "enable_progress_bar": any(isinstance(each, ProgressBar) for each in callbacks),
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "default_root_dir": str(folder),
    }
    trainer = L.Trainer(callbacks=callbacks, **(given | settings))
    trainer.fit(module or Small(), loader(slow_s), loader())
    return trainer
