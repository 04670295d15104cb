"""The feed: the batches of a plan, read from a store, on the device, counted as they are taken.

Three kinds. *Resident*: the columns lie on the device and a batch is an index into them; the
fastest where they fit. *Threaded*: a thread gathers a run of batches ahead, in page-locked memory
where there is a device to copy to. *Workers*: processes of a `DataLoader` make each batch, for
transforms that must run in each epoch. A feed is a loader for Lightning. Its state is the epoch and
the number of batches taken, so a restored feed yields exactly the rest. Open this file to change
where and when batches are made.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.gather import (
    TARGETS,
    TOKENS,
    GatheredRun,
    Gatherer,
    await_run,
    cut_run,
    move_run,
)
from flatout.data.batches.large_plan import LargePlan, is_large
from flatout.data.batches.plan import (
    FeedKind,
    Ints,
    Plan,
    PlanSettings,
    Rows,
    StreamPlan,
    count_batches,
)
from flatout.data.store.store import Ragged, StoreSplit
from flatout.distributed.limits import free_bytes
from flatout.run_log import Choice

# a change of a batch that differs in each epoch, such as dropping words
Transform = Callable[[FlatBatch], FlatBatch]
_ROWS_A_RUN = 8192  # gathered at once; more would delay the first step and gain nothing
# Of the free memory of the device, so that model, gradients and activations have the rest.
_RESIDENT_SHARE = 0.3


def choose_feed(kind: FeedKind, num_bytes: int, device: torch.device) -> Choice[FeedKind]:
    """The kind asked for, or the fastest that the device's free memory allows."""
    if kind is not FeedKind.auto:
        return Choice(kind, "asked for", f"data.feed={kind}")
    free = free_memory(device)
    evidence = f"{num_bytes / 1e6:.1f} MB of rows, {free / 1e9:.1f} GB free on {device.type}"
    if num_bytes <= _RESIDENT_SHARE * free:
        return Choice(FeedKind.resident, "all rows fit into its memory", evidence)
    share = f"{_RESIDENT_SHARE:.0%} of the free memory"
    return Choice(FeedKind.threaded, f"the rows take more than {share}", evidence)


