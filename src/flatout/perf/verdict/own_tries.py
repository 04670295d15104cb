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
from flatout.engine.precision import (
    LIGHTNING_NAMES,
    Precision,
    bf16_is_native_on_cpu,
    by_lightning_name,
)
from flatout.perf.measure.steps import TrainingWay
from flatout.perf.verdict import experiments, ways
from flatout.perf.verdict.compiled_step import compiled
from flatout.perf.verdict.copies import OwnFeed, OwnTask, copy_of_loader
from flatout.perf.verdict.evidence import LEAST_GAIN, ROUNDS, Evidence
from flatout.perf.verdict.loop_race import try_fast_loop
from flatout.perf.verdict.rules import starved
from flatout.perf.verdict.shared_copies import nothing_stays
from flatout.perf.verdict.ways import Refused, most_fed, other_arithmetic

# For workers that keep up but for some slow batches: so many times as many batches read ahead.
_AHEAD = 4
_COMPILES = 0.3  # fraction of a step in the model's passes, from which on compiling is tried


def try_own(
    trainer: L.Trainer,
    loader: object,
    evidence: Evidence,
    *,
    seconds: float,
    trained_s: float,
) -> None:
    """Race other ways of training the trainer's module, and add to `evidence` what each was worth.

    `evidence.not_tried` says why, where nothing is raced. All races together take `seconds` at
    most, and no more than a tenth of `trained_s`, the seconds that the run has trained.
    """
    device = trainer.strategy.root_device
    seconds = min(seconds, experiments.SHARE * trained_s)
    if trainer.world_size > 1:
        evidence.not_tried = "on several ranks nothing else is tried"
    elif seconds < experiments.LEAST_S:
        evidence.not_tried = "nothing was tried: the run was short"
    elif 4 * ROUNDS * evidence.total_ms * evidence.accumulate / 1000 > seconds:
        evidence.not_tried = "nothing was tried: a step takes too long for it"
    elif (finding := starved(evidence)) is not None:
        # Times would be those of the other processes' turns.
        evidence.not_tried = f"nothing was tried: {finding.limit} would disturb it"
    else:
        until = time.perf_counter() + seconds
        with nothing_stays(trainer.lightning_module, device):
            experiments.try_safely(evidence, partial(_race, trainer, loader, evidence, until))


def _race(trainer: L.Trainer, loader: object, evidence: Evidence, until: float) -> None:
    """Race the ways that `evidence` suggests; `Refused` where this run cannot be timed."""
    device = trainer.strategy.root_device
    module = trainer.lightning_module
    lightning_name = str(trainer.precision)
    if lightning_name not in LIGHTNING_NAMES.values():
        raise Refused(f"steps of precision {lightning_name} are not timed")
    precision = by_lightning_name(lightning_name)
    if module.automatic_optimization and _uses_lbfgs(trainer):
        raise Refused("LBFGS computes its loss again while it steps")
    task: Any = OwnTask(trainer, module, device)
    feed: Any = OwnFeed(
        loader=copy_of_loader(loader, trainer),
        task=task,
        rows=evidence.rows_per_batch,
        accumulate=evidence.accumulate,
        epochs=evidence.epochs,
        batches=evidence.batches / max(evidence.epochs, 1e-9),
    )
    was = TrainingWay(feed=feed, precision=precision, model=task.model)
    evidence.native = _other_precision(precision, device)
    waits = evidence.share("wait") >= experiments.WAITS
    if waits and experiments.try_feeds(task, was, _other_loaders, evidence, until):
        return
    # From here on what computes is raced. Batches are read in this process, so that none of the
    # ways waits for the start of workers.
    here = replace(was, feed=feed.opened(num_workers=0))
    some_batches = partial(experiments.some_batches, here.feed)
    try_fast_loop(task, some_batches, evidence, until)
    uncompiled = [here, *_larger_batches(here, evidence, until), *other_arithmetic(here, evidence)]
    if not _may_compile(module, evidence):
        experiments.try_models(task, uncompiled, evidence, until)
        return
    # Half of the time that is left is for compiling and racing the compiled step.
    half_until = (time.perf_counter() + until) / 2
    experiments.try_models(task, uncompiled, evidence, half_until)
    compiled_ways = list(compiled(here, evidence, until, experiments.ROWS_AROUND))
    if compiled_ways:
        experiments.try_models(task, [here, *compiled_ways], evidence, until)


def _uses_lbfgs(trainer: L.Trainer) -> bool:
    return any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers)


def _may_compile(module: L.LightningModule, evidence: Evidence) -> bool:
    """Whether the model's passes are a large part of a step, and none of its modules is compiled
    already.
    """
    if evidence.share("forward", "backward") < _COMPILES:
        return False
    return not any(
        type(submodule).__name__ == "OptimizedModule" or submodule._compiled_call_impl
        for submodule in module.modules()
    )


