"""Base class of callbacks with curves: count each batch on the host, log every n optimizer steps.

A flush is one call of each logger of the Trainer. It happens after every n optimizer steps, before
each validation, and at the end of each epoch. The step of a point is the one that Lightning would
give to `self.log` there. Nothing here waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from flatout.callbacks.clock import FIRST_STEPS, find_clock
from flatout.engine.fast_loop import FastLoop, fast_loop_of
from flatout.engine.lightning_internals import callbacks_of, is_fitting, step_of_loggers
from flatout.errors import require


class CurveSource(Callback):
    """A callback that logs curves. A subclass overrides `count`, `take`, and others as needed."""

    # Sources that count for this one. They receive every call that this one receives.
    parts: tuple[CurveSource, ...] = ()

    def __init__(self, every_n_steps: int = 50) -> None:
        require(every_n_steps >= 1, "every_n_steps", f"{every_n_steps}", allowed="1 or more")
        self.every_n_steps = every_n_steps
        self._steps_since = 0
        self._batches_since = 0
        self._step = 0
        self._ended = 0
        # At which step `self.log` writes in the last batch. At the end of an epoch Lightning has
        # counted on, but writes at the step of that batch, too.
        self._step_of_log = 0
        self._paused_at = time.perf_counter()

    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Called when training starts."""
        for part in self.parts:
            part.begin(trainer, pl_module)

    def count(self, batch: object) -> None:
        """Called after each batch."""
        for part in self.parts:
            part.count(batch)

    def end_step(self, step: int) -> None:
        """Called after each batch that ended optimizer steps; `step` counts such batches from 1."""
        for part in self.parts:
            part.end_step(step)

    def count_stretch(self, batches: Sequence[object]) -> None:
        """Called after batches that each ended a step, where their steps were taken at once."""
        for part in self.parts:
            part.count_stretch(batches)

    def settle(self) -> None:
        """Called when training is complete: add what came after the last flush to the total.

        That may be a checkpoint.
        """
        for part in self.parts:
            part.settle()

    def end(self) -> None:
        """Called when training has ended, perhaps by an error, and perhaps twice.

        Undo changes to the trainer and other objects.
        """
        for part in self.parts:
            part.end()

    def leave_out(self, seconds: float, *, is_validation: bool = False) -> None:
        """Exclude seconds that were just spent outside of any step."""
        for part in self.parts:
            part.leave_out(seconds, is_validation=is_validation)

    def take(self, trainer: L.Trainer) -> dict[str, float]:
        """Values since the last flush, by curve name; the counts start again."""
        return {}

    def flush(self, trainer: L.Trainer) -> None:
        """Log what was counted since the last flush."""
        if not self._batches_since:
            return
        began = time.perf_counter()
        self._steps_since = 0
        self._batches_since = 0
        if values := self.take(trainer):
            for logger in trainer.loggers:
                logger.log_metrics(values, step=self._step_of_log)
                logger.save()
        seconds = time.perf_counter() - began
        clock = find_clock(callbacks_of(trainer))
        if clock is not None:
            clock.spend("logging", seconds)

    def distance(self) -> dict[str, int]:
        """For a checkpoint: steps and batches since the last flush."""
        return {"steps_since": self._steps_since, "batches_since": self._batches_since}

    def restore_distance(self, state: Mapping[str, Any]) -> None:
        self._steps_since = state["steps_since"]
        self._batches_since = state["batches_since"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        self._ended = self._step
        self._step_of_log = step_of_loggers(trainer)
        self.begin(trainer, pl_module)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        self._batches_since += 1
        self._step_of_log = step_of_loggers(trainer)
        self.count(batch)
        step = trainer.global_step
        if step != self._step:
            self._step = step
            self._steps_since += 1
            self._ended += 1
            self.end_step(self._ended)
            if self._steps_since >= self.every_n_steps:
                self.flush(trainer)

    def steps_to_hook(self, trainer: L.Trainer) -> int:
        """How many steps there are up to the next flush, whose batch it must hear of."""
        # The first steps are counted apart.
        return 1 if self._ended < FIRST_STEPS else self.every_n_steps - self._steps_since

    def end_stretch(self, trainer: L.Trainer, batches: Sequence[object]) -> None:
        """Called after batches whose steps were taken at once."""
        self._batches_since += len(batches)
        self._steps_since += len(batches)
        self._step = trainer.global_step
        self._step_of_log = step_of_loggers(trainer)
        self.count_stretch(batches)
        self._ended += len(batches)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.flush(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if is_fitting(trainer):
            self.flush(trainer)
            self._paused_at = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if is_fitting(trainer):
            self.leave_out(time.perf_counter() - self._paused_at, is_validation=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.flush(trainer)
        self.settle()
        self.end()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self.end()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.end()  # a Tuner ends its search without any other hook


def fast_steps_of(trainer: L.Trainer) -> FastLoop | None:
    """The fast loop that takes the steps of this training; None if Lightning's loop does."""
    loop = fast_loop_of(trainer)
    return loop if loop is not None and loop.is_active else None


def leave_out(trainer: L.Trainer, seconds: float) -> None:
    """Exclude seconds just spent outside of any step from the counts of all callbacks."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, CurveSource):
            callback.leave_out(seconds)
