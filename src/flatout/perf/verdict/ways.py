"""Ways to train that a finished run tries, as they could be faster here; the likeliest come first.

Each function yields `TrainingWay`s for one kind of change: another feed, another number format,
larger batches, no padding. `experiments.py` races them. Open this file to add a way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flatout.data.batches.feed import Feed, choose_feed
from flatout.data.batches.gather import TOKENS
from flatout.data.batches.plan import BatchLayout, PlanSettings
from flatout.data.feeding import FeedKind
from flatout.distributed.limits import free_bytes
from flatout.engine.precision import Precision
from flatout.models.encoder.transformer import FLAT_FAMILIES, Compute, Transformer
from flatout.perf.measure.steps import TrainingWay
from flatout.perf.verdict.evidence import LEAST_GAIN, Evidence

if TYPE_CHECKING:
    from flatout.tasks.task import Task

BATCHES_A_RUN = 4  # gathered at once; a run gathers more, for which a try is too short
# Batches below both are tried larger.
_SMALL_TOKENS = 2048
SMALL_ROWS = 128
LEAST_STEPS_AN_EPOCH = 8  # larger batches must leave so many
FREE_BYTES = 4 << 30  # of memory, without which no larger batches are tried on a CPU
MOST_WORKERS = 8
# Cores that a feed keeps busy, from which on making batches is work of the CPU. Below, it waits,
# such as for a disk.
BUSY = 0.5


class Refused(Exception):
    """Nothing is tried; the message says why."""


def open_feed(
    feed: Feed, *, kind: FeedKind | None = None, workers: int | None = None, **changed: Any
) -> Feed:
    """A new feed of the same rows, as a single rank; `changed`: settings of its plan.

    Reading it does not move `feed`.
    """
    plan: PlanSettings = replace(feed.plan, rank=0, world=1, **changed)
    return Feed(
        feed.split,
        plan,
        kind=kind or feed.kind,
        workers=workers or feed.workers,
        device=feed.device,
        transform=feed.transform,
        complete=feed.complete,
        batches_a_run=BATCHES_A_RUN,
    )


def other_feeds(was: TrainingWay, evidence: Evidence) -> Iterator[TrainingWay]:
    """Ways with another feed, at most two. Which ones depends on whether the feed needs the CPU."""
    feed = was.feed
    for override, kind, workers, threads in _feed_overrides(feed, evidence):
        other = open_feed(feed, kind=kind, workers=workers)
        if most_fed(other, feed, evidence.feed_alone) >= LEAST_GAIN * evidence.model_rows_per_s:
            yield replace(
                was, cause="data", override=override, feed=other, threads=threads or was.threads
            )


def _feed_overrides(
    feed: Feed, evidence: Evidence
) -> Iterator[tuple[str, FeedKind, int | None, int | None]]:
    """Override, kind, workers and threads of each feed to try; None: as they are."""
    model_ms = max(evidence.model_ms, 1e-3)
    is_busy = (evidence.feed_cores or 0.0) >= BUSY
    is_plain = feed.transform is None and feed.complete is None
    if feed.kind is not FeedKind.resident and not is_busy and is_plain:
        best = choose_feed(FeedKind.auto, feed.split.num_bytes, feed.device).value
        if best is FeedKind.resident:
            yield "data.feed=resident", FeedKind.resident, None, None
    is_slow = (evidence.feed_alone or 0.0) < 1000 * evidence.rows_per_batch / model_ms
    # A thread is enough if the feed is faster than the model: it reads ahead meanwhile.
    if not is_slow and feed.kind is not FeedKind.threaded:
        yield "data.feed=threaded", FeedKind.threaded, None, None
    workers = min(MOST_WORKERS, evidence.readers_to_keep_up * _num_readers(feed))
    has_fewer = feed.kind is not FeedKind.workers or workers > feed.workers
    if feed.device.type == "cpu" and is_busy:
        # Workers and the model's threads share the cores: more of either would take turns on one.
        workers = evidence.cores // 2
        if workers and feed.kind is not FeedKind.workers:
            threads = evidence.cores - workers
            override = f"data.feed=workers data.workers={workers} threads={threads}"
            yield override, FeedKind.workers, workers, threads
    elif has_fewer:
        yield f"data.feed=workers data.workers={workers}", FeedKind.workers, workers, None
    if is_slow and not is_busy and feed.kind is FeedKind.resident:
        yield "data.feed=threaded", FeedKind.threaded, None, None


def most_fed(feed: Feed, was: Feed, alone: float | None) -> float:
    """Most rows a second of `feed` in the long run; infinite if that is unknown.

    `alone`: rows a second of the feed `was` without a model. Each worker reads as fast as another.
    A short try may be faster, as it reads batches that were gathered ahead.
    """
    is_leaving_workers = was.kind is FeedKind.workers and feed.kind is not FeedKind.workers
    is_becoming_resident = feed.kind is FeedKind.resident and was.kind is not feed.kind
    if alone is None or is_leaving_workers or is_becoming_resident:
        return float("inf")
    return alone * _num_readers(feed) / _num_readers(was)


def _num_readers(feed: Feed) -> int:
    return feed.workers if feed.kind is FeedKind.workers else 1


def other_models(task: Task, was: TrainingWay, evidence: Evidence) -> Iterator[TrainingWay]:
    """Ways with another model, number format or batch size, on the same kind of feed."""
    flat = _flat_copy(task, evidence)
    if flat is not None:
        feed = open_feed(was.feed, layout=BatchLayout.flat)
        yield replace(was, cause="padding", override="model.compute=flat", feed=feed, model=flat)
    yield from other_arithmetic(was, evidence)
    yield from _larger_batches(was, evidence)


def other_arithmetic(was: TrainingWay, evidence: Evidence) -> Iterator[TrainingWay]:
    """The same steps in the native number format, and with all cores."""
    if evidence.native not in ("", was.precision):
        precision = Precision(evidence.native)
        yield replace(
            was, cause="precision", override=f"precision={precision}", precision=precision
        )
    if was.feed.device.type == "cpu" and was.threads < evidence.cores and evidence.world == 1:
        yield replace(
            was, cause="threads", override=f"threads={evidence.cores}", threads=evidence.cores
        )


def _larger_batches(was: TrainingWay, evidence: Evidence) -> Iterator[TrainingWay]:
    """All batches of a step in one, if it has several; else larger batches, if they are small."""
    plan = was.feed.plan
    rows = evidence.batch_size
    if rows is None or (was.feed.device.type == "cpu" and free_bytes() < FREE_BYTES):
        return
    tokens_a_row = was.feed.split.lengths(TOKENS).mean()
    also = "" if evidence.effective_batch is None else " data.effective_batch=null"
    if plan.accumulate > 1:
        whole = rows * plan.accumulate
        if whole * tokens_a_row <= 4 * _SMALL_TOKENS or whole <= SMALL_ROWS:
            override = f"data.batch_size={whole} data.accumulate=1{also}"
            feed = open_feed(was.feed, rows_per_batch=whole, accumulate=1)
            yield replace(was, cause="accumulation", override=override, feed=feed)
        return
    if rows * tokens_a_row >= _SMALL_TOKENS or rows >= SMALL_ROWS:
        return
    most = was.feed.num_rows // LEAST_STEPS_AN_EPOCH
    for size in (16 * rows, 4 * rows):
        if size <= min(most, 4 * SMALL_ROWS) and size * tokens_a_row <= 4 * _SMALL_TOKENS:
            feed = open_feed(was.feed, rows_per_batch=size)
            yield replace(was, cause="batch", override=f"data.batch_size={size}{also}", feed=feed)


def _flat_copy(task: Task, evidence: Evidence) -> Transformer | None:
    """A copy of the encoder that computes without padding; None if there is little padding.

    Also None for models that compute flat already, or cannot.
    """
    model = task.model
    settings = task.model_config
    is_padded = (
        isinstance(model, Transformer) and not model.is_flat and model.family in FLAT_FAMILIES
    )
    if not is_padded or settings is None or evidence.padding_share < 0.1:
        return None
    flat = task.build_model(replace(settings, compute=Compute.flat), task.info)
    flat.load_state_dict(model.state_dict())
    for ours, theirs in zip(flat.parameters(), model.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)  # some layers may have thawed in training
    assert isinstance(flat, Transformer)
    return flat.to(task.device).train()
