"""All curves of a run in one callback, which passes each flush to its listeners.

Its parts (step timer, throughput, hardware monitor) count; each of them also works alone in a plain
Trainer. Together they cost one hook a step instead of three. A flush is one row of `metrics.csv`,
one point of each curve, and one update of the progress line. It reads the fast loop's losses in one
transfer, the only wait for the device.
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
from flatout.callbacks.each_second import EachSecond
from flatout.callbacks.gpu import CURVES
from flatout.callbacks.hardware_monitor import HardwareMonitor
from flatout.callbacks.step_timer import StepTimer
from flatout.callbacks.throughput import Throughput
from flatout.engine.lightning_internals import is_fitting

EARLY = 40  # optimizer steps after which a first verdict is possible


class Listener(Protocol):
    """Receives each flush and each validation: a file, a logger, the progress line."""

    def on_flush(self, step: int, epoch: float, values: dict[str, float]) -> None: ...
    def on_validation(self, step: int, epoch: float, values: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class RunCurves(CurveSource):
    """Lets its parts count, and passes each flush and each validation to its listeners."""

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
        # Called once, at the first flush after `EARLY` steps.
        self.judge_early: Callable[[], None] | None = None
        # Called with the step about once a second, between flushes too.
        self.each_second: list[Callable[[int], None]] = []
        self._seconds = EachSecond()

    @property
    def clock(self) -> Clock:
        return self.timer.clock

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for part in self.parts:
            part.setup(trainer, pl_module, stage)

    def flush(self, trainer: L.Trainer) -> None:
        if not self._batches_since:
            return
        began = time.perf_counter()
        fast = fast_steps_of(trainer)
        losses, norms = ([], []) if fast is None else fast.take_losses()
        if trainer.strategy.root_device.type == "cuda":
            # `take_losses` has waited for the steps that the device still computed. That is their
            # time, not the logging's.
            began = time.perf_counter()
        values = dict[str, float]()
        for part in self.parts:
            values.update(part.take(trainer))
        if losses:
            values["train/loss"] = sum(losses) / len(losses)
        if norms:
            values["train/gradient_norm"] = sum(norms) / len(norms)
        # The first group of the first optimizer; a module that trains nothing has none.
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if fast is not None:
            values["train/lr"] = fast.last_lr
        elif groups:
            values["train/lr"] = groups[0]["lr"]
        self._steps_since = 0
        self._batches_since = 0
        self._hand("on_flush", trainer, values)
        self.clock.spend("logging", time.perf_counter() - began)
        if self.judge_early is not None and trainer.global_step >= EARLY:
            judge = self.judge_early
            self.judge_early = None
            judge()

    def on_train_batch_end(self, trainer: L.Trainer, *others: Any) -> None:
        super().on_train_batch_end(trainer, *others)
        if self.each_second and self._seconds.is_over():
            for show_step in self.each_second:
                show_step(trainer.global_step)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if is_fitting(trainer):
            values = {
                f"val/{name}": value for name, value in getattr(pl_module, "results", {}).items()
            }
            self._hand("on_validation", trainer, values)
        super().on_validation_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {
            "throughput": self.throughput.state_dict(),
            "timer": self.timer.state_dict(),
            "files": [metrics.file.tell() for metrics in self._files()],
        } | self.distance()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.throughput.load_state_dict(state_dict["throughput"])
        self.timer.load_state_dict(state_dict["timer"])
        self.restore_distance(state_dict)
        for metrics, size in zip(self._files(), state_dict["files"], strict=False):
            metrics.cut(size)

    def _files(self) -> list[MetricsFile]:
        files = [listener for listener in self.listeners if isinstance(listener, MetricsFile)]
        return [metrics for metrics in files if not metrics.file.closed]

    def _hand(self, event: str, trainer: L.Trainer, values: dict[str, float]) -> None:
        """Call the method `event` of each listener; drop a listener that cannot write.

        Training continues without that listener, after a warning.
        """
        # The number of batches of a stream is infinite, which gives 0.
        share = (trainer.fit_loop.epoch_loop.batch_idx + 1) / (trainer.num_training_batches or 1)
        epoch = min(trainer.current_epoch + share, float(trainer.max_epochs or 1e9))
        for listener in list(self.listeners):
            try:
                getattr(listener, event)(trainer.global_step, epoch, values)
            except OSError as error:
                self.listeners = [other for other in self.listeners if other is not listener]
                warnings.warn(
                    f"{type(listener).__name__} ends here: {error}", RuntimeWarning, stacklevel=2
                )


class MetricsFile:
    """Writes `metrics.csv`: one row for each flush and each validation, in fixed columns.

    Each row is written at once, so that others can read the file while the run trains.
    """

    def __init__(self, path: Path, metrics: list[str], *, is_new: bool = True) -> None:
        """`metrics`: names of the validation metrics. `is_new=False`: append, as a resumed run."""
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
        """Remove what follows the first `size` bytes: rows that a resumed run will write again."""
        if self.file.seek(0, os.SEEK_END) > size:
            self.file.truncate(size)
            self.file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self.file.close()
