"""What is tried for a foreign module and loader: other loaders where training waited, else other ways of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch

from flatout.distributed.limits import free_bytes
from flatout.engine.precision import LIGHTNING_NAMES, Precision, bf16_is_native_on_cpu
from flatout.perf.measure.steps import Way
from flatout.perf.verdict.copies import OwnFeed, OwnTask, Refused, copy_of_loader, nothing_stays
from flatout.perf.verdict.evidence import LEAST_GAIN, Evidence
from flatout.perf.verdict.experiments import LEAST_S, ROUNDS, SHARE, WAITS, try_feeds, try_models, try_safely
from flatout.perf.verdict.rules import starved
from flatout.perf.verdict.ways import (
    BUSY,
    FREE_BYTES,
    LEAST_STEPS_AN_EPOCH,
    MOST_WORKERS,
    SMALL_ROWS,
    most_fed,
    other_arithmetic,
)

_AHEAD = 4
"""How many times as many batches workers read ahead, where they keep up but for some slow batches."""


def try_own(
    trainer: L.Trainer, module: L.LightningModule, loader: Any, evidence: Evidence, *, seconds: float, trained_s: float
) -> None:
    """Fill what other ways were worth into the evidence, or why nothing was tried.

    `seconds`: most that trying takes, and never more than a tenth of the seconds that were trained.
    """
    device, seconds = trainer.strategy.root_device, min(seconds, SHARE * trained_s)
    step_s = evidence.total_ms * evidence.accumulate / 1000
    if trainer.world_size > 1:
        evidence.not_tried = "on several ranks nothing else is tried"
    elif seconds < LEAST_S:
        evidence.not_tried = "nothing was tried: the run was short"
    elif 4 * ROUNDS * step_s > seconds:
        evidence.not_tried = "nothing was tried: a step takes too long for it"
    elif (found := starved(evidence)) is not None:  # what is timed between turns of others means nothing
        evidence.not_tried = f"nothing was tried: {found.limit} would disturb it"
    else:
        until = time.perf_counter() + seconds
        with nothing_stays(module, device):
            try_safely(evidence, partial(_race, trainer, module, loader, evidence, until))


def _race(trainer: L.Trainer, module: L.LightningModule, loader: Any, evidence: Evidence, until: float) -> None:
    from flatout.perf.verdict.own_steps import (
        compiled,
        may_compile,
        try_fast_loop,
    )  # a Trainer of its own, when it races

    device = trainer.strategy.root_device
    precision = next((ours for ours, theirs in LIGHTNING_NAMES.items() if theirs == str(trainer.precision)), None)
    if precision is None:
        raise Refused(f"steps of precision {trainer.precision} are not timed")
    task: Any = OwnTask(trainer, module, device)
    about = {"rows": evidence.rows_per_batch, "accumulate": evidence.accumulate, "epochs": evidence.epochs}
    feed: Any = OwnFeed.of(
        copy_of_loader(loader, trainer), task, batches=evidence.batches / max(evidence.epochs, 1e-9), **about
    )
    was = Way(feed=feed, precision=precision, threads=torch.get_num_threads(), model=task.model)
    evidence.native = _other_precision(precision, device)
    if evidence.share("wait") >= WAITS and try_feeds(task, was, _other_loaders, evidence, until):
        return
    here = replace(was, feed=feed.opened(num_workers=0))  # what workers make is waited for, whatever computes
    try_fast_loop(trainer, module, here, evidence, until)
    others = [*_larger_batches(here, evidence, until), *other_arithmetic(here, evidence)]
    compiles = may_compile(module, evidence)
    try_models(task, [here, *others], evidence, (time.perf_counter() + until) / 2 if compiles else until)
    if compiles and (ways := list(compiled(here, evidence, until))):
        try_models(task, [here, *ways], evidence, until)


def _other_precision(precision: Precision, device: torch.device) -> str:
    """The number format that may be faster."""
    if device.type == "cuda":
        is_newer = torch.cuda.get_device_capability(device) >= (8, 0)
        return (Precision.bf16 if is_newer else Precision.fp16).value if precision is Precision.fp32 else ""
    if precision is not Precision.fp32:
        return Precision.fp32.value
    return Precision.bf16.value if device.type == "cpu" and bf16_is_native_on_cpu() else ""


def _other_loaders(was: Way, evidence: Evidence) -> Iterator[Way]:
    """A few other DataLoaders, what is likeliest first."""
    feed: Any = was.feed
    if not feed.is_torchs:
        evidence.not_tried = f"other ways of reading {type(feed.loader).__name__} are not known"
        return
    for changed, threads in _changes(feed, was, evidence):
        if changed.get("num_workers", feed.num_workers) and evidence.epochs > 1:
            changed = changed | {"persistent_workers": True}
        made = feed.opened(**changed)
        is_more = most_fed(made, feed, evidence.feed_alone) >= LEAST_GAIN * evidence.model_rows_per_s
        if is_more or made.starts < feed.starts:
            words = ", ".join(f"{name}={value}" for name, value in changed.items())
            override = f"DataLoader({words})" + (f" threads={threads}" if threads else "")
            yield replace(was, cause="data", override=override, feed=made, threads=threads or was.threads)


def _changes(feed: OwnFeed, was: Way, evidence: Evidence) -> Iterator[tuple[dict[str, Any], int | None]]:
    """Arguments of a DataLoader, and threads where workers need their cores."""
    now, is_cpu, is_busy = feed.num_workers, feed.device.type == "cpu", (evidence.feed_cores or 0.0) >= BUSY
    if now and evidence.epochs > 1 and feed.starts == 1.0:
        yield {"persistent_workers": True}, None
    model_ms = max(evidence.model_ms, 1e-3)
    needed = 1 + round((evidence.ms.get("wait", 0.0) + model_ms) / model_ms)
    workers = min(evidence.cores if is_busy else MOST_WORKERS, needed * max(1, now))
    if feed.is_stream:  # each worker would give a whole stream
        workers = 1
    if is_cpu and is_busy and not now:  # more of either would take turns on one core
        workers = max(1, evidence.cores // 2)
        threads = max(1, evidence.cores - workers)
        yield {"num_workers": workers}, threads if threads < was.threads else None
    elif workers > now:
        yield {"num_workers": workers}, None
    if now:
        yield {"prefetch_factor": _AHEAD * feed.prefetch}, None
        yield {"num_workers": 0}, None
    if not is_cpu and not feed.loader.pin_memory:
        yield {"num_workers": max(1, workers), "pin_memory": True}, None


def _larger_batches(was: Way, evidence: Evidence, until: float) -> Iterator[Way]:
    """The batches of a step in one, where there are several; else larger ones, where these are small."""
    feed: Any = was.feed
    rows, parts = feed.plan.rows_per_batch, evidence.accumulate
    if not feed.may_grow or (feed.device.type == "cpu" and free_bytes() < FREE_BYTES):
        return
    if parts > 1 and rows * parts <= SMALL_ROWS:
        override = f"DataLoader(batch_size={rows * parts}) ++trainer.accumulate_grad_batches=1"
        yield replace(was, cause="accumulation", override=override, feed=feed.grown(parts, 1))
    if parts > 1 or rows >= SMALL_ROWS:
        return
    left_s = until - time.perf_counter()
    for times in (16, 4):
        is_quick = times * evidence.model_ms / 1000 < left_s / (4 * ROUNDS)
        if is_quick and times * rows <= min(feed.num_rows // LEAST_STEPS_AN_EPOCH, 4 * SMALL_ROWS):
            override = f"DataLoader(batch_size={times * rows})"
            yield replace(was, cause="batch", override=override, feed=feed.grown(times, 1))
