"""Try other ways of training a foreign module with a foreign loader, after its run has ended.

Where training waited for batches, other arguments of its DataLoader are raced. Elsewhere the step
is raced with larger batches, another precision, the fast loop (`loop_race.py`) and a compiled step
(`compiled_step.py`). Open this file to add a way to race, or to change when one is worth its time.
"""

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
from flatout.perf.measure.steps import TrainingWay
from flatout.perf.verdict import experiments, ways
from flatout.perf.verdict.compiled_step import compiled
from flatout.perf.verdict.copies import OwnFeed, OwnTask, copy_of_loader, nothing_stays
from flatout.perf.verdict.evidence import LEAST_GAIN, Evidence
from flatout.perf.verdict.loop_race import try_fast_loop
from flatout.perf.verdict.rules import starved
from flatout.perf.verdict.ways import Refused, most_fed, other_arithmetic

# how many times as many batches workers read ahead, where they keep up but for some slow batches
_AHEAD = 4
_COMPILES = 0.3  # fraction of a step in the model's passes, from which on compiling is tried


def try_own(
    trainer: L.Trainer,
    module: L.LightningModule,
    loader: Any,
    evidence: Evidence,
    *,
    seconds: float,
    trained_s: float,
) -> None:
    """Fill in what other ways were worth, or why nothing was tried, in a tenth of `trained_s` and
    `seconds` at most.
    """
    device = trainer.strategy.root_device
    seconds = min(seconds, experiments.SHARE * trained_s)
    if trainer.world_size > 1:
        evidence.not_tried = "on several ranks nothing else is tried"
    elif seconds < experiments.LEAST_S:
        evidence.not_tried = "nothing was tried: the run was short"
    elif 4 * experiments.ROUNDS * evidence.total_ms * evidence.accumulate / 1000 > seconds:
        evidence.not_tried = "nothing was tried: a step takes too long for it"
    elif (found := starved(evidence)) is not None:
        # what is timed between turns of others means nothing
        evidence.not_tried = f"nothing was tried: {found.limit} would disturb it"
    else:
        until = time.perf_counter() + seconds
        with nothing_stays(module, device):
            experiments.try_safely(
                evidence, partial(_race, trainer, module, loader, evidence, until)
            )


def _race(
    trainer: L.Trainer, module: L.LightningModule, loader: Any, evidence: Evidence, until: float
) -> None:
    device = trainer.strategy.root_device
    precision = next(
        (ours for ours, theirs in LIGHTNING_NAMES.items() if theirs == str(trainer.precision)), None
    )
    if precision is None:
        raise Refused(f"steps of precision {trainer.precision} are not timed")
    if module.automatic_optimization and any(
        isinstance(each, torch.optim.LBFGS) for each in trainer.optimizers
    ):
        raise Refused("LBFGS computes its loss again while it steps")
    task: Any = OwnTask(trainer, module, device)
    about: dict[str, Any] = {"rows": evidence.rows_per_batch, "accumulate": evidence.accumulate}
    about |= {"epochs": evidence.epochs, "batches": evidence.batches / max(evidence.epochs, 1e-9)}
    feed: Any = OwnFeed(loader=copy_of_loader(loader, trainer), task=task, **about)
    was = TrainingWay(feed=feed, precision=precision, model=task.model)
    evidence.native = _other_precision(precision, device)
    waits = evidence.share("wait") >= experiments.WAITS
    if waits and experiments.try_feeds(task, was, _other_loaders, evidence, until):
        return
    # what workers make is waited for, whatever computes
    here = replace(was, feed=feed.opened(num_workers=0))
    try_fast_loop(trainer, module, here, evidence, until)
    others = [*_larger_batches(here, evidence, until), *other_arithmetic(here, evidence)]
    # A compiled step may be worth it where the model is slow, and is none already.
    parts = list(module.modules())
    is_compiled = any(
        type(each).__name__ == "OptimizedModule" or each._compiled_call_impl for each in parts
    )
    compiles = evidence.share("forward", "backward") >= _COMPILES and not is_compiled
    experiments.try_models(
        task, [here, *others], evidence, (time.perf_counter() + until) / 2 if compiles else until
    )
    if compiles and (found := list(compiled(here, evidence, until))):
        experiments.try_models(task, [here, *found], evidence, until)


