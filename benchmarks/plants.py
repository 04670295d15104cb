"""What can be planted into a run to hold it back, as callbacks that a command line can name.

What they change stays changed: each runs in a process of its own, which ends with its run.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from filelock import FileLock
from torch.utils.data import get_worker_info

from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.gather import GatheredRun, Gatherer
from flatout.data.batches.plan import BatchRows
from flatout.distributed.ranks import Ranks


class SlowSource(L.Callback):
    """Rows come as from a slow disk."""

    def __init__(self, us_a_row: float) -> None:
        gather = Gatherer.run

        def slow(gatherer: Gatherer, batches: BatchRows) -> GatheredRun:
            time.sleep(us_a_row * 1e-6 * len(batches.rows))
            return gather(gatherer, batches)

        patch.object(Gatherer, "run", slow).start()


class Transforming(L.Callback, ABC):
    """Every training batch goes through a function first; validation does not."""

    def __init__(self) -> None:
        self._plant()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Each rank receives a copy, and is a process with feeds to change."""
        vars(self).update(state)
        self._plant()

    def _plant(self) -> None:
        make = Feed.__init__

        def made(feed: Feed, split: Any, plan: Any, **settings: Any) -> None:
            given = settings.pop("transform", None) or (self.transform if plan.shuffle else None)
            make(feed, split, plan, transform=given, **settings)

        patch.object(Feed, "__init__", made).start()

    @abstractmethod
    def transform(self, batch: FlatBatch) -> FlatBatch: ...


class RowByRow(Transforming):
    """Something is computed for each row in Python."""

    def __init__(self, us_a_row: float) -> None:
        super().__init__()
        self.us_a_row = us_a_row

    def transform(self, batch: FlatBatch) -> FlatBatch:
        for _ in range(batch.num_rows):
            until = time.thread_time() + self.us_a_row * 1e-6
            while time.thread_time() < until:
                pass
        return batch


class SleepyCollate(Transforming):
    """Making a batch takes time, but no processor."""

    def __init__(self, ms: float) -> None:
        super().__init__()
        self.ms = ms

    def transform(self, batch: FlatBatch) -> FlatBatch:
        time.sleep(self.ms / 1000)
        return batch


class PadsToMax(L.Callback):
    """Rows are padded to the longest there may be, not to the longest of their batch."""

    def __init__(self, longest: int) -> None:
        real = FlatBatch.longest

        def padded(batch: FlatBatch, multiple: int = 1) -> int:
            return max(longest, real(batch, multiple))

        patch.object(FlatBatch, "longest", padded).start()


class ReadsNorms(L.Callback):
    """Looks at the length of every weight after every step."""

    def __init__(self, times: int = 1) -> None:
        self.times = times
        self.longest = 0.0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *others: Any
    ) -> None:
        for _ in range(self.times):
            for weight in pl_module.parameters():
                self.longest = max(self.longest, weight.norm().item())


class Sleeps(L.Callback):
    """Talks to a distant machine after every batch."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(self.ms / 1000)


class SlowDisk(L.Callback):
    """What is read from the store comes at the pace of one slow disk, for all processes
    together.
    """

    def __init__(self, mb_per_s: float) -> None:
        gather = Gatherer.run
        disk = Path(tempfile.mkdtemp()) / "disk.lock"

        def slow(gatherer: Gatherer, batches: BatchRows) -> GatheredRun:
            run = gather(gatherer, batches)
            is_resident = (
                get_worker_info() is None and not threading.current_thread().name.startswith("feed")
            )
            if not is_resident:
                with FileLock(disk):  # one for each read: a lock must not be inherited by workers
                    time.sleep(4 * run.tokens_T.numel() / (1e6 * mb_per_s))
            return run

        patch.object(Gatherer, "run", slow).start()


class SlowRank(Transforming):
    """One of the ranks has a slower machine."""

    def __init__(self, ms: float) -> None:
        super().__init__()
        self.ms = ms

    def transform(self, batch: FlatBatch) -> FlatBatch:
        if Ranks.here().rank == 1:
            time.sleep(self.ms / 1000)
        return batch


class LogsHistograms(L.Callback):
    """Draws a histogram of every weight after every step."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *others: Any
    ) -> None:
        writer: Any = trainer.logger
        for name, weight in pl_module.named_parameters():
            writer.experiment.add_histogram(name, weight.detach(), trainer.global_step)


class Recompiles(L.Callback):
    """Part of the forward pass is compiled for each new shape, and each shape is new."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        model: Any = vars(pl_module)["_modules"]["model"]
        sizes = itertools.count(1)
        compiled = torch.compile(_some_work, backend="eager", dynamic=False)
        # torch gives up after eight
        for limit in ("recompile_limit", "accumulated_recompile_limit"):
            setattr(torch._dynamo.config, limit, 1 << 20)

        def compile_again(*_: Any) -> None:
            compiled(torch.ones(next(sizes)))

        model.register_forward_pre_hook(compile_again)


def _some_work(values: torch.Tensor) -> torch.Tensor:
    for _ in range(20):
        values = (values * 1.01).sin()
    return values


class PageableCopy(Transforming):
    """Each batch goes to the host and back, through memory that is not page-locked."""

    def transform(self, batch: FlatBatch) -> FlatBatch:
        return batch.to(torch.device("cpu")).to(batch.tokens.device)
