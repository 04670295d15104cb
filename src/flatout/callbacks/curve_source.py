"""The frame of a callback with curves: count each batch on the host, log every n optimizer steps.

Nothing here waits for the device. Curves reach all loggers of the Trainer in one call a flush:
after every n optimizer steps, before each validation, and at the end of each epoch; at the step
that Lightning gives what a module logs there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from flatout.callbacks.clock import Clock
from flatout.engine.fast_loop import FastLoop, fast_loop_of
from flatout.engine.lightning_internals import callbacks_of, is_fitting, step_of_loggers
from flatout.errors import require


class CurveSource(Callback):
    """A callback that logs its own curves; a subclass defines what it counts and what it takes from
    its counts.
    """

    # sources that count for this one: they hear of everything that it hears of
    parts: tuple[CurveSource, ...] = ()

    def __init__(self, every_n_steps: int = 50) -> None:
        require(every_n_steps >= 1, "every_n_steps", f"{every_n_steps}", allowed="1 or more")
        self.every_n_steps = every_n_steps
        self._steps_since = 0
        self._batches_since = 0
        self._step = 0
        self._ended = 0
        self._paused_at = time.perf_counter()

    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Training starts."""
        for part in self.parts:
            part.begin(trainer, pl_module)

    def count(self, batch: Any) -> None:
        """A batch has ended."""
        for part in self.parts:
            part.count(batch)

    def end_step(self, step: int) -> None:
        """A batch has ended with a step, of however many optimizers; it is the number `step`, from
        1.
        """
        for part in self.parts:
            part.end_step(step)

    def settle(self) -> None:
        """Training is complete: what came after the last flush joins the total, such as a
        checkpoint.
        """
        for part in self.parts:
            part.settle()

    def end(self) -> None:
        """Training has ended, perhaps by an error: give back what was replaced. May come twice."""
        for part in self.parts:
            part.end()

    def leave_out(self, seconds: float, *, is_validation: bool = False) -> None:
        """Not count seconds that something just spent outside of any step."""
        for part in self.parts:
            part.leave_out(seconds, is_validation=is_validation)

    def take(self, trainer: L.Trainer) -> dict[str, float]:
        """Values since the last flush, by curve name."""
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
                logger.log_metrics(values, step=step_of_loggers(trainer))
                logger.save()
        clocks = (getattr(each, "clock", None) for each in callbacks_of(trainer))
        if clock := next((each for each in clocks if isinstance(each, Clock)), None):
            clock.spend("logging", time.perf_counter() - began)

    def distance(self) -> dict[str, int]:
        """How far this is from its next flush, for a checkpoint."""
        return {"steps_since": self._steps_since, "batches_since": self._batches_since}

    def restore_distance(self, state: Mapping[str, Any]) -> None:
        self._steps_since, self._batches_since = state["steps_since"], state["batches_since"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        self._ended = self._step
        self.begin(trainer, pl_module)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._batches_since += 1
        self.count(batch)
        step = trainer.global_step
        if step != self._step:
            self._step = step
            self._steps_since += 1
            self._ended += 1
            self.end_step(self._ended)
            if self._steps_since >= self.every_n_steps:
                self.flush(trainer)

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
    """The fast loop that takes the steps of this training; None where Lightning's own does."""
    loop = fast_loop_of(trainer)
    return loop if loop is not None and loop.is_serving else None


def leave_out(trainer: L.Trainer, seconds: float) -> None:
    """Let no callback of this Trainer count seconds that were just spent outside of any step."""
    for each in callbacks_of(trainer):
        if isinstance(each, CurveSource):
            each.leave_out(seconds)
