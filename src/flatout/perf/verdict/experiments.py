"""What a finished run tries: steps of its model in other ways, timed side by side with steps as they were.

Nothing of it stays: the learning rate is zero, weights and random numbers are put back, and the time it may take is a
small share of the run's. So a verdict can say what a fix is worth here, on this machine, with these rows.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from flatout.data.batches.feed import Feed, Feeds
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.gather import TOKENS
from flatout.data.batches.plan import Layout, PlanSettings
from flatout.data.feeding import FeedKind
from flatout.engine.gradients import clip_gradients
from flatout.engine.limits import free_bytes
from flatout.engine.precision import Precision, arithmetic, by_lightning_name
from flatout.errors import UserError
from flatout.models.encoder.transformer import FLAT_FAMILIES, Compute, Transformer, TransformerConfig
from flatout.models.lean import LeanEmbedding
from flatout.perf.verdict.evidence import LEAST_GAIN, Evidence, Tried
from flatout.tasks.task import Task

SHARE = 0.1
"""Of the time of training, what trying may take."""
_LEAST_S, _MOST_S = 0.2, 20.0
_WAITS, _START_S = 0.05, 3.0
"""Share of waiting from which on other feeds are tried, and what that takes where workers must start."""
_ROUNDS, _ROUND_S = 3, 0.03
_ROWS_AROUND = 64
_DROPOUTS = ("dropout", "embedding_dropout", "head_dropout")
_MOSTLY_WAITS = 0.3
"""Share of waiting from which on nothing but the feed is worth trying."""
_FED_STEPS, _LEAST_FED_STEPS = 40, 3
_BATCHES_A_RUN = 4
"""Gathered at once: a try is over before the many of a usual run would have come."""
_SMALL_TOKENS, _SMALL_ROWS = 2048, 128
"""Batches below this are tried larger."""
_LEAST_STEPS_AN_EPOCH = 8
_FREE_BYTES = 4 << 30
_MOST_WORKERS = 8


@dataclass(kw_only=True, slots=True)
class Way:
    """One way to train: what is different, and how the person would say so."""

    cause: str = "as it was"
    override: str = ""
    feed: Feed
    precision: Precision
    threads: int
    model: nn.Module
    drops: bool = True


def try_out(task: Task, feeds: Feeds, evidence: Evidence, *, is_compiled: bool) -> None:
    """Fill what was tried into the evidence, or why nothing was."""
    trained_s = evidence.total_ms * evidence.batches / 1000
    waits = evidence.share("wait") >= _WAITS
    seconds = min(SHARE * trained_s, _MOST_S)
    if waits:
        seconds = max(seconds, min(_START_S, trained_s / 4))
    if seconds < _LEAST_S:
        evidence.not_tried = "nothing was tried: the run was short"
        return
    if task.device.type == "cuda" and task.trainer.precision == "16-mixed":
        evidence.not_tried = "nothing was tried: fp16 needs its scaler"
        return
    if evidence.pieces > 1:
        evidence.not_tried = "nothing was tried: whole batches do not fit into memory"
        return
    if is_compiled:
        evidence.not_tried = "nothing was tried: each way would be compiled first"
        return
    until = time.perf_counter() + seconds
    with _nothing_stays(task):
        was = Way(
            feed=_afresh(feeds.train),
            precision=by_lightning_name(evidence.precision),
            threads=torch.get_num_threads(),
            model=task.model,
        )
        if waits:
            evidence.feed_alone = _rows_per_s_of_feed(was.feed, seconds / 10)
        ways = [was, *_other_ways(task, was, evidence)]
        ways = [way for way in ways if not _is_hopeless(way, was, evidence)]
        if len(ways) > 1:
            evidence.tried = _timed(ways, task, until, evidence)
            if not evidence.tried:
                evidence.not_tried = "nothing was tried: a step takes too long for it"
        elif waits:
            evidence.not_tried = "no other feed was tried: none makes more rows here"


@contextmanager
def _nothing_stays(task: Task) -> Iterator[None]:
    """Weights, running statistics, gradients and random numbers are afterwards what they were."""
    kept = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    threads, was_training = torch.get_num_threads(), task.model.training
    devices = [task.device] if task.device.type == "cuda" else []
    lean = [module for module in task.model.modules() if isinstance(module, LeanEmbedding)]
    recombined = [(each, each.next) for each in getattr(task, "recombined", [])]
    with torch.random.fork_rng(devices):
        task.model.train()
        for embedding in lean:
            embedding.keeps_gradient = task.device.type == "cpu"
        try:
            yield
        finally:
            task.model.load_state_dict(kept)
            task.model.train(was_training)
            task.zero_grad()
            torch.set_num_threads(threads)
            for embedding in lean:
                embedding.clear()
                embedding.keeps_gradient = False
            for each, place in recombined:
                each.next = place


def _other_ways(task: Task, was: Way, evidence: Evidence) -> Iterator[Way]:
    """Whatever could be faster, what is likeliest first."""
    if evidence.feed_alone is not None:
        yield from _other_feeds(was, evidence)
        if evidence.share("wait") >= _MOSTLY_WAITS:
            return
    if (flat := _flat(task, evidence)) is not None:
        feed = _afresh(was.feed, layout=Layout.flat)
        yield replace(was, cause="padding", override="model.compute=flat", feed=feed, model=flat)
    if evidence.native == Precision.bf16:  # fp16 needs its scaler
        yield replace(was, cause="precision", override="precision=bf16", precision=Precision.bf16)
    if task.device.type == "cpu" and was.threads < evidence.cores and evidence.world == 1:
        yield replace(was, cause="threads", override=f"threads={evidence.cores}", threads=evidence.cores)
    yield from _larger_batches(was, evidence, "" if evidence.effective_batch is None else _NO_EFFECTIVE_BATCH)
    drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in task.model.modules())
    names = [name for name in _DROPOUTS if hasattr(task.model_config, name)]
    if drops and names:
        yield replace(was, cause="dropout", override=" ".join(f"model.{name}=0" for name in names), drops=False)


def _other_feeds(was: Way, evidence: Evidence) -> Iterator[Way]:
    feed = was.feed
    model_ms = sum(evidence.ms.get(part, 0.0) for part in ("forward", "backward", "optimizer"))
    needed = 1 + round((evidence.ms["wait"] + model_ms) / max(model_ms, 1e-3))
    workers = min(_MOST_WORKERS, needed * (feed.workers if feed.kind is FeedKind.workers else 1))
    # A thread hides what is quicker than the model; where it is not, more hands are needed.
    is_slow = (evidence.feed_alone or 0.0) < 1000 * evidence.rows_per_batch / max(model_ms, 1e-3)
    kinds = [FeedKind.threaded, FeedKind.resident, FeedKind.workers]
    if is_slow and feed.device.type == "cpu" and feed.kind is not FeedKind.workers and evidence.cores > 1:
        hands = evidence.cores // 2  # where making batches takes the processor, the cores are shared out
        override = f"data.feed=workers data.workers={hands} threads={evidence.cores - hands}"
        made = _afresh(feed, kind=FeedKind.workers, workers=hands)
        yield replace(was, cause="data", override=override, feed=made, threads=evidence.cores - hands)
    for kind in reversed(kinds) if is_slow else kinds:
        if kind is FeedKind.workers and (feed.kind is not kind or workers > feed.workers):
            override = f"data.feed=workers data.workers={workers}"
            yield replace(was, cause="data", override=override, feed=_afresh(feed, kind=kind, workers=workers))
        elif kind not in (feed.kind, FeedKind.workers):
            yield replace(was, cause="data", override=f"data.feed={kind}", feed=_afresh(feed, kind=kind))


def _is_hopeless(way: Way, was: Way, evidence: Evidence) -> bool:
    """Whether even a model that takes no time would wait as long for this feed."""
    most = _most_fed(way.feed, was.feed, evidence.feed_alone)
    return way.cause == "data" and most < LEAST_GAIN * evidence.model_rows_per_s


_NO_EFFECTIVE_BATCH = " data.effective_batch=null"


def _larger_batches(was: Way, evidence: Evidence, also: str) -> Iterator[Way]:
    """The batches of a step in one, where there are several; else larger ones, where these are small."""
    plan, rows = was.feed.plan, evidence.batch_size
    if rows is None or (was.feed.device.type == "cpu" and free_bytes() < _FREE_BYTES):
        return
    tokens_a_row = was.feed.split.lengths(TOKENS).mean()
    if plan.accumulate > 1:
        whole = rows * plan.accumulate
        if whole * tokens_a_row <= 4 * _SMALL_TOKENS or whole <= _SMALL_ROWS:
            override = f"data.batch_size={whole} data.accumulate=1{also}"
            feed = _afresh(was.feed, rows_per_batch=whole, accumulate=1)
            yield replace(was, cause="accumulation", override=override, feed=feed)
        return
    if rows * tokens_a_row >= _SMALL_TOKENS or rows >= _SMALL_ROWS:
        return
    most = len(was.feed.split.lengths(TOKENS)) // _LEAST_STEPS_AN_EPOCH
    for size in (16 * rows, 4 * rows):
        if size <= min(most, 4 * _SMALL_ROWS) and size * tokens_a_row <= 4 * _SMALL_TOKENS:
            feed = _afresh(was.feed, rows_per_batch=size)
            yield replace(was, cause="batch", override=f"data.batch_size={size}{also}", feed=feed)


def alone_ms(task: Task, feeds: Feeds, seconds: float) -> float:
    """Milliseconds that this rank computes for a batch where it waits for no other."""
    precision = by_lightning_name(str(task.trainer.precision))
    is_resident = feeds.train.kind is FeedKind.resident
    feed = _afresh(feeds.train, kind=FeedKind.resident if is_resident else FeedKind.threaded)
    with _nothing_stays(task):
        way = Way(feed=feed, precision=precision, threads=torch.get_num_threads(), model=task.model)
        side = _Side(way, task, _standing_optimizer(task.model, task))
        side.steps = _steps_around(feed)
        side.round()
        until, side.count = time.perf_counter() + seconds, 0
        taken: list[float] = []
        while len(taken) < _ROUNDS or time.perf_counter() < until:
            taken.append(side.round())
    return 1000 * sum(taken) / side.count


def _flat(task: Task, evidence: Evidence) -> Transformer | None:
    """The same encoder without padding, where padding was asked for and is much."""
    model, settings = task.model, task.model_config
    is_padded = isinstance(model, Transformer) and not model.is_flat and model.family in FLAT_FAMILIES
    if not is_padded or not isinstance(settings, TransformerConfig) or evidence.padding_share < 0.1:
        return None
    flat = task.build_model(replace(settings, compute=Compute.flat), task.info)
    flat.load_state_dict(model.state_dict())
    for ours, theirs in zip(flat.parameters(), model.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)  # layers may have thawed meanwhile
    assert isinstance(flat, Transformer)
    return flat.to(task.device).train()


def _afresh(feed: Feed, *, kind: FeedKind | None = None, workers: int | None = None, **changed: Any) -> Feed:
    """A feed of this rank's rows alone, which moves no other."""
    plan: PlanSettings = replace(feed.plan, rank=0, world=1, **changed)
    kept: dict[str, Any] = {"device": feed.device, "transform": feed.transform, "workers": workers or feed.workers}
    kept["batches_a_run"] = _BATCHES_A_RUN
    return Feed(feed.split, plan, kind=kind or feed.kind, **kept)


