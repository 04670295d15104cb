"""What is measured in a throw-away process: real training steps, on the longest rows first and on typical ones then.

A probe is Lightning's own loop over the run's own task, feed and optimizer, without validation and checkpoints. The
first step has the longest rows there are, so that what is found to fit also fits later; time is taken of typical ones.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import psutil
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn

from flatout.data.batches.batch_rows import BatchRows
from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.gather import TOKENS, Gatherer, cut_run
from flatout.data.batches.plan import PlanSettings
from flatout.data.feeding import FeedKind
from flatout.data.store.store import StoreSplit
from flatout.engine.compile import compile_in_place
from flatout.engine.fast_loop import FastLoop
from flatout.engine.precision import LIGHTNING_NAMES, Precision, arithmetic, fast_fp32_products
from flatout.perf.notes import micro_batch_key
from flatout.tasks.task import Task

_WARM_STEPS = 2
_LEAST_STEPS = 3
"""Of steps that take less than a second so many are timed, however late it is."""
_SLOW_S = 1.0
_LEAST_TIMED_S = 0.3
"""A few steps of some milliseconds tell nothing: more are timed, where there is time."""
_FEED_S = 0.2
_BYTES_A_WEIGHT = 12
"""A gradient and the two means of AdamW, in fp32."""


@dataclass(slots=True)
class Parts:
    """What a run would train, built once in the throw-away process."""

    task: Task
    split: StoreSplit
    plan: PlanSettings
    device: torch.device
    workers: int
    clip: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What one probe runs with."""

    feed: FeedKind
    precision: Precision
    rows: int
    accumulate: int
    compile: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one probe has seen."""

    step_s: float
    rows_per_s: float
    tokens_per_s: float
    wait_share: float
    """Share of a step's time that was waited for the feed."""
    peak_bytes: int
    """Most memory that was held: the process's on a CPU, the device's elsewhere."""
    steps: int
    warm_s: float
    """From the beginning to the first step whose time was taken."""


def about(parts: Parts) -> dict[str, Any]:
    """What is known of the model before anything is computed."""
    weights = list(parts.task.model.parameters())
    lengths = parts.split.lengths(TOKENS)
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    longest = int(lengths.max()) if len(lengths) else 1
    recurrent = any(isinstance(module, nn.RNNBase) for module in parts.task.model.modules())
    return {
        "weights": sum(weight.numel() for weight in weights),
        "fixed_bytes": _BYTES_A_WEIGHT * trained,
        "base_bytes": held_bytes(parts.device),
        "longest": longest,
        "is_recurrent": recurrent,
        "row_keys": {
            name: micro_batch_key(parts.task.model, longest=longest, device=parts.device, precision=name)
            for name in Precision
        },
    }


def feeds_alone(parts: Parts, kinds: list[str]) -> dict[str, float]:
    """Rows a second of each kind of feed, with no model behind it."""
    found = {}
    for kind in kinds:
        feed = feed_of(parts, FeedKind(kind), parts.plan)
        batches = iter(feed)
        next(batches)  # what is copied once, or started once
        started, rows = time.perf_counter(), 0
        for batch in batches:
            rows += batch.num_rows
            if time.perf_counter() - started > _FEED_S:
                break
        _wait(parts.device)
        found[kind] = rows / max(time.perf_counter() - started, 1e-9)
    return found


def losses(parts: Parts, precisions: list[str], rows: int) -> dict[str, float]:
    """The loss in each arithmetic, of the same weights on the same rows: longest ones and typical ones."""
    rows = min(rows, parts.split.num_rows)
    typical = np.sort(np.random.default_rng(0).choice(parts.split.num_rows, rows, replace=False))
    batches = [longest_batch(parts, rows), _batch_of(parts, typical)]
    task, found = parts.task.to(parts.device).eval(), {}
    try:
        for name in precisions:
            precision = Precision(name)
            with torch.no_grad(), fast_fp32_products(precision, parts.device), arithmetic(precision, parts.device):
                found[name] = float(np.mean([float(task.training_loss(batch)) for batch in batches]))
    finally:
        task.train()
    return found


def measure(parts: Parts, setting: Setting, steps: int, until: float) -> Measured:
    """Forward, backward and optimizer steps; `until` (of the system's clock) no further one is begun."""
    plan = replace(parts.plan, rows_per_batch=setting.rows, accumulate=setting.accumulate)
    feed = feed_of(parts, setting.feed, plan)
    clock = _Clock(feed, steps, until)
    if setting.compile:
        compile_in_place(parts.task.model, parts.device)
    _thaw(parts.task.model)
    _forget_peak(parts.device)
    trainer = probing_trainer(parts, setting.precision, setting.accumulate, [clock])
    worst = longest_batch(parts, setting.rows if plan.tokens_per_batch is None else _rows_of_a_cap(parts, plan))
    with fast_fp32_products(setting.precision, parts.device), without_advice():
        trainer.fit(parts.task, train_dataloaders=_LongestFirst(worst, feed))
    return clock.measured(held_bytes(parts.device, is_peak=True))


