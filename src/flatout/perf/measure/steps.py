"""Optimizer steps of a task in one way, timed: forward, backward, clipping and optimizer, without a
Trainer around.

Beside them a feed is timed with no model behind it, and the memory is read that steps have taken.
The learning rate is zero, so the weights stay, and the time is that of a real step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
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
    """One way to train: the parts that a step is made of, and the override that asks for them."""

    feed: Feed
    precision: Precision
    threads: int = field(default_factory=torch.get_num_threads)
    model: nn.Module
    cause: str = "as it was"
    override: str = ""


@dataclass(slots=True)
class Taken:
    """Some steps, and what they took."""

    seconds: float = 0.0
    wait_s: float = 0.0  # of it, waiting for batches
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
        """What the model took: all but waiting for batches."""
        return max(self.seconds - self.wait_s, 1e-9)

    @property
    def computing_ms(self) -> float:
        """Of a batch."""
        return 1000 * self.computing_s / self.batches

    @property
    def computing_rate(self) -> float:
        """Rows a second of the model alone."""
        return self.rows / self.computing_s


def endless(feed: Feed) -> Iterator[FlatBatch]:
    """A feed's batches, epoch after epoch."""
    for epoch in itertools.count():
        feed.set_epoch(epoch)
        yield from feed


def measure_feed(feed: Feed, seconds: float) -> tuple[float, float] | None:
    """Rows a second of a feed, and the cores it kept busy; the first batch, which starts it, is not
    counted.
    """
    batches = iter(feed)
    own = psutil.Process()
    next(batches, None)
    began = time.perf_counter()
    busy_s = processor_seconds(own)
    rows = 0
    for batch in batches:
        rows += batch.num_real
        if time.perf_counter() - began > seconds:
            break
    took = max(time.perf_counter() - began, 1e-9)
    return (rows / took, (processor_seconds(own) - busy_s) / took) if rows else None


def standing_optimizer(model: nn.Module, task: Task) -> torch.optim.Optimizer:
    """An optimizer that computes its steps and changes no weight."""
    optimizer = task.optim.build(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return optimizer


def held_bytes(device: torch.device) -> int:
    """Memory held now: the process's on a CPU, the device's elsewhere."""
    return int(
        torch.cuda.memory_reserved(device)
        if device.type == "cuda"
        else psutil.Process().memory_info().rss
    )


def peak_bytes(device: torch.device) -> int | None:
    """Most memory held since `forget_peak`, or since the beginning; None where the system does not
    say.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    return None


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    # elsewhere the peak is that of the largest batch so far, which comes last
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


class Steps:
    """Steps of one way over batches that never end."""

    def __init__(
        self,
        task: Task,
        way: TrainingWay,
        batches: Iterator[FlatBatch],
        optimizer: torch.optim.Optimizer,
        *,
        clip: float = 0.0,
    ) -> None:
        """`optimizer`: a standing one, which ways of one model share, as its state is large."""
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
        """Train so many optimizer steps, and more of them until so many seconds are over."""
        if torch.get_num_threads() != self.way.threads:
            torch.set_num_threads(self.way.threads)
            self._step(Taken())  # threads that slept must wake
        taken = Taken()
        count = 0
        began = time.perf_counter()
        while count < least or time.perf_counter() < began + seconds:
            self._step(taken)
            count += 1
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        taken.seconds = time.perf_counter() - began
        return taken

    def close(self) -> None:
        """End the feed's workers, and let go of gradients."""
        self.batches = iter(())
        self.optimizer.zero_grad()
        for embedding in self.lean:
            embedding.clear()
            embedding.keeps_gradient = False

    def _step(self, taken: Taken) -> None:
        self.losses = []
        ends_step = False
        while not ends_step:
            asked = time.perf_counter()
            batch = next(self.batches)
            taken.wait_s += time.perf_counter() - asked
            with arithmetic(self.way.precision, self.device):
                loss = self.task.training_loss(batch, self.way.model)
            self.scaler.scale(loss).backward()
            self.losses.append(loss.detach())  # of micro-batches: each is its share of the step's
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
