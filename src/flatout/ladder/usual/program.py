"""What every usual program gets: the case to train, and a stopwatch for its loop.

A program is a module with two names. `OPTIONS` has the settings that a rung may change; its
defaults are the program as usually written. `PROGRAM` reads the rows, builds the model, trains
epochs and answers the test rows. It hands its loader to `batches` and calls `step` after each
optimizer step:

    for inputs, targets in watch.batches(loader):
        train(inputs, targets)
        watch.step(len(inputs))

The first steps warm up and are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

from flatout.perf.measure.steps import Taken

if TYPE_CHECKING:
    import pandas as pd

WARM_STEPS = 3
Batch = TypeVar("Batch")
Options = TypeVar("Options")


class Stopwatch:
    """Counts rows, tokens and waiting, and ends a loop after some seconds."""

    def __init__(self, seconds: float | None = None) -> None:
        """`seconds`: of counted training; None: no limit."""
        self.limit_s = seconds
        self.spent = Taken()
        self.steps = 0
        self.is_over = False
        self.first_batch_at: float | None = None
        self._since = 0.0

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of a loader until the time is over; waiting for each one is counted."""
        iterator = iter(loader)
        while not self.is_over:
            with self.waiting():
                batch: Any = next(iterator, None)
            if batch is None:
                return
            self.first_batch_at = self.first_batch_at or time.perf_counter()
            yield batch

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts a block as waiting: nothing of the model is computed in it."""
        began = time.perf_counter()
        yield
        self.spent.wait_s += time.perf_counter() - began

    def step(self, rows: int, tokens: int = 0, computed: int = 0) -> None:
        """Count an optimizer step, and see whether the time is over."""
        self.steps += 1
        if self.steps <= WARM_STEPS:
            if self.steps == WARM_STEPS:
                # A GPU still computes the warm steps: they would count as time of the next ones.
                wait_for_device()
                self.spent = Taken()
                self._since = time.perf_counter()
            return
        spent = self.spent
        spent.rows += rows
        spent.tokens += tokens
        spent.computed += computed
        if self.limit_s is not None and time.perf_counter() - self._since >= self.limit_s:
            wait_for_device()
            self.is_over = True
        spent.seconds = time.perf_counter() - self._since


def wait_for_device() -> None:
    """Let a GPU finish what was enqueued; nothing on a CPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training, as a usual program and a run of ours both get it."""

    folder: Path  # where train.csv, validation.csv and test.csv are
    model: Mapping[str, Any] = field(default_factory=dict)  # sizes, by the names of our settings
    # longest row, vocabulary, columns, samples of a window
    reading: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 32
    lr: float = 1e-3
    clip: float = 0.0  # longest gradient; 0: no clipping
    epochs: int = 1
    seed: int = 0

    def rows(self, split: str) -> Path:
        return self.folder / f"{split}.csv"

    def read_texts(self, split: str) -> pd.DataFrame:
        """The rows of a split, each column as texts; an empty text is no missing one."""
        import pandas as pd  # slow to import, and only a program needs it

        return pd.read_csv(self.rows(split), dtype=str, keep_default_na=False)


class UsualProgram(Generic[Options]):
    """Start and update of all usual programs; `how`: the options of one of them."""

    optimizer: torch.optim.Optimizer

    def __init__(self, case: Case, how: Options) -> None:
        torch.manual_seed(case.seed)
        self.case = case
        self.how = how
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def update(self, model: nn.Module) -> None:
        """Clip the gradients where the case does, and step the optimizer."""
        if self.case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), self.case.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