def _other_precision(precision: Precision, device: torch.device) -> str:
    if precision is not Precision.fp32:
        return "" if device.type == "cuda" else Precision.fp32.value
    if device.type == "cuda":
        return (
            Precision.bf16 if torch.cuda.get_device_capability(device) >= (8, 0) else Precision.fp16
        ).value
    return Precision.bf16.value if device.type == "cpu" and bf16_is_native_on_cpu() else ""


def _other_loaders(was: TrainingWay, evidence: Evidence) -> Iterator[TrainingWay]:
    feed: Any = was.feed
    if not feed.is_torchs:
        evidence.not_tried = f"other ways of reading {type(feed.loader).__name__} are not known"
        return
    for changed, threads in _changes(feed, was, evidence):
        if changed.get("num_workers", feed.num_workers) and evidence.epochs > 1:
            changed["persistent_workers"] = True
        made = feed.opened(**changed)
        is_more = (
            most_fed(made, feed, evidence.feed_alone) >= LEAST_GAIN * evidence.model_rows_per_s
        )
        if is_more or made.starts < feed.starts:
            words = ", ".join(f"{name}={value}" for name, value in changed.items())
            override = f"DataLoader({words})" + (f" threads={threads}" if threads else "")
            yield replace(
                was, cause="data", override=override, feed=made, threads=threads or was.threads
            )


def _changes(
    feed: OwnFeed, was: TrainingWay, evidence: Evidence
) -> Iterator[tuple[dict[str, Any], int | None]]:
    """Arguments of a DataLoader, and threads where workers need their cores."""
    now = feed.num_workers
    is_cpu = feed.device.type == "cpu"
    is_busy = (evidence.feed_cores or 0.0) >= ways.BUSY
    if now and evidence.epochs > 1 and feed.starts == 1.0:
        yield {"persistent_workers": True}, None
    model_ms = max(evidence.model_ms, 1e-3)
    needed = 1 + round((evidence.ms.get("wait", 0.0) + model_ms) / model_ms)
    # each would give a whole stream
    most = 1 if feed.is_stream else evidence.cores if is_busy else ways.MOST_WORKERS
    workers = min(most, needed * max(1, now))
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


def _larger_batches(was: TrainingWay, evidence: Evidence, until: float) -> Iterator[TrainingWay]:
    """The batches of a step in one, where there are several; else larger ones, where these are
    small.
    """
    feed: Any = was.feed
    rows, parts = feed.plan.rows_per_batch, evidence.accumulate
    # Batches can be put together where they are read row by row.
    may_grow = feed.rows_of_batches is not None and feed.loader.batch_sampler is not None
    if not may_grow or (feed.device.type == "cpu" and free_bytes() < ways.FREE_BYTES):
        return
    if parts > 1 and rows * parts <= ways.SMALL_ROWS:
        override = f"DataLoader(batch_size={rows * parts}) ++trainer.accumulate_grad_batches=1"
        yield replace(was, cause="accumulation", override=override, feed=feed.grown(parts))
    if parts > 1 or rows >= ways.SMALL_ROWS:
        return
    left_s = until - time.perf_counter()
    for times in (16, 4):
        is_quick = times * evidence.model_ms / 1000 < left_s / (4 * experiments.ROUNDS)
        if is_quick and times * rows <= min(
            feed.num_rows // ways.LEAST_STEPS_AN_EPOCH, 4 * ways.SMALL_ROWS
        ):
            override = f"DataLoader(batch_size={times * rows})"
            yield replace(was, cause="batch", override=override, feed=feed.grown(times))