def _rows_per_s_of_feed(feed: Feed, seconds: float) -> float | None:
    """Rows a second with nothing else to do; the first batch, which starts what must be started, not counted."""
    batches = iter(feed)
    next(batches, None)
    began, rows = time.perf_counter(), 0
    for batch in batches:
        rows += batch.num_real
        if time.perf_counter() - began > seconds:
            break
    return rows / max(time.perf_counter() - began, 1e-9) if rows else None


class _Side:
    """Steps in one way."""

    def __init__(self, way: Way, task: Task, optimizer: torch.optim.Optimizer, *, is_fed: bool = False) -> None:
        """`is_fed`: batches come as the feed gives them; else a few go round, as often-seen shapes cost least."""
        self.way, self.task, self.optimizer = way, task, optimizer
        self.trained = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        self.lean = [module for module in way.model.modules() if isinstance(module, LeanEmbedding)]
        for embedding in self.lean:
            embedding.keeps_gradient = way.feed.device.type == "cpu"
        self.batches: Iterator[FlatBatch] = _endless(way.feed) if is_fed else itertools.cycle(_some(way.feed))
        self.rows = self.count = 0
        self.rates: list[float] = []
        self.steps = 1
        """Optimizer steps of each round."""

    def round(self) -> float:
        """Train some steps; how long they took."""
        if torch.get_num_threads() != self.way.threads:
            torch.set_num_threads(self.way.threads)
            self._step()  # threads that slept must wake
        dropouts = [] if self.way.drops else [each for each in self.way.model.modules() if isinstance(each, nn.Dropout)]
        for module in dropouts:
            module.eval()
        began, rows = time.perf_counter(), 0
        for _ in range(self.steps):
            rows += self._step()
        if self.task.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        for module in dropouts:
            module.train()
        self.rates.append(rows / seconds)
        return seconds

    def _step(self) -> int:
        rows = 0
        while True:
            batch = next(self.batches)
            with arithmetic(self.way.precision, self.task.device):
                loss = self.task.training_loss(batch, self.way.model)
            loss.backward()
            rows += batch.num_real
            self.count += 1
            self.rows += batch.num_real
            if batch.ends_step:
                break
        if clip := self.task.trainer.gradient_clip_val:
            clip_gradients(self.trained, float(clip))
        self.optimizer.step()
        for embedding in self.lean:
            embedding.clear()
        self.optimizer.zero_grad()
        return rows