def _other_precision(precision: Precision, device: torch.device) -> str:
    """The precision to race against this one; empty where the device has none in hardware."""
    is_cuda = device.type == "cuda"
    if precision is not Precision.fp32:
        return "" if is_cuda else Precision.fp32.value
    if is_cuda:
        has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
        return Precision.bf16.value if has_bf16 else Precision.fp16.value
    has_bf16 = device.type == "cpu" and bf16_is_native_on_cpu()
    return Precision.bf16.value if has_bf16 else ""


def _other_loaders(was: TrainingWay, evidence: Evidence) -> Iterator[TrainingWay]:
    """Ways to read the same batches that may feed the model faster, or start their workers less
    often.
    """
    feed: Any = was.feed
    if not feed.is_torchs:
        evidence.not_tried = f"other ways of reading {type(feed.loader).__name__} are not known"
        return
    for arguments, threads in _loader_arguments(feed, was, evidence):
        if arguments.get("num_workers", feed.num_workers) and evidence.epochs > 1:
            arguments["persistent_workers"] = True
        other_feed = feed.opened(**arguments)
        rows_per_s = most_fed(other_feed, feed, evidence.feed_alone)
        may_feed_faster = rows_per_s >= LEAST_GAIN * evidence.model_rows_per_s
        if may_feed_faster or other_feed.starts < feed.starts:
            listed = ", ".join(f"{name}={value}" for name, value in arguments.items())
            override = f"DataLoader({listed})"
            if threads:
                override += f" threads={threads}"
            yield replace(
                was,
                cause="data",
                override=override,
                feed=other_feed,
                threads=threads or was.threads,
            )


def _loader_arguments(
    feed: OwnFeed, was: TrainingWay, evidence: Evidence
) -> Iterator[tuple[dict[str, Any], int | None]]:
    """Arguments of a DataLoader to race, each with the threads it leaves to the model.

    The threads are None where they stay as they are.
    """
    workers_now = feed.num_workers
    is_cpu = feed.device.type == "cpu"
    reading_is_busy = (evidence.feed_cores or 0.0) >= ways.BUSY
    if workers_now and evidence.epochs > 1 and feed.starts == 1.0:
        yield {"persistent_workers": True}, None
    workers = _workers_to_keep_up(feed, evidence, reading_is_busy)
    if is_cpu and reading_is_busy and not workers_now:
        # Workers and the model's threads share the cores: more of either would take turns on one.
        workers = max(1, evidence.cores // 2)
        threads = max(1, evidence.cores - workers)
        yield {"num_workers": workers}, threads if threads < was.threads else None
    elif workers > workers_now:
        yield {"num_workers": workers}, None
    if workers_now:
        yield {"prefetch_factor": _AHEAD * feed.prefetch}, None
        yield {"num_workers": 0}, None
    if not is_cpu and not feed.loader.pin_memory:
        yield {"num_workers": max(1, workers), "pin_memory": True}, None


def _workers_to_keep_up(feed: OwnFeed, evidence: Evidence, reading_is_busy: bool) -> int:
    """So many workers that a batch is ready when the model needs it, within what is sensible."""
    if feed.is_stream:
        most = 1  # each worker would give the whole stream
    elif reading_is_busy:
        most = evidence.cores
    else:
        most = ways.MOST_WORKERS
    return min(most, evidence.readers_to_keep_up * feed.workers)


def _larger_batches(was: TrainingWay, evidence: Evidence, until: float) -> Iterator[TrainingWay]:
    """A step's batches in one where it accumulates several, else larger ones where these are small.

    `until` is the end of all tries: batches that would take too long to race are left out.
    """
    feed: Any = was.feed
    rows = feed.plan.rows_per_batch
    accumulate = evidence.accumulate
    # Batches can be put together where they are read row by row.
    may_grow = feed.rows_of_batches is not None and feed.loader.batch_sampler is not None
    if not may_grow or (feed.device.type == "cpu" and free_bytes() < ways.FREE_BYTES):
        return
    if accumulate > 1:
        step_rows = rows * accumulate
        if step_rows <= ways.SMALL_ROWS:
            override = f"DataLoader(batch_size={step_rows}) ++trainer.accumulate_grad_batches=1"
            grown = feed.grown(accumulate)
            yield replace(was, cause="accumulation", override=override, feed=grown)
        return
    if rows >= ways.SMALL_ROWS:
        return
    left_s = until - time.perf_counter()
    most_rows = min(feed.num_rows // ways.LEAST_STEPS_AN_EPOCH, 4 * ways.SMALL_ROWS)
    for times in (16, 4):
        # if a batch of so many times the rows takes so many times as long, which is the worst case
        is_quick = times * evidence.model_ms / 1000 < left_s / (4 * ROUNDS)
        if is_quick and times * rows <= most_rows:
            override = f"DataLoader(batch_size={times * rows})"
            yield replace(was, cause="batch", override=override, feed=feed.grown(times))
