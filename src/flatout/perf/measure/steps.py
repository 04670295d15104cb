"""Time optimizer steps of a task without a Trainer: forward, backward, clipping and optimizer.

The learning rate is zero, so weights do not change, and a step takes as long as a real one. Other
functions time a feed without a model, and read how much memory steps have taken. Tuning and the
verdict's tries measure with this.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from torch import Tensor, nn

from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.distributed.limits import processor_seconds
from flatout.engine.clipping import clip_gradients
from flatout.engine.precision import Precision, arithmetic
from flatout.models.lean import LeanEmbedding

if TYPE_CHECKING:
    from flatout.tasks.task import Task


@dataclass(kw_only=True, slots=True)
class TrainingWay:
    """One way to train: the parts of a step, and the override that sets them."""

    feed: Feed
    precision: Precision
    threads: int = field(default_factory=torch.get_num_threads)
    model: nn.Module
    cause: str = "as it was"  # the cause of lost time that this way removes
    override: str = ""


@dataclass(slots=True)
class Taken:
    """Sums over some steps."""

    seconds: float = 0.0  # by the clock of the steps
    wall_s: float = 0.0
    wait_s: float = 0.0  # the part of `seconds` that was spent waiting for batches
    batches: int = 0
    rows: int = 0
    tokens: int = 0
    computed: int = 0  # tokens with their padding, where they are counted

    @property
    def rate(self) -> float:
        """Rows a second."""
        return self.rows / max(self.seconds, 1e-9)

    @property
    def computing_s(self) -> float:
        """Seconds without waiting for batches."""
        return max(self.seconds - self.wait_s, 1e-9)

    @property
    def computing_ms(self) -> float:
        """Milliseconds of a batch without waiting for it."""
        return 1000 * self.computing_s / self.batches

    @property
    def computing_rate(self) -> float:
        """Rows a second without waiting for batches."""
        return self.rows / self.computing_s


def endless(feed: Feed) -> Iterator[FlatBatch]:
    """A feed's batches, epoch after epoch, without end."""
    for epoch in itertools.count():
        feed.set_epoch(epoch)
        yield from feed


def measure_feed(feed: Feed, seconds: float) -> tuple[float, float] | None:
    """Rows a second of a feed, and how many cores it kept busy; None if it has one batch only.

    The first batch is not timed: the feed starts with it.
    """
    batches = iter(feed)
    process = psutil.Process()
    next(batches, None)
    began = time.perf_counter()
    cores_before_s = processor_seconds(process)
    rows = 0
    for batch in batches:
        rows += batch.num_real
        if time.perf_counter() - began > seconds:
            break
    if not rows:
        return None
    took_s = max(time.perf_counter() - began, 1e-9)
    return rows / took_s, (processor_seconds(process) - cores_before_s) / took_s


def standing_optimizer(model: nn.Module, task: Task) -> torch.optim.Optimizer:
    """The task's optimizer with a learning rate of 0: it computes its steps but changes nothing."""
    optimizer = task.optim.build(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return optimizer


def held_bytes(device: torch.device) -> int:
    """Memory that the process holds now; on a GPU, that of the device."""
    return int(
        torch.cuda.memory_reserved(device)
        if device.type == "cuda"
        else psutil.Process().memory_info().rss
    )


def peak_bytes(device: torch.device) -> int | None:
    """Most memory held since `forget_peak`; None if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    return None


def forget_peak(device: torch.device) -> None:
    """Let `peak_bytes` count from now on."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    # Where the system does not allow it, the peak of all batches so far stays. The largest batch
    # comes last anyway.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


class Steps:
    """Takes optimizer steps of one way to train, over batches without end."""

    def __init__(
        self,
        task: Task,
        way: TrainingWay,
        batches: Iterator[FlatBatch],
        optimizer: torch.optim.Optimizer,
        *,
        clip: float = 0.0,
    ) -> None:
        """`optimizer`: from `standing_optimizer`; ways of one model share it, since it is large.

        `clip`: largest gradient norm; 0: no clipping.
        """
        self.clock: Callable[[], float] = time.perf_counter  # steps are timed by it
        self.task = task
        self.way = way
        self.batches = batches
        self.optimizer = optimizer
        self.clip = clip
        self.device = way.feed.device
        self.rows_a_step = way.feed.plan.rows_per_batch * way.feed.plan.accumulate
        self.trained = [weight for group in optimizer.param_groups for weight in group["params"]]
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=way.precision is Precision.fp16
        )
        self.lean = [module for module in way.model.modules() if isinstance(module, LeanEmbedding)]
        for embedding in self.lean:
            embedding.keeps_gradient = (
                self.device.type == "cpu" and way.precision is not Precision.fp16
            )
        self.losses: list[Tensor] = []  # of the latest step

    def take(self, least: int, seconds: float = 0.0) -> Taken:
        """Take `least` optimizer steps, and more until `seconds` are over; return their sums."""
        if torch.get_num_threads() != self.way.threads:
            torch.set_num_threads(self.way.threads)
            self._step(Taken())  # the first step wakes the threads
        taken = Taken()
        count = 0
        began = self.clock()
        began_wall = time.perf_counter()
        until = began_wall + seconds
        while count < least or time.perf_counter() < until:
            self._step(taken)
            count += 1
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        taken.seconds = self.clock() - began
        taken.wall_s = time.perf_counter() - began_wall
        return taken

    def close(self) -> None:
        """End the feed's workers, and free the gradients."""
        self.batches = iter(())
        self.optimizer.zero_grad()
        for embedding in self.lean:
            embedding.clear()
            embedding.keeps_gradient = False

    def _step(self, taken: Taken) -> None:
        """Take one optimizer step over all its micro-batches, and add it to `taken`."""
        self.losses = []
        ends_step = False
        while not ends_step:
            began = self.clock()
            batch = next(self.batches)
            taken.wait_s += self.clock() - began
            with arithmetic(self.way.precision, self.device):
                loss = self.task.training_loss(batch, self.way.model)
            self.scaler.scale(loss).backward()
            self.losses.append(loss.detach())  # the step's loss is their sum
            ends_step = bool(batch.ends_step)
            taken.batches += 1
            taken.rows += batch.num_real
            taken.tokens += batch.num_tokens
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            clip_gradients(self.trained, self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        for embedding in self.lean:
            embedding.clear()
        self.optimizer.zero_grad()
