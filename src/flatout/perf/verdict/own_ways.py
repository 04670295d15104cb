"""Ways that may train a user's model with the user's DataLoader faster, to be raced.

They serve Trainers of Lightning (`own_tries.py`) and of transformers (`transformers_races.py`).
Open this file to add a way, or to change when one is worth its time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from flatout.distributed.limits import free_bytes
from flatout.engine.precision import Precision, bf16_is_native_on_cpu
from flatout.perf.measure.steps import TrainingWay
from flatout.perf.verdict import ways
from flatout.perf.verdict.evidence import LEAST_GAIN, ROUNDS, Evidence
from flatout.perf.verdict.own_feed import OwnFeed
from flatout.perf.verdict.ways import most_fed

# For workers that keep up but for some slow batches: so many times as many batches read ahead.
_AHEAD = 4


def other_precision(precision: Precision, device: torch.device) -> str:
    """The precision to race against this one; empty where the device has none in hardware."""
    is_cuda = device.type == "cuda"
    if precision is not Precision.fp32:
        return "" if is_cuda else Precision.fp32.value
    if is_cuda:
        has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
        return Precision.bf16.value if has_bf16 else Precision.fp16.value
    has_bf16 = device.type == "cpu" and bf16_is_native_on_cpu()
    return Precision.bf16.value if has_bf16 else ""


def other_loaders(was: TrainingWay, evidence: Evidence) -> Iterator[TrainingWay]:
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


def larger_batches(was: TrainingWay, evidence: Evidence, until: float) -> Iterator[TrainingWay]:
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