def free_memory(device: torch.device) -> int:
    """Bytes that may still be used on a device."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_bytes()


class Feed:
    """Batches of one split in the order of a plan, epoch after epoch."""

    prefetch = 2  # batches that each worker gathers ahead: torch's default
    starts: float | None = None
    """How often an epoch starts the workers; None: for training, and for each validation."""

    def __init__(
        self,
        split: StoreSplit,
        plan: PlanSettings,
        *,
        kind: FeedKind = FeedKind.resident,
        device: torch.device | str = "cpu",
        transform: Transform | None = None,
        complete: Transform | None = None,
        workers: int = 2,
        batches_a_run: int = 64,
        keeps_position: bool = True,
    ) -> None:
        """`transform` runs where batches are made, which may be another process; `complete` runs
        here, on batches that lie on the device.
        """
        assert kind is not FeedKind.auto, "choose_feed decides first"
        self.split = split
        self.plan = plan
        self.kind = kind
        self.device = torch.device(device)
        self.transform = transform
        self.complete = complete
        self.workers = workers
        self.batches_a_run = batches_a_run  # most that are gathered at once
        self.keeps_position = keeps_position
        """False: each pass starts with the first batch, even after a pass that stopped early, such
        as a validation."""
        self.epoch = 0
        self.consumed = 0
        self.wait_s = 0.0  # seconds that the trainer waited for batches
        self.transfer_s = 0.0  # seconds of copying to the device, by the workers feed
        # Lightning asks every loader for these two, and calls `loader.sampler.set_epoch`.
        self.sampler = self
        self.batch_sampler = None
        self._lengths = split.lengths(TOKENS)
        self._num_batches = (
            self._make_plan(0).num_batches if plan.is_stream else count_batches(self._lengths, plan)
        )

    def complete_by(self, complete: Transform) -> None:
        """Change all batches from now on, where they lie on the device."""
        self.complete = complete

    def __len__(self) -> int:
        return self._num_batches

    @property
    def num_rows(self) -> int:
        """Rows of an epoch, over all ranks."""
        return len(self._lengths)

    @property
    def has_ragged_labels(self) -> bool:
        """Whether rows may have several labels, or one for each token."""
        return isinstance(self.split.columns.get(TARGETS), Ragged)

    def set_epoch(self, epoch: int) -> None:
        """Start another epoch; the present one keeps its position."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.consumed = 0

    def all_rows(self, *, shuffle: bool = False) -> Feed:
        """Another feed over the rows of all ranks, from the beginning; this one keeps its position.

        `shuffle`: in random order, so that the first batches are like all others.
        """
        kind = self.kind if self.kind is FeedKind.resident else FeedKind.threaded
        plan = replace(self.plan, rank=0, world=1)
        if shuffle:
            # One step a megabatch: each batch has rows of any length.
            plan = replace(plan, shuffle=True, megabatch_steps=1)
        feed = Feed(self.split, plan, kind=kind, device=self.device)
        feed._gatherer = self._gatherer
        return feed

    @cached_property
    def _gatherer(self) -> Gatherer:
        is_resident = self.kind is FeedKind.resident
        return Gatherer(self.split, self.device if is_resident else torch.device("cpu"))

    def planned_sizes(self, most: int) -> tuple[Ints, Ints, Ints]:
        """Rows, tokens and the longest row of the first batches of the first epoch."""
        lengths, bounds = self.planned_lengths(most)
        begins = bounds[:-1]
        tokens = np.add.reduceat(lengths, begins)
        return np.diff(bounds), tokens, np.maximum.reduceat(lengths, begins)

    def planned_lengths(self, most: int) -> tuple[Ints, Ints]:
        """Lengths of the rows of the first batches of the first epoch, and where batches begin."""
        planned = self._make_plan(0).batches(0, min(most, len(self)))
        return self._lengths[planned.rows], planned.bounds

    def rows_of_step(self, epoch: int, step: int) -> Rows:
        """Numbers of the rows that all ranks train in one optimizer step of an epoch."""
        return self._make_plan(epoch).rows_of_step(step)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "consumed": self.consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]
        self.consumed = state["consumed"]

    def __iter__(self) -> Iterator[FlatBatch]:
        if self.consumed >= len(self) or not self.keeps_position:
            self.consumed = 0
        batches = self._batches(self._make_plan(self.epoch), self.consumed)
        if self.complete is not None:
            batches = map(self.complete, batches)
        asked = time.perf_counter()
        for batch in batches:
            self.wait_s += time.perf_counter() - asked
            self.consumed += 1
            yield batch
            asked = time.perf_counter()

    def _make_plan(self, epoch: int) -> Plan:
        if self.plan.is_stream:
            return StreamPlan(self._lengths, self.split.fixed("recording"), self.plan, epoch)
        kind = LargePlan if is_large(self.num_rows, self.plan) else Plan
        return kind(self._lengths, self.plan, epoch)

    def _batches(self, plan: Plan, start: int) -> Iterator[FlatBatch]:
        if self.kind is FeedKind.workers:
            return self._load_in_workers(plan, start)
        planned = (plan.batches(first, stop) for first, stop in self._spans(plan, start))
        runs: Iterator[GatheredRun] = map(self._gatherer.run, planned)
        if self.kind is FeedKind.threaded:
            runs = self._gather_ahead(runs)
        batches = itertools.chain.from_iterable(map(cut_run, runs))
        return batches if self.transform is None else map(self.transform, batches)

    def _gather_ahead(self, runs: Iterator[GatheredRun]) -> Iterator[GatheredRun]:
        """The runs on the device; a thread gathers and copies the next one during the steps of this
        one.
        """

        def gather_next() -> GatheredRun | None:
            run = next(runs, None)
            return None if run is None else move_run(run, self.device)

        with ThreadPoolExecutor(1, thread_name_prefix="feed") as pool:
            ahead = pool.submit(gather_next)
            while (run := ahead.result()) is not None:
                ahead = pool.submit(gather_next)
                yield await_run(run, self.device)

    def _load_in_workers(self, plan: Plan, start: int) -> Iterator[FlatBatch]:
        # A worker ends when its parent is gone. A fork has this process as its parent; the child of
        # a fork server would have the server.
        has_fork = "fork" in multiprocessing.get_all_start_methods()
        loader = DataLoader(
            _PlannedBatches(self.split, plan, self.transform),
            sampler=range(start, plan.num_batches),
            batch_size=None,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            # Without it the loader would draw from the random numbers of the training.
            generator=torch.Generator().manual_seed(self.plan.seed),
            multiprocessing_context="fork" if has_fork else None,
            worker_init_fn=partial(_end_with, os.getpid()),
        )
        for batch in loader:
            began = time.perf_counter()
            moved = batch.to(self.device)
            self.transfer_s += time.perf_counter() - began
            yield moved

    def _spans(self, plan: Plan, start: int) -> Iterator[tuple[int, int]]:
        """First and last number of the batches of each run, which has some ten thousand rows.

        100 batches, 8 of them a run → (0, 1), (1, 9), (9, 17), …: the first run is a single batch,
        so that training starts at once.
        """
        rows_a_batch = max(1, self.num_rows // max(1, plan.num_batches * self.plan.world))
        step = min(self.batches_a_run, max(1, _ROWS_A_RUN // rows_a_batch))
        if start < plan.num_batches:
            yield start, start + 1
        for first in range(start + 1, plan.num_batches, step):
            yield first, min(first + step, plan.num_batches)


@dataclass(frozen=True, slots=True)
class Feeds:
    """The batches of each split; no test feed where there are no test rows."""

    train: Feed
    validation: Feed
    test: Feed | None


def _end_with(parent: int, number: int) -> None:
    """Let a worker end when its parent is gone.

    torch has such a watch, too, but it waits for ever if the parent was killed while it started.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


class _PlannedBatches(Dataset[FlatBatch]):
    def __init__(self, split: StoreSplit, plan: Plan, transform: Transform | None) -> None:
        self.plan = plan
        self.transform = transform
        self.gatherer = Gatherer(split, torch.device("cpu"))

    def __getitem__(self, number: int) -> FlatBatch:
        batch = next(cut_run(self.gatherer.run(self.plan.batches(number, number + 1))))
        return batch if self.transform is None else self.transform(batch)
