"""All curves of a run in one callback: its parts count, and each flush goes to all listeners at
once.

The parts are the step timer, the throughput and the hardware monitor; each works alone in a plain
Trainer. Together they cost Lightning one hook a step instead of three. The losses of a fast loop
come over in one transfer a flush, the one wait for the device. A flush is a row of `metrics.csv`, a
point of each curve and a turn of the progress line.
"""

from __future__ import annotations

import csv
import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

import lightning as L

from flatout.callbacks.clock import Clock
from flatout.callbacks.curve_source import CurveSource, fast_steps_of
from flatout.callbacks.gpu import CURVES
from flatout.callbacks.hardware_monitor import HardwareMonitor
from flatout.callbacks.step_timer import StepTimer
from flatout.callbacks.throughput import Throughput
from flatout.engine.lightning_internals import is_fitting

EARLY = 40  # optimizer steps after which a first verdict is possible


class Listener(Protocol):
    """What receives each flush and each validation."""

    def on_flush(self, step: int, epoch: float, values: dict[str, float]) -> None: ...
    def on_validation(self, step: int, epoch: float, values: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class RunCurves(CurveSource):
    """Counts by its parts, and hands each flush and each validation to its listeners."""

    def __init__(
        self,
        listeners: Sequence[Listener],
        every_n_steps: int = 50,
        *,
        timer: StepTimer | None = None,
        throughput: Throughput | None = None,
        monitor: HardwareMonitor | None = None,
    ) -> None:
        super().__init__(every_n_steps)
        self.listeners = list(listeners)
        self.timer = timer or StepTimer(callbacks={})
        self.throughput = throughput or Throughput()
        self.monitor = monitor or HardwareMonitor(sources=[])
        self.parts = (self.throughput, self.timer, self.monitor)
        # called once, after some dozens of steps
        self.judge_early: Callable[[], None] | None = None

    @property
    def clock(self) -> Clock:
        return self.timer.clock

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for part in self.parts:
            part.setup(trainer, pl_module, stage)

    def flush(self, trainer: L.Trainer) -> None:
        if not self._batches_since:
            return
        asked = time.perf_counter()
        fast = fast_steps_of(trainer)
        losses, norms = ([], []) if fast is None else fast.take_losses()
        if trainer.strategy.root_device.type == "cuda":  # the wait was for the device's own work
            asked = time.perf_counter()
        values = {name: value for part in self.parts for name, value in part.take(trainer).items()}
        if losses:
            values["train/loss"] = sum(losses) / len(losses)
        if norms:
            values["train/gradient_norm"] = sum(norms) / len(norms)
        # none where nothing is trained
        groups = [group for each in trainer.optimizers for group in each.param_groups]
        if fast is not None or groups:
            values["train/lr"] = groups[0]["lr"] if fast is None else fast.rate
        self._steps_since = 0
        self._batches_since = 0
        self._hand("on_flush", trainer, values)
        self.clock.spend("logging", time.perf_counter() - asked)
        if self.judge_early is not None and trainer.global_step >= EARLY:
            judge, self.judge_early = self.judge_early, None
            judge()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if is_fitting(trainer):
            values = {
                f"val/{name}": value for name, value in getattr(pl_module, "results", {}).items()
            }
            self._hand("on_validation", trainer, values)
        super().on_validation_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        kept = {"throughput": self.throughput.state_dict(), "timer": self.timer.state_dict()}
        return kept | {"files": [each.file.tell() for each in self._files()]} | self.distance()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.throughput.load_state_dict(state_dict["throughput"])
        self.timer.load_state_dict(state_dict["timer"])
        self.restore_distance(state_dict)
        for file, size in zip(self._files(), state_dict["files"], strict=False):
            file.cut(size)

    def _files(self) -> list[MetricsFile]:
        return [
            each
            for each in self.listeners
            if isinstance(each, MetricsFile) and not each.file.closed
        ]

    def _hand(self, event: str, trainer: L.Trainer, values: dict[str, float]) -> None:
        """Hand values to the listeners; one that cannot write is dropped, and training
        continues.
        """
        # The number of batches is infinite for a stream.
        share = (trainer.fit_loop.epoch_loop.batch_idx + 1) / (trainer.num_training_batches or 1)
        epoch = min(trainer.current_epoch + share, float(trainer.max_epochs or 1e9))
        for listener in list(self.listeners):
            try:
                getattr(listener, event)(trainer.global_step, epoch, values)
            except OSError as error:
                self.listeners = [each for each in self.listeners if each is not listener]
                warnings.warn(
                    f"{type(listener).__name__} ends here: {error}", RuntimeWarning, stacklevel=2
                )


class MetricsFile:
    """`metrics.csv`: one row for each flush and each validation, in fixed columns, readable while
    the run trains.
    """

    def __init__(self, path: Path, metrics: list[str], *, is_new: bool = True) -> None:
        """`is_new` false: the rows that the file has stay, as a resumed run needs."""
        self.columns = ["step", "epoch", *CURVES, *(f"val/{name}" for name in metrics)]
        self.file: TextIO = path.open("w" if is_new else "a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self.file, self.columns, extrasaction="ignore")
        if self.file.tell() == 0:
            self._writer.writeheader()

    def on_flush(self, step: int, epoch: float, values: dict[str, float]) -> None:
        row = {name: f"{value:.6g}" for name, value in values.items()}
        self._writer.writerow({"step": step, "epoch": f"{epoch:.4f}", **row})
        self.file.flush()

    on_validation = on_flush

    def cut(self, size: int) -> None:
        """Remove rows that were written after a checkpoint: the run will write them again."""
        if self.file.seek(0, os.SEEK_END) > size:
            self.file.truncate(size)
            self.file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self.file.close()
