"""`OwnFeed`: a user's DataLoader in the shape of this package's feeds, to race ways to read it.

No Lightning is needed. Where a loader cannot be read again, `Refused` says so.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from flatout.data.batches.batch_rows import rows_of
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.plan import PlanSettings
from flatout.data.feeding import FeedKind
from flatout.perf.verdict.ways import Refused

# Settings of a DataLoader that all tries share.
_KEPT = ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor")
_OF_WORKERS = ("num_workers", "persistent_workers", "prefetch_factor")
MOST_BATCHES = 2048  # whose rows are drawn for all tries


@dataclass(frozen=True, slots=True)
class OwnBatch:
    """A batch of a foreign loader, with the attributes of a `FlatBatch` that steps read."""

    batch: Any
    number: int
    num_real: int
    ends_step: bool
    num_tokens: int = 0


@dataclass(kw_only=True)
class OwnFeed:
    """A copied loader in the shape of a `Feed`: its batches on the device.

    All ways of reading it (`opened`) give the same batches.
    """

    loader: Any
    device: torch.device
    move: Callable[[Any], Any]  # a batch to the device
    rows: float  # of a batch
    accumulate: int
    batches: float  # of an epoch
    epochs: float
    # for each batch of a DataLoader; None for streams and other loaders
    rows_of_batches: list[Any] | None = None
    changed: dict[str, Any] = field(default_factory=dict)  # arguments that differ from the loader's

    def __post_init__(self) -> None:
        self.plan = PlanSettings(
            rows_per_batch=max(1, round(self.rows)), accumulate=self.accumulate
        )
        self.num_rows = max(1, round(self.rows * self.batches))
        settings = {
            name: getattr(self.loader, name) for name in _OF_WORKERS if hasattr(self.loader, name)
        }
        settings |= self.changed
        self.num_workers = settings.get("num_workers", 0)
        self.workers = max(1, self.num_workers)
        self.kind = FeedKind.workers if self.num_workers else FeedKind.resident
        self.prefetch = settings.get("prefetch_factor") or 2  # torch's default
        # How often an epoch starts the workers.
        stays = settings.get("persistent_workers", False)
        self.starts = 1 / max(1.0, self.epochs) if stays else 1.0
        self.is_torchs = (
            isinstance(self.loader, DataLoader)
            and type(self.loader).__iter__ is DataLoader.__iter__
        )
        self.is_stream = self.is_torchs and isinstance(self.loader.dataset, IterableDataset)
        # Drawn once, so that all ways read the same rows.
        if self.is_torchs and not self.is_stream and self.rows_of_batches is None:
            loader = self.loader
            sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            self.rows_of_batches = list(itertools.islice(sampler, MOST_BATCHES))

    def opened(self, **changed: Any) -> OwnFeed:
        """The same batches with other arguments of the DataLoader."""
        return replace(self, changed=self.changed | changed)

    def grown(self, times: int) -> OwnFeed:
        """The same rows in batches of `times` as many; a last, smaller batch is dropped.

        With `times=2`, batches [0, 1], [2, 3], [4, 5] become [0, 1, 2, 3].
        """
        assert self.rows_of_batches is not None
        batches = self.rows_of_batches
        rows = []
        for first in range(0, len(batches) - times + 1, times):
            rows.append(list(itertools.chain(*batches[first : first + times])))
        return replace(
            self,
            rows_of_batches=rows,
            rows=self.rows * times,
            batches=self.batches / times,
            accumulate=1,
        )

    def __len__(self) -> int:
        return max(1, round(self.batches))

    def set_epoch(self, epoch: int) -> None:
        """Each epoch has the same batches."""

    def __iter__(self) -> Iterator[OwnBatch]:
        number = 0
        for number, batch in enumerate(self._open(), 1):
            rows = batch.num_real if isinstance(batch, FlatBatch) else rows_of(batch)
            yield OwnBatch(self.move(batch), number - 1, rows or 1, number % self.accumulate == 0)
        if not number:
            raise Refused("its loader can be read once")

    def _open(self) -> Iterable[Any]:
        """The loader itself if it is foreign; else a DataLoader with the changed arguments."""
        if not self.is_torchs:
            return self.loader
        batching: dict[str, Any] = {"batch_sampler": self.rows_of_batches}
        if self.is_stream:
            batching = {"batch_size": self.loader.batch_size, "drop_last": self.loader.drop_last}
        elif self.loader.batch_sampler is None:
            batching = {"batch_size": None, "sampler": self.rows_of_batches}
        settings = {name: getattr(self.loader, name) for name in _KEPT} | batching | self.changed
        if not settings["num_workers"]:
            settings |= {"prefetch_factor": None, "persistent_workers": False}
        elif self.loader.num_workers:
            settings["multiprocessing_context"] = self.loader.multiprocessing_context
        elif _may_fork():
            # By default Python 3.14 starts a server that imports the user's script. A script
            # without `if __name__ == "__main__":` would train again there.
            settings["multiprocessing_context"] = "fork"
        return DataLoader(
            self.loader.dataset, generator=torch.Generator().manual_seed(0), **settings
        )


def _may_fork() -> bool:
    """Whether workers may be forked here; not where the script has chosen to spawn processes."""
    has_fork = "fork" in multiprocessing.get_all_start_methods()
    return has_fork and multiprocessing.get_start_method(allow_none=True) != "spawn"
