"""One line of progress: updated in place on a terminal, with one lasting line for each validation.

In a plain Trainer it replaces Lightning's progress bar. It shows the step, the time left, the loss
of the last batch, and rows per second if a `Throughput` is among the callbacks. It moves about each
second, or with each step where steps are slower. The loss is read from the device every n steps,
never in each step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from torch import Tensor

from flatout.callbacks.each_second import EachSecond
from flatout.callbacks.throughput import Throughput
from flatout.engine.lightning_internals import callbacks_of, is_fitting
from flatout.errors import require
from flatout.run_log import Say

_OF_VALIDATION = re.compile("(^|[/_])val")
_SPEED_OF_S = 600.0  # the time left is estimated from the steps of so many last seconds
_MOST_SHOWN = 3  # metrics of a validation in its line, if none was named


class ProgressLine(ProgressBar):
    """Step, loss and speed on a live line; after each validation a line that stays."""

    def __init__(
        self,
        every_n_steps: int = 50,
        *,
        metric: str | None = None,
        total_steps: int | None = None,
        say: Say = print,
        live: bool = True,
    ) -> None:
        """`metric`: the one to show of each validation, without `val/`; None: the first few.

        `say` prints the lasting lines. `live=False`: no line that is updated in place.
        """
        super().__init__()
        require(every_n_steps >= 1, "every_n_steps", f"{every_n_steps}", allowed="1 or more")
        self.every_n_steps = every_n_steps
        self.metric = metric
        self.total_steps = total_steps
        self.say = say
        self._is_live = live
        self._step = 0
        self._total = total_steps
        # Of the last flush; None if unknown, as in manual optimisation.
        self._loss: float | None = None
        # Of the last batch, still on its device: reading it would wait.
        self._newest_loss: Tensor | float | None = None
        self._bar: Progress | None = None
        # Says how much time is left, in place of a guess by the speed of the last steps.
        self.time_left: Callable[[], str] | None = None
        self._seconds = EachSecond()

    def on_flush(self, step: int, epoch: float, values: dict[str, float]) -> None:
        """Show a step with its values on the live line."""
        self._loss = values.get("train/loss", self._loss)
        bar = self._open()
        rows_per_s = values.get("speed/rows_per_s")
        speed = "" if rows_per_s is None else f"  {rows_per_s:,.0f} rows/s"
        loss = "" if self._loss is None else f"loss {self._loss:.4f}"
        bar.update(bar.task_ids[0], completed=step, description=f"{loss}{speed}")

    def show_step(self, step: int) -> None:
        """Move the live line to a step; the loss and the speed stay those of the last flush."""
        bar = self._open()
        bar.update(bar.task_ids[0], completed=step)

    def on_validation(self, step: int, epoch: float, values: dict[str, float]) -> None:
        """Print a lasting line with the losses and metrics of a validation."""
        words = [f"epoch {epoch:5.2f}  step {step:5d}"]
        for split, loss in {"train": self._loss, "val": values.get("val/loss")}.items():
            if loss is not None:
                words.append(f"{split} loss {loss:.4f}")
        names = [name for name in values if name != "val/loss"]
        named = f"val/{self.metric}"
        for name in [named] if named in names else names[:_MOST_SHOWN]:
            words.append(f"{name.replace('/', ' ')} {values[name]:.4f}")
        self.say("  ".join(words))

    def __getstate__(self) -> dict[str, Any]:
        """Copy without the live line, as Lightning's own progress bars do."""
        return {**self.__dict__, "_bar": None, "_newest_loss": None}

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def disable(self) -> None:
        """Print nothing. Lightning calls this on all ranks but the first."""
        self._is_live = False
        self.say = say_nothing

    def enable(self) -> None:
        self._is_live = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        total = self.total_steps or trainer.estimated_stepping_batches
        # None for a stream: its length is unknown.
        self._total = int(total) if 0 < total < float("inf") else None
        self._open()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, *_: Any
    ) -> None:
        step = trainer.global_step
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        has_one_number = not isinstance(loss, Tensor) or loss.numel() == 1
        self._newest_loss = loss if has_one_number else None
        if step != self._step and step % self.every_n_steps == 0:
            self.on_flush(step, 0.0, self._shown_of_step(trainer))
        elif self._seconds.is_over():
            self.show_step(step)
        self._step = step

    def steps_to_hook(self, trainer: L.Trainer) -> int:
        """How many steps there are up to the next whose loss is shown."""
        return self.every_n_steps - trainer.global_step % self.every_n_steps

    def end_stretch(self, trainer: L.Trainer, batches: Sequence[object]) -> None:
        """Called after batches whose steps were taken at once: the next one moves the line."""
        self._step = trainer.global_step

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if is_fitting(trainer):
            self._loss = self._shown_of_step(trainer).get("train/loss", self._loss)
            metrics = {
                re.sub("^(val[/_])?", "val/", name): float(value)
                for name, value in trainer.callback_metrics.items()
                if _OF_VALIDATION.search(name)
            }
            batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            # The length of a stream is infinite, which gives 0: it counts whole epochs.
            share = batches / trainer.num_training_batches or 1.0
            self.on_validation(trainer.global_step, trainer.current_epoch + share, metrics)

    def on_train_end(self, *_: Any) -> None:
        self.close()

    def on_exception(self, *_: Any) -> None:
        self.close()

    def _open(self) -> Progress:
        """The live line, which starts with the first call; invisible where it is not wanted."""
        if self._bar is None:
            console = Console(stderr=True)
            of_total = f"/{self._total}" if self._total else ""
            self._bar = Progress(
                TextColumn("step"),
                BarColumn(bar_width=24),
                TextColumn(f"{{task.completed:.0f}}{of_total}  {{task.description}}"),
                TimeRemainingColumn() if self.time_left is None else TimeLeft(self.time_left),
                console=console,
                transient=True,
                disable=not (self._is_live and console.is_terminal),
                speed_estimate_period=_SPEED_OF_S,
            )
            self._bar.add_task("", total=self._total)
            self._bar.start()
        return self._bar

    def _shown_of_step(self, trainer: L.Trainer) -> dict[str, float]:
        """Loss of the last batch, and rows per second of the training so far.

        Waits for the device.
        """
        values = {} if self._newest_loss is None else {"train/loss": float(self._newest_loss)}
        for callback in callbacks_of(trainer):
            if isinstance(callback, Throughput) and callback.volume.total.seconds:
                values["speed/rows_per_s"] = callback.volume.total.values()["speed/rows_per_s"]
        return values


class TimeLeft(ProgressColumn):
    """A column that shows a text which changes."""

    max_refresh = 0.5

    def __init__(self, describe: Callable[[], str]) -> None:
        super().__init__()
        self.describe = describe

    def render(self, task: Task) -> Text:
        return Text(self.describe(), style="progress.remaining")


def say_nothing(line: str) -> None:
    """Print nothing: `say` of all ranks but the first."""
