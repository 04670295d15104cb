"""A training of a plain `L.Trainer` with exact checkpoints, whole or killed after a batch."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from flatout import BiLSTMConfig, HeadlinesConfig, OptimConfig
from flatout.callbacks import ExactCheckpoint
from flatout.data import TextData
from flatout.engine import FastLoop
from flatout.tasks import Classifier
from tests.callbacks.plain import Rows, Small
from tests.trainers import QUIET, flat_weights

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
SEED = 3
ACCUMULATE = 2


class KillAfter(L.Callback):
    """Ends this process without a word, in the middle of an optimizer step."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            os.kill(os.getpid(), signal.SIGKILL)


class SmallData(L.LightningDataModule):
    """A DataModule with a plain `DataLoader`."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Rows(), 4, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Rows(), 8)


def parts(kind: str) -> tuple[L.LightningModule, L.LightningDataModule]:
    """A module with dropout, whose next step depends on random numbers, and its data."""
    if kind == "foreign":
        return Small(), SmallData()
    config = BiLSTMConfig(embedding=8, hidden=8, dropout=0.3)
    data = TextData(
        sample=HeadlinesConfig(rows=300, eval_rows=60, classes=4), batch_size=16, seed=SEED
    )
    return Classifier(config, optim=OptimConfig(lr=0.01)), data


def train(
    kind: str,
    folder: Path,
    *callbacks: L.Callback,
    resume: bool = False,
    every_steps: int | None = 3,
    **settings: Any,
) -> torch.Tensor:
    """Weights after two epochs; with `resume` they continue from the newest whole checkpoint of
    `folder`.
    """
    L.seed_everything(SEED, verbose=False)
    module, data = parts(kind)
    exact = ExactCheckpoint(folder, every_steps=every_steps, every_minutes=None)
    given: dict[str, Any] = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "num_sanity_val_steps": 0,
        "accumulate_grad_batches": ACCUMULATE,
    }
    trainer = L.Trainer(
        **(QUIET | given | settings),
        callbacks=[*callbacks, exact],
        default_root_dir=folder.parent,
    )
    trainer.fit(module, datamodule=data, ckpt_path=exact.latest() if resume else None)
    return flat_weights(module)


def loops(is_fast: bool) -> list[L.Callback]:
    return [FastLoop()] if is_fast else []


def train_until_killed(kind: str, folder: Path, *, is_fast: bool, batch: int) -> None:
    """A training that ends its process in the middle of an optimizer step."""
    warnings.simplefilter("ignore")
    train(kind, folder, *loops(is_fast), KillAfter(batch))
