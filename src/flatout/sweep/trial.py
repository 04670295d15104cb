"""A trial of a sweep, how it ended, and what a sweep needs of the run behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class Trained(Protocol):
    """What a sweep reads of a finished run."""

    metrics: dict[str, float]

    @property
    def objective(self) -> float:
        """The validation metric of the best checkpoint."""


class Job(Protocol):
    """A run that can be pickled, and started in a process of its own."""

    @property
    def name(self) -> str: ...

    @property
    def seed(self) -> int: ...

    @property
    def metric(self) -> str:
        """The validation metric that decides."""

    @property
    def metrics(self) -> list[str]:
        """The metrics to choose from."""

    @property
    def validations(self) -> int:
        """How many times it validates, if nothing stops it early."""

    def train(self, folder: Path, overrides: Sequence[str], *, resumes: bool) -> Trained:
        """Train it in a folder, from the beginning or from its last checkpoint."""

    def has_begun(self, folder: Path, overrides: Sequence[str]) -> bool:
        """Whether a folder is of this very run, and of no other."""

    def can_resume(self, folder: Path, overrides: Sequence[str]) -> bool:
        """Whether this very run left a whole checkpoint in the folder."""

    def is_finished(self, folder: Path, overrides: Sequence[str]) -> bool:
        """Whether this very run has nothing left to train."""


class Status(StrEnum):
    """How a trial ended."""

    complete = "complete"
    pruned = "pruned"
    failed = "failed"
    stopped = "stopped"


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of many."""

    number: int
    folder: Path
    job: Job
    overrides: list[str]
    """Everything that was typed, for this trial."""
    changed: list[str]
    """What tells it from the others."""
    is_again: bool = False
    """Whether its folder may hold an interrupted run, which is resumed; else it must be new."""
    name: str = ""
    """What it is called, where that is not its number."""

    @property
    def label(self) -> str:
        return self.name or f"trial {self.number}"


@dataclass(frozen=True, slots=True)
class Ending:
    """What became of a trial."""

    status: Status
    seconds: float
    value: float | None = None
    """The validation metric of its best checkpoint; of a pruned trial the last one seen."""
    metrics: dict[str, float] = field(default_factory=dict)
    note: str = ""
    """Why it failed, or where it was pruned."""
    is_mistake: bool = False
    """Whether its settings were a user's mistake."""


Judge = Callable[[Trial, int, float], bool]
"""Gets each validation of a trial (its number, counted from 1, and its metric): whether to end the trial."""
