"""One line of progress: live on a terminal, and one lasting line for each validation.

In a plain Trainer it takes the place of Lightning's own bar: step, loss of the last batch, rows a
second where a `Throughput` runs beside it. It reads one number of the device every n steps, never
each step.
"""

from __future__ import annotations

import re
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from flatout.callbacks.throughput import Throughput
from flatout.engine.lightning_internals import callbacks_of, is_fitting
from flatout.errors import require
from flatout.run_log import Say

_OF_VALIDATION = re.compile("(^|[/_])val")
_MOST_SHOWN = 3  # metrics of a validation in its line, where none was named


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
        """`metric`: the one to show of each validation, without `val/`; None: the first few."""
        super().__init__()
        require(every_n_steps >= 1, "every_n_steps", f"{every_n_steps}", allowed="1 or more")
        self.every_n_steps = every_n_steps
        self.metric = metric
        self.total_steps = total_steps
        self.say = say
        self._is_live = live
        self._step = 0
        self._total = total_steps
        # of the last flush; None where none is known, as in manual optimisation
        self._loss: float | None = None
        self._newest: Any = None  # the loss of the last batch, on its device
        self._bar: Progress | None = None

    def on_flush(self, step: int, epoch: float, values: dict[str, float]) -> None:
        """Show a step with its values on the live line."""
        self._loss = values.get("train/loss", self._loss)
        bar = self._open()
        speed = (
            f"  {rows:,.0f} rows/s" if (rows := values.get("speed/rows_per_s")) is not None else ""
        )
        loss = "" if self._loss is None else f"loss {self._loss:.4f}"
        bar.update(bar.task_ids[0], completed=step, description=f"{loss}{speed}")

    def on_validation(self, step: int, epoch: float, values: dict[str, float]) -> None:
        """Say the metrics of a validation."""
        known = {"train": self._loss, "val": values.get("val/loss")}
        losses = "  ".join(
            f"{split} loss {loss:.4f}" for split, loss in known.items() if loss is not None
        )
        names = [name for name in values if name != "val/loss"]
        names = [own] if (own := f"val/{self.metric}") in names else names[:_MOST_SHOWN]
        shown = "  ".join(f"{name.replace('/', ' ')} {values[name]:.4f}" for name in names)
        self.say("  ".join(filter(None, [f"epoch {epoch:6.2f}  step {step:6d}", losses, shown])))

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no live line, as those of Lightning's own bars have none."""
        return {**vars(self), "_bar": None, "_newest": None}

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def disable(self) -> None:
        """Stay silent: Lightning asks the ranks after the first to."""
        self._is_live = False
        self.say = say_nothing

    def enable(self) -> None:
        self._is_live = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        total = self.total_steps or trainer.estimated_stepping_batches
        self._total = int(total) if 0 < total < float("inf") else None  # of a stream nobody knows
        self._open()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        step = trainer.global_step
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        self._newest = None if getattr(loss, "numel", int)() > 1 else loss
        if step != self._step and step % self.every_n_steps == 0:
            self.on_flush(step, 0.0, self._shown_of_step(trainer))
        self._step = step

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if is_fitting(trainer):
            self._loss = self._shown_of_step(trainer).get("train/loss", self._loss)
            logged = trainer.callback_metrics.items()
            found = {
                re.sub("^val[/_]", "", name): float(value)
                for name, value in logged
                if _OF_VALIDATION.search(name)
            }
            part = (
                trainer.fit_loop.epoch_loop.batch_progress.current.ready
                / trainer.num_training_batches
            )
            epoch = trainer.current_epoch + (part or 1.0)  # of a stream whole ones alone are known
            self.on_validation(
                trainer.global_step, epoch, {f"val/{name}": value for name, value in found.items()}
            )

    def on_train_end(self, *_: Any) -> None:
        self.close()

    def on_exception(self, *_: Any) -> None:
        self.close()

    def _open(self) -> Progress:
        if self._bar is None:
            console = Console(stderr=True)
            self._bar = Progress(
                TextColumn("step"),
                BarColumn(bar_width=24),
                TextColumn(
                    f"{{task.completed:.0f}}{f'/{self._total}' if self._total else ''} "
                    " {task.description}"
                ),
                TimeRemainingColumn(),
                console=console,
                transient=True,
                disable=not (self._is_live and console.is_terminal),
            )
            self._bar.add_task("", total=self._total)
            self._bar.start()
        return self._bar

    def _shown_of_step(self, trainer: L.Trainer) -> dict[str, float]:
        """Loss of the last batch, which waits for the device, and rows a second of the training so
        far.
        """
        values = {} if self._newest is None else {"train/loss": float(self._newest)}
        for each in callbacks_of(trainer):
            if isinstance(each, Throughput) and (total := each.volume.total).seconds:
                values["speed/rows_per_s"] = total.values()["speed/rows_per_s"]
        return values


def say_nothing(line: str) -> None:
    """What ranks after the first say."""
