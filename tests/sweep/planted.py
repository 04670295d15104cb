"""Callbacks that go wrong in the middle of training, as other people's code does."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning as L


class Planted(L.Callback):
    """Does what it was told after its first batches."""

    def __init__(self, what: str, after: int = 3) -> None:
        self.what = what
        self.after = after

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *rest: Any
    ) -> None:
        if trainer.global_step < self.after:
            return
        if self.what == "raise":
            raise ValueError("planted here")
        if self.what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "hang":
            time.sleep(1000)
        if self.what == "slow":  # on and on, and hardly any processor time
            time.sleep(0.1)


class PlantedByNumber(L.Callback):
    """Ends its process in one trial of a sweep and hangs in another, by the trials' numbers."""

    def __init__(self, crash: int, hang: int) -> None:
        self.crash = crash
        self.hang = hang

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        number = Path(trainer.default_root_dir).name
        if number == str(self.crash):
            os.kill(os.getpid(), signal.SIGKILL)
        if number == str(self.hang):
            time.sleep(1000)
