"""What is measured in a throw-away process: real training steps, on the longest rows first and on typical ones then.

A probe takes steps of the run's own task, feed and optimizer. The first step has the longest rows there are, so that
what is found to fit also fits later; the time is that of typical ones. Weights stay as they were, but for a range test.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.gather import TOKENS, Gatherer, cut_run
from flatout.data.batches.plan import BatchRows, PlanSettings
from flatout.data.feeding import FeedKind
from flatout.data.store.store import StoreSplit
from flatout.engine.compile import compile_in_place
from flatout.engine.optimizer import ScaleRate, Schedule
from flatout.engine.precision import Precision, arithmetic, fast_fp32_products
from flatout.models.contract import contract
from flatout.perf.measure.steps import (
    Steps,
    Taken,
    Way,
    endless,
    forget_peak,
    held_bytes,
    measure_feed,
    peak_bytes,
    standing_optimizer,
)
from flatout.perf.notes import micro_batch_key
from flatout.perf.tune.reading import LEAST_RATE, LEAST_STEPS, MOST_RATE, RANGE_STEPS, smoothed
from flatout.tasks.task import Task

_WARM_STEPS = 2
_LEAST_STEPS = 3
"""Of steps that take less than a second so many are timed, however late it is."""
_SLOW_S = 1.0
_LEAST_TIMED_S = 0.3
"""A few steps of some milliseconds tell nothing: more are timed, where there is time."""
_FEED_S = 0.2
_RISEN = 4.0
"""So many times its least the smoothed loss may be before a range test is over."""
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
    measured = {kind: measure_feed(feed_of(parts, FeedKind(kind), parts.plan), _FEED_S) for kind in kinds}
    return {kind: found.rows_per_s if found else 0.0 for kind, found in measured.items()}


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
    began = time.perf_counter()
    plan = replace(parts.plan, rows_per_batch=setting.rows, accumulate=setting.accumulate)
    feed, task = feed_of(parts, setting.feed, plan), parts.task.to(parts.device).train()
    if setting.compile:
        compile_in_place(task.model, parts.device)
    _thaw(task.model)
    forget_peak(parts.device)
    worst = longest_batch(parts, setting.rows if plan.tokens_per_batch is None else _rows_of_a_cap(parts, plan))
    way = Way(feed=feed, precision=setting.precision, threads=torch.get_num_threads(), model=task.model)
    with fast_fp32_products(setting.precision, parts.device):
        optimizer = standing_optimizer(task.model, task)
        timed = Steps(task, way, chain([worst], endless(feed)), optimizer, clip=parts.clip)
        try:
            for _ in range(_WARM_STEPS):
                timed.take(1)
            warm_s = time.perf_counter() - began
            taken = list(_typical_steps(timed, steps, until))
        finally:
            timed.close()
    return _measured(taken, warm_s, peak_bytes(parts.device) or held_bytes(parts.device))


def range_test(parts: Parts, *, feed: str, precision: str, rows: int, accumulate: int, until: float) -> dict[str, Any]:
    """Rates and losses of steps whose rate rises from step to step, in the process that measures."""
    plan = replace(parts.plan, rows_per_batch=rows, accumulate=accumulate)
    task, kind = parts.task.to(parts.device).train(), Precision(precision)
    fed = feed_of(parts, FeedKind(feed), plan)
    way = Way(feed=fed, precision=kind, threads=torch.get_num_threads(), model=task.model)
    # The rate is the test's own.
    optim = replace(task.optim, lr=LEAST_RATE, schedule=Schedule.constant, warmup=0.0, scale_lr=ScaleRate.none)
    rates: list[float] = []
    losses: list[float] = []
    with fast_fp32_products(kind, parts.device):
        optimizer = optim.build(task.model)
        steps = Steps(task, way, endless(fed), optimizer, clip=parts.clip)
        try:
            while len(rates) < RANGE_STEPS and not _is_over(losses) and time.time() <= until:
                rates.append(LEAST_RATE * (MOST_RATE / LEAST_RATE) ** (len(rates) / (RANGE_STEPS - 1)))
                for group in optimizer.param_groups:
                    group["lr"] = rates[-1] * group["lr_share"]
                steps.take(1)
                losses.append(steps.last_loss)
        finally:
            steps.close()
    return {"rates": rates, "losses": losses}


def _is_over(losses: Sequence[float]) -> bool:
    """Whether the loss has risen; one that is no number is the test's natural end."""
    if not losses or not math.isfinite(losses[-1]):
        return bool(losses)
    seen = smoothed(losses)
    return len(seen) > LEAST_STEPS and seen[-1] > _RISEN * abs(min(seen))


def _typical_steps(steps: Steps, count: int, until: float) -> Iterator[Taken]:
    """Steps until there are enough, or it is late."""
    began = time.perf_counter()
    for number in itertools.count(1):
        taken = steps.take(1)
        yield taken
        is_enough = number >= count and time.perf_counter() - began >= _LEAST_TIMED_S
        if is_enough or (time.time() > until and number >= (1 if taken.seconds > _SLOW_S else _LEAST_STEPS)):
            return


def _measured(taken: list[Taken], warm_s: float, peak_bytes: int) -> Measured:
    """Of typical steps after the first ones; the median time, as others may use the machine too."""
    step_s = max(statistics.median(each.seconds for each in taken), 1e-9)
    return Measured(
        step_s=step_s,
        rows_per_s=statistics.fmean(each.rows for each in taken) / step_s,
        tokens_per_s=statistics.fmean(each.tokens for each in taken) / step_s,
        wait_share=sum(each.wait_s for each in taken) / max(sum(each.seconds for each in taken), 1e-9),
        peak_bytes=peak_bytes,
        steps=len(taken),
        warm_s=warm_s,
    )


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
        rows=ordered, bounds=np.append(0, count), num_real=count, step_rows=count, ends_step=np.array([True])
    )
    # On the host, whatever the device: a store may be larger than that.
    batch = next(cut_run(Gatherer(parts.split, torch.device("cpu")).run(whole)))
    return batch if parts.device.type == "cpu" else batch.to(parts.device)


def _rows_of_a_cap(parts: Parts, plan: PlanSettings) -> int:
    assert plan.tokens_per_batch is not None
    return max(1, plan.tokens_per_batch // max(1, int(parts.split.lengths(TOKENS).max())))


def feed_of(parts: Parts, kind: FeedKind, plan: PlanSettings) -> Feed:
    return Feed(parts.split, plan, kind=kind, device=parts.device, workers=parts.workers)


def _thaw(model: nn.Module) -> None:
    """Layers that thaw later cost their memory then: they count as thawed."""
    contract(model).thaw(float("inf"))
