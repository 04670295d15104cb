"""What batches take to come out of a loader, apart from all that Lightning does between two batches."""

from __future__ import annotations

import time
from typing import Any

import lightning as L

from flatout.callbacks.clock import FIRST_STEPS
from flatout.engine.lightning_internals import set_fetch_hooks


class FetchTimes(L.Callback):
    """Seconds of each fetch; the first of a later epoch counts from its start, in which workers may start."""

    def __init__(self) -> None:
        self._fetched, self._seconds, self._asked = 0, 0.0, 0.0
        self._is_starting = False
        self.loader: Any = None
        """What was read; a Trainer forgets it when it evaluates."""

    @property
    def ms(self) -> float | None:
        """Of a batch, without those of the first few steps; None where nothing was seen."""
        count = self._fetched - FIRST_STEPS
        return 1000 * self._seconds / count if count > 0 else None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        set_fetch_hooks(trainer, self._ask, self._receive)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._asked, self._is_starting = time.perf_counter(), True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.loader = trainer.train_dataloader
        set_fetch_hooks(trainer, None, None)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        set_fetch_hooks(trainer, None, None)

    def _ask(self) -> None:
        if not self._is_starting:
            self._asked = time.perf_counter()
        self._is_starting = False

    def _receive(self) -> None:
        self._fetched += 1
        if self._fetched > FIRST_STEPS:
            self._seconds += time.perf_counter() - self._asked