def longest_batch(parts: Parts, rows: int) -> FlatBatch:
    """The longest rows of the split as one batch that ends a step."""
    lengths = np.asarray(parts.split.lengths(TOKENS))
    rows = min(rows, len(lengths))
    chosen = np.argpartition(lengths, len(lengths) - rows)[len(lengths) - rows :]
    return _batch_of(parts, chosen)


def _batch_of(parts: Parts, rows: Any) -> FlatBatch:
    lengths = np.asarray(parts.split.lengths(TOKENS))[rows]
    ordered = np.asarray(rows, dtype=np.int64)[np.argsort(lengths, kind="stable")]
    count = np.array([len(ordered)])
    whole = BatchRows(
        rows=ordered,
        bounds=np.append(0, count),
        num_real=count,
        step_rows=count,
        ends_step=np.array([True]),
    )
    # On the host, whatever the device: a store may be larger than that.
    batch = next(cut_run(Gatherer(parts.split, torch.device("cpu")).run(whole)))
    return batch if parts.device.type == "cpu" else batch.to(parts.device)


def _rows_of_a_cap(parts: Parts, plan: PlanSettings) -> int:
    assert plan.tokens_per_batch is not None
    return max(1, plan.tokens_per_batch // max(1, int(parts.split.lengths(TOKENS).max())))


def feed_of(parts: Parts, kind: FeedKind, plan: PlanSettings) -> Feed:
    return Feed(parts.split, plan, kind=kind, device=parts.device, workers=parts.workers)


class _LongestFirst:
    """The longest batch, then those of a feed, epoch after epoch."""

    def __init__(self, longest: FlatBatch, feed: Feed) -> None:
        self.longest, self.feed = longest, feed

    def __iter__(self) -> Iterator[FlatBatch]:
        yield self.longest
        while True:
            yield from self.feed
            self.feed.set_epoch(self.feed.epoch + 1)


class _Clock(L.Callback):
    """Takes the time of each optimizer step, and ends the probe when there are enough."""

    def __init__(self, feed: Feed, steps: int, until: float) -> None:
        self.feed, self.steps, self.until = feed, steps, until
        self.began = time.perf_counter()
        self.ends: list[float] = []
        self.waits: list[float] = []
        self.rows: list[int] = []
        self.tokens: list[int] = []
        self._rows = self._tokens = 0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._rows += batch.num_real
        self._tokens += batch.num_tokens
        if not batch.ends_step:
            return
        _wait(pl_module.device)
        self.ends.append(time.perf_counter())
        self.waits.append(self.feed.wait_s)
        self.rows.append(self._rows)
        self.tokens.append(self._tokens)
        self._rows = self._tokens = 0
        taken = len(self.ends) - _WARM_STEPS
        is_slow = len(self.ends) > 1 and self.ends[-1] - self.ends[-2] > _SLOW_S
        is_late = time.time() > self.until and taken > (0 if is_slow else _LEAST_STEPS)
        is_enough = taken > self.steps and self.ends[-1] - self.ends[_WARM_STEPS] >= _LEAST_TIMED_S
        if is_enough or is_late:
            trainer.should_stop = True

    def measured(self, peak_bytes: int) -> Measured:
        """Of the typical steps after the first ones; the median time, as others may use the machine too."""
        skipped = min(_WARM_STEPS, len(self.ends) - 2)
        times = np.diff(self.ends[skipped:])
        step_s = max(float(statistics.median(times)), 1e-9)
        total_s = max(self.ends[-1] - self.ends[skipped], 1e-9)
        return Measured(
            step_s=step_s,
            rows_per_s=statistics.fmean(self.rows[skipped + 1 :]) / step_s,
            tokens_per_s=statistics.fmean(self.tokens[skipped + 1 :]) / step_s,
            wait_share=(self.waits[-1] - self.waits[skipped]) / total_s,
            peak_bytes=peak_bytes,
            steps=len(times),
            warm_s=self.ends[skipped] - self.began,
        )


def probing_trainer(
    parts: Parts, precision: Precision, accumulate: int, callbacks: list[L.Callback], **loop: Any
) -> L.Trainer:
    """Lightning's Trainer as a run has it, with nothing around the steps."""
    settings: dict[str, Any] = {"precision": LIGHTNING_NAMES[precision]}  # as a string: their type lists each name
    device = parts.device
    return L.Trainer(
        **settings,
        accelerator=device.type,
        devices=1 if device.index is None else [device.index],
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        use_distributed_sampler=False,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=parts.clip or None,
        callbacks=[FastLoop(**loop), *callbacks],
        plugins=[LightningEnvironment()],  # this process is no rank, even where ranks run
    )


@contextmanager
def without_advice() -> Iterator[None]:
    """What Lightning advises to a loop as odd as this one is no news to anybody."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _thaw(model: nn.Module) -> None:
    """Layers that thaw later cost their memory then: they count as thawed."""
    thaw = getattr(model, "thaw", None)
    if thaw is not None:
        thaw(float("inf"))


def held_bytes(device: torch.device, *, is_peak: bool = False) -> int:
    """Memory held now, or at most since the last probe began: the process's on a CPU, the device's elsewhere."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device) if is_peak else torch.cuda.memory_reserved(device))
    resident = int(psutil.Process().memory_info().rss)
    if not is_peak:
        return resident
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    return resident


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # elsewhere the peak is that of the largest batch so far, which comes last
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
