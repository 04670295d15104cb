"""What a run does differently for texts and for bit strings; everything else is the same run.

A kind knows how to build the model and the task for its data, what to do before training starts and after it has
ended, and what is left behind to answer with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from flatout.data.batches.feed import Feed
from flatout.data.store.report import CacheReport
from flatout.data.store.store import Store
from flatout.engine.optimizer import OptimConfig
from flatout.run.run_folder import RunFolder
from flatout.tasks.task import Task


class Prepared(Protocol):
    """Data that is ready to train on."""

    @property
    def store(self) -> Store: ...

    @property
    def report(self) -> CacheReport: ...

    @property
    def source(self) -> str: ...

    @property
    def facts(self) -> dict[str, Any]: ...

    def summary(self) -> dict[str, Any]:
        """What `summary.json` says of the data."""
        ...


class Answers(Protocol):
    """Whatever answers for new rows after training."""

    def predict(self, rows: Sequence[Any]) -> list[Any]: ...

    def save(self, folder: Path, model_config: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Feeds:
    """The batches of each split; no test feed where there are no test rows."""

    train: Feed
    validation: Feed
    test: Feed | None


class Kind(ABC):
    """The parts of a run that depend on what its rows are."""

    data: Prepared
    counts_tokens: bool = True
    """Whether tokens a second mean anything to a person."""

    @property
    def store(self) -> Store:
        return self.data.store

    @abstractmethod
    def build_model(self, model: Any, place: RunFolder) -> nn.Module:
        """The model of the settings."""

    @abstractmethod
    def build_task(self, model: nn.Module, task: Any, optim: OptimConfig, *, total_steps: int, seed: int) -> Task:
        """The loss and the metrics."""

    @abstractmethod
    def predictor(self, task: Task) -> Answers:
        """What answers for new rows."""

    def before_training(self, task: Task, feeds: Feeds, place: RunFolder) -> None:
        """What is known in closed form; nothing for most."""
        return

    def before_probe(self, task: Task, feeds: Feeds) -> None:
        """What makes a step cost what it will cost, where only its speed is looked at; nothing for most."""
        return

    def after_best(self, task: Task, feeds: Feeds, place: RunFolder) -> None:
        """What is tuned on the validation rows when the best weights are known; nothing for most."""
        return

    def after_training(self, task: Task, feeds: Feeds, place: RunFolder) -> None:
        """What a run finds out beyond its metrics; nothing for most."""
        return
