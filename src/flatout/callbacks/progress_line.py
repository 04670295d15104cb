"""The line that says how training goes: live on a terminal, a plain line a validation elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressLine:
    """Listens to flushes: step, loss and speed; after each validation one line stays."""

    def __init__(self, total_steps: int, metric: str, say: Callable[[str], None], *, live: bool) -> None:
        self.total_steps, self.metric, self.say = total_steps, metric, say
        console = Console(stderr=True)
        self._loss = float("nan")
        self._bar = Progress(
            TextColumn("step"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}  {task.description}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (live and console.is_terminal),
        )
        self._task = self._bar.add_task("", total=total_steps)
        self._bar.start()

    def on_flush(self, step: int, epoch: float, values: dict[str, float]) -> None:
        self._loss = values.get("train/loss", self._loss)
        text = f"loss {self._loss:.4f}  {values['speed/rows_per_s']:,.0f} rows/s"
        self._bar.update(self._task, completed=step, description=text)

    def on_validation(self, step: int, epoch: float, values: dict[str, float]) -> None:
        shown = values[f"val/{self.metric}"]
        loss = f"train loss {self._loss:.4f}  val loss {values['val/loss']:.4f}"
        self.say(f"epoch {epoch:6.2f}  step {step:6d}  {loss}  val {self.metric} {shown:.4f}")

    def close(self) -> None:
        self._bar.stop()
