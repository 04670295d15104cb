"""A trial of a sweep and how it ended, and the board that shows all of them.

On a terminal the board is a live table; elsewhere it prints a line for each trial that ends. Open
this file to change what is shown while trials run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flatout.masking import mask_words

Status = StrEnum("Status", "complete pruned failed stopped")  # how a trial ended


class TrialResult(Protocol):
    """What a trial brings back."""

    @property
    def objective(self) -> float | None: ...

    @property
    def metrics(self) -> dict[str, float]: ...

    @property
    def spent(self) -> dict[str, float]:
        """`kwh` and `money`, as far as they are known."""


class TrialJob(Protocol):
    """What a trial trains: `RunJob`, a run of ours, or `ScriptJob`, a script of the user's own."""

    @property
    def name(self) -> str:
        """What a list of such trials is called."""

    @property
    def command(self) -> list[str]:
        """What is typed before the words of a trial to train it alone."""

    @property
    def metric(self) -> str:
        """The validation metric to compare by, without `val/`."""

    @property
    def metrics(self) -> list[str]:
        """The metrics to choose from."""

    @property
    def mode(self) -> str:
        """Whether the metric is better when higher (`max`) or lower (`min`)."""

    @property
    def validations(self) -> int | None:
        """How many times it validates; None: unknown."""

    def train(self, folder: Path, overrides: Sequence[str], *, resumes: bool) -> TrialResult:
        """Train in a folder, from the beginning or from what lies there."""

    def can_resume(self, folder: Path, overrides: Sequence[str]) -> bool:
        """Whether the folder holds what an interrupted trial of these words left."""

    def is_finished(self, folder: Path, overrides: Sequence[str]) -> bool:
        """Whether nothing is left to train there."""

    def read_ending(self, folder: Path) -> tuple[float, dict[str, float]]:
        """The seconds and the metrics of a trial that has finished there."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of many."""

    number: int
    folder: Path
    job: TrialJob
    overrides: list[str]  # everything that was typed, for this trial
    changed: list[str]  # the words that tell it from the others
    # whether its folder may hold an interrupted run, which is resumed; else it must be new
    is_again: bool = False
    name: str = ""  # what it is called, where that is not its number


@dataclass(frozen=True, slots=True)
class Ending:
    """How a trial ended, and its metrics."""

    status: Status
    seconds: float
    # the validation metric of its best checkpoint; of a pruned trial the last one seen
    value: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    note: str = ""  # why it failed, or where it was pruned
    is_mistake: bool = False


Ask = Callable[[], Trial | None]  # gives the next trial; None when there are no more
# whether to end it, by a validation's number (from 1) and its metric
Judge = Callable[[Trial, int, float], bool]
_MOST_ROWS = 12  # of ended trials in the live table
_REDRAW_S = 0.5
_COLOURS = {
    "complete": "green",
    "pruned": "yellow",
    "failed": "red",
    "running": "cyan",
    "stopped": "yellow",
}


class Board:
    """Shows every trial that starts, is validated and ends."""

    def __init__(self, title: str, metric: str, mode: str, total: int) -> None:
        self.title = title
        self.metric = metric
        self.mode = mode
        self.total = total
        console = Console()
        # shows nothing until it is started
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._running: dict[int, _Row] = {}
        self._ended: list[_Row] = []
        self._drawn = 0.0
        if console.is_terminal:
            self._live.start()

    def started(self, trial: Trial) -> None:
        self._running[trial.number] = _Row(
            trial.name or f"trial {trial.number}", " ".join(mask_words(trial.changed))
        )
        self.draw(now=True)

    def read(self, trial: Trial, count: int, value: float) -> None:
        """Show a validation: its number, from 1, and its value."""
        row = self._running[trial.number]
        row.count = count
        row.value = value

    def ended(self, trial: Trial, ending: Ending) -> None:
        row = self._running.pop(trial.number)
        row.status = ending.status.value
        row.seconds = ending.seconds
        row.note = ending.note
        row.value = ending.value
        self._ended.append(row)
        self.draw(now=True)
        value = "" if row.value is None else f"{self.metric} {row.value:.4f}"
        words = ", ".join(filter(None, [row.status, value, f"{row.seconds:.1f} s", row.note]))
        print(f"{row.label}: {words}  {row.settings}")

    def draw(self, *, now: bool = False) -> None:
        """Draw the live table again, at once or if the last time is half a second ago."""
        if self._live.is_started and (now or time.monotonic() - self._drawn > _REDRAW_S):
            self._drawn = time.monotonic()
            self._live.update(self.table(), refresh=True)

    def table(self) -> Table:
        """Running trials, then the best ones, then the latest of the others."""
        title = Text(
            f"{self.title}: {len(self._ended) + len(self._running)} of {self.total} trials"
        )
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for name in ("trial", "", self.metric, "validations", "seconds"):
            table.add_column(name, justify="right" if name else "left")
        table.add_column("settings", overflow="fold")
        # A terminal has room for a few rows only: half are the best ones, half the latest.
        num_each = _MOST_ROWS // 2
        judged = [row for row in self._ended if row.status == "complete" and row.value is not None]
        judged.sort(key=lambda row: row.value or 0.0, reverse=self.mode == "max")
        best = judged[:num_each]
        others = [row for row in self._ended if row not in best][-num_each:]
        for row in [*self._running.values(), *best, *reversed(others)]:
            value = "" if row.value is None else f"{row.value:.4f}"
            status = Text(row.status, style=_COLOURS[row.status])
            words = Text(f"{row.settings}  {row.note}".strip())
            name = row.label.removeprefix("trial ")
            seconds = time.monotonic() - row.begun if row.status == "running" else row.seconds
            table.add_row(name, status, value, f"{row.count or ''}", f"{seconds:.0f}", words)
        return table

    def close(self) -> None:
        self._live.stop()


@dataclass(slots=True)
class _Row:
    label: str
    settings: str
    status: str = "running"
    value: float | None = None
    count: int = 0  # of its validations
    seconds: float = 0.0
    note: str = ""
    begun: float = field(default_factory=time.monotonic)