def _standing_optimizer(model: nn.Module, task: Task) -> torch.optim.Optimizer:
    """One that computes its steps and takes none."""
    optimizer = task.optim.build(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return optimizer


def _steps_around(feed: Feed) -> int:
    """Optimizer steps of the batches that go round."""
    return max(1, -(-_ROWS_AROUND // (feed.plan.rows_per_batch * feed.plan.accumulate)))


def _some(feed: Feed) -> list[FlatBatch]:
    """The batches of the fewest whole steps with so many rows."""
    batches: list[FlatBatch] = []
    rows = 0
    for batch in feed:
        batches.append(batch)
        rows += batch.num_real
        if rows >= _ROWS_AROUND and batch.ends_step:
            break
    return batches


def _endless(feed: Feed) -> Iterator[FlatBatch]:
    for epoch in itertools.count():
        feed.set_epoch(epoch)
        yield from feed


def _in_turn(sides: list[_Side], until: float) -> list[_Side]:
    """Rounds of all sides in turn until the time is over; those that it is too short for are left out."""
    kept: list[_Side] = []
    needed = 0.0
    for side in sides:
        if kept and time.perf_counter() > until:
            break
        around = _steps_around(side.way.feed)
        try:
            side.steps = around
            side.round()  # warms up
            side.rates.clear()
            seconds = side.round() / around
        except (RuntimeError, UserError):  # not enough memory, most likely: then it is no way
            continue
        side.steps = -(-max(1, round(_ROUND_S / max(seconds, 1e-6))) // around) * around
        cost = (_ROUNDS - 1) * seconds * side.steps
        if kept and time.perf_counter() + needed + cost > until:
            continue  # another may be quicker
        needed += cost
        kept.append(side)
    while len(kept) > 1:
        for side in kept:
            side.round()
        rounds = len(kept[0].rates)
        if (time.perf_counter() > until and rounds >= _ROUNDS) or rounds >= 4 * _ROUNDS:
            break
    return kept


def _one_by_one(sides: list[_Side], until: float) -> list[_Side]:
    """One long round each, with what starting costs an epoch; between rounds a feed would gather the next one ahead."""
    kept: list[_Side] = []
    for number, side in enumerate(sides):
        share_s = (until - time.perf_counter()) / (len(sides) - number)
        try:
            if _long_round(side, share_s):
                kept.append(side)
        except (RuntimeError, UserError):
            continue
        finally:
            side.batches = iter(())  # its workers end
        if time.perf_counter() > until:
            break
    return kept


def _long_round(side: _Side, seconds: float) -> bool:
    """Steps until it runs evenly, then some that count; False where there is no time for it."""
    feed, began = side.way.feed, time.perf_counter()
    has_workers = feed.kind is FeedKind.workers
    start_s = side.round()
    # Where processes start that is the most of it; else as much comes again with every few batches.
    to_come_s = start_s if has_workers else start_s * (_LEAST_FED_STEPS + _BATCHES_A_RUN)
    if to_come_s > seconds:
        return False
    side.steps = 2 * feed.workers if has_workers else _BATCHES_A_RUN
    step_s = side.round() / side.steps  # what was gathered while it started
    warm = 1 + side.steps
    left_s = seconds - (time.perf_counter() - began)
    steps = max(_LEAST_FED_STEPS, min(_FED_STEPS, int(left_s / max(step_s, 1e-6))))
    if has_workers and steps >= 2 * _LEAST_FED_STEPS:
        side.steps = steps // 3
        side.round()
        warm, steps = warm + side.steps, steps - side.steps
    side.steps = steps
    side.rates.clear()
    spent_s = time.perf_counter() - began
    even_s = side.round() / side.steps
    rows = len(feed.split.lengths(TOKENS))  # it restarts each epoch
    side.rates = [rows / (rows / side.rates[0] + max(0.0, spent_s - warm * even_s))]
    return True


def _most_fed(feed: Feed, was: Feed, alone: float | None) -> float:
    """Rows a second that a feed gives in the long run: a try may live on what was gathered ahead.

    A process makes no more than a thread; a thread may make more than a process, whose batches have a way to go.
    """
    if alone is None or (was.kind is FeedKind.workers and feed.kind is not FeedKind.workers):
        return float("inf")
    hands = [each.workers if each.kind is FeedKind.workers else 1 for each in (feed, was)]
    return alone * hands[0] / hands[1]


def _timed(ways: list[Way], task: Task, until: float, evidence: Evidence) -> list[Tried]:
    """What each way was worth beside the first, as far as there is time for it."""
    optimizers = {id(way.model): _standing_optimizer(way.model, task) for way in ways}
    was, feed_alone = ways[0], evidence.feed_alone
    if feed_alone is None:
        # Flat batches have a shape of their own each, and new shapes cost: the same few again would flatter them.
        is_fed = any(way.model is not was.model for way in ways)
        sides = [_Side(way, task, optimizers[id(way.model)], is_fed=is_fed) for way in ways]
        kept = _in_turn(sides, until)
        if not kept or kept[0].way is not was:
            return []
        others, as_was = kept[1:], statistics.median(kept[0].rates)
    else:  # a whole run with this feed tells more of it than another try
        sides = [_Side(way, task, optimizers[id(way.model)], is_fed=True) for way in ways[1:]]
        others, as_was = _one_by_one(sides, until), evidence.model_rows_per_s
    return [
        Tried(
            cause=side.way.cause,
            override=side.way.override,
            rows_per_s=min(statistics.median(side.rates), _most_fed(side.way.feed, was.feed, feed_alone)),
            as_was=as_was,
            rows_per_batch=side.rows / side.count,
            batches_per_step=side.way.feed.plan.accumulate,
        )
        for side in others
    ]
