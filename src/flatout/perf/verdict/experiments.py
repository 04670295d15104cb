"""Try other ways to train when a run has finished, side by side with steps as they were.

Nothing of it stays: the learning rate is zero, weights and random numbers are put back, and the
time it may take is a small share of the run's. So a verdict can say what a fix is worth here, on
this machine, with these rows.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace

import torch

from flatout.data.batches.feed import Feed, Feeds
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.feeding import FeedKind
from flatout.engine.precision import by_lightning_name
from flatout.errors import UserError, first_line
from flatout.perf.measure.intervals import MOST_ROUNDS, speedup, take_turns
from flatout.perf.measure.steps import (
    Steps,
    Taken,
    TrainingWay,
    endless,
    measure_feed,
    standing_optimizer,
)
from flatout.perf.verdict.evidence import (
    COMPUTED,
    LEAST_COMPILING,
    ROUND_S,
    ROUNDS,
    Evidence,
    Tried,
)
from flatout.perf.verdict.rules import starved
from flatout.perf.verdict.ways import (
    BATCHES_A_RUN,
    Refused,
    most_fed,
    open_feed,
    other_feeds,
    other_models,
)
from flatout.tasks.task import Task

SHARE = 0.1  # of the time of training, what trying may take
LEAST_S = 0.2
MOST_S = 20.0
# of a short run trying may take more: so many seconds, and such a share
_SHORT_S = 3.0
_SHORT_SHARE = 0.3
# share of waiting from which on other feeds are tried, and seconds for it in a short run
WAITS = 0.05
_FEEDS_S = 6.0
ROWS_AROUND = 256  # rows of the batches that are raced, and of those that warm up
# of steps that nothing interrupts: fewest; most of all, and s
_CALM_STEPS = 2
_CALM_SHARE = 0.2
_CALM_S = 1.0
_MOSTLY_WAITS = 0.3  # share of waiting from which on nothing but the feed is worth trying
_FED_ROUNDS = 2
_FED_STEPS = 12
_FED_S = 0.3
"""Fewest rounds; fewest steps and seconds of a round: cores that slept while they waited are slow
at first."""
_START_S = 0.3  # a guess at what it takes to start a feed


def try_safely(evidence: Evidence, tries: Callable[[], None]) -> None:
    """Try other ways; what goes wrong there is noted, and the run keeps its verdict
    without them.
    """
    try:
        tries()
    except Refused as why:
        evidence.tried = []
        evidence.not_tried = f"nothing was tried: {why}"
    except Exception as error:
        # your own model may raise anything; the trained weights are not lost by a try
        evidence.tried = []
        evidence.not_tried = f"trying other ways failed: {first_line(error)}"
    except KeyboardInterrupt:  # the run itself is done, and has only to be reported
        evidence.tried = []
        evidence.not_tried = "trying other ways was stopped"


def try_out(task: Task, feeds: Feeds, evidence: Evidence, *, is_compiled: bool) -> None:
    """Fill what was tried into the evidence, or why nothing was."""
    trained_s = evidence.total_ms * evidence.batches / 1000
    waits = evidence.share("wait") >= WAITS
    seconds = min(SHARE * trained_s, MOST_S)
    if seconds >= LEAST_S:
        seconds = max(seconds, min(_SHORT_S, _SHORT_SHARE * trained_s))
    if waits:
        seconds = max(seconds, min(_FEEDS_S, trained_s / 2))
    is_calm = seconds >= LEAST_S and evidence.pieces == 1 and starved(evidence) is None
    if is_calm and evidence.compiling_share >= LEAST_COMPILING:
        with torch.compiler.set_stance("force_eager"):
            evidence.eager_ms = alone_ms(task, feeds, min(_CALM_S, _CALM_SHARE * seconds))
    if seconds < LEAST_S:
        evidence.not_tried = "nothing was tried: the run was short"
    elif evidence.pieces > 1:
        evidence.not_tried = "nothing was tried: whole batches do not fit into memory"
    elif is_compiled:
        evidence.not_tried = "nothing was tried: each way would be compiled first"
    elif (found := starved(evidence)) is not None:
        # what is timed between turns of others means nothing
        evidence.not_tried = f"nothing was tried: {found.limit} would disturb it"
    else:
        with _nothing_stays(task):
            until = time.perf_counter() + seconds
            was = _way_of(task, open_feed(feeds.train))
            if not (waits and try_feeds(task, was, other_feeds, evidence, until)):
                was = replace(was, feed=_open_in_process(feeds.train))
                try_models(task, [was, *other_models(task, was, evidence)], evidence, until)


def try_feeds(
    task: Task,
    was: TrainingWay,
    others: Callable[[TrainingWay, Evidence], Iterable[TrainingWay]],
    evidence: Evidence,
    until: float,
) -> bool:
    """Measure the feed by itself and fill in what others are worth; whether training mostly waited
    for it.
    """
    if alone := measure_feed(was.feed, (until - time.perf_counter()) / 10):
        evidence.feed_alone, evidence.feed_cores = alone
    ways = [was, *others(was, evidence)]
    if len(ways) == 1:
        evidence.not_tried = (
            evidence.not_tried or "no other feed was tried: none makes more rows here"
        )
    else:
        _try_feeds(task, ways, evidence, until)
    return evidence.share("wait") >= _MOSTLY_WAITS


def _way_of(task: Task, feed: Feed) -> TrainingWay:
    return TrainingWay(
        feed=feed, precision=by_lightning_name(str(task.trainer.precision)), model=task.model
    )


@contextmanager
def _nothing_stays(task: Task) -> Iterator[None]:
    """Weights, running statistics, gradients and random numbers are afterwards what they were."""
    kept = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    threads = torch.get_num_threads()
    was_training = task.model.training
    recombined = [(each, each.next) for each in getattr(task, "recombined", [])]
    with torch.random.fork_rng([task.device] if task.device.type == "cuda" else []):
        task.model.train()
        try:
            yield
        finally:
            task.model.load_state_dict(kept)
            task.model.train(was_training)
            task.zero_grad()
            torch.set_num_threads(threads)
            for each, place in recombined:
                each.next = place


def try_models(task: Task, ways: list[TrainingWay], evidence: Evidence, until: float) -> None:
    """Fill in what steps of another kind are worth beside those of the first way, in rounds that
    take turns.
    """
    optimizers = {id(way.model): standing_optimizer(way.model, task) for way in ways}
    calm_s = min(_CALM_S, _CALM_SHARE * (until - time.perf_counter()))
    calm = _time_calm(task, ways[0], optimizers[id(ways[0].model)], calm_s)
    evidence.alone_ms = calm.computing_ms
    # Flat batches have a shape of their own each, and new shapes cost: the same few again would
    # flatter them.
    is_fed = any(way.model is not ways[0].model for way in ways)
    batches = [
        endless(way.feed) if is_fed else itertools.cycle(some_batches(way.feed)) for way in ways
    ]
    made = [
        _steps(task, way, given, optimizers[id(way.model)])
        for way, given in zip(ways, batches, strict=True)
    ]
    try:
        sides = _affordable(made, calm.computing_rate, until)
        if len(sides) < 2:
            if len(ways) > 1 and not evidence.tried:
                evidence.not_tried = (
                    evidence.not_tried or "nothing was tried: a step takes too long for it"
                )
            return
        turns = [
            lambda steps=steps, count=count: steps.take(count).computing_rate
            for steps, count in sides.items()
        ]
        was, *rates = take_turns(turns, least=ROUNDS, most=MOST_ROUNDS, until=until)
        for steps, found in zip(list(sides)[1:], rates, strict=True):
            tried = _tried(steps.way, was, found)
            of_run = tried.rows_per_s / tried.as_was * evidence.model_ms / evidence.alone_ms
            evidence.tried.append(_with_witnesses(tried, of_run))
    finally:
        for steps in made:
            steps.close()


def _time_calm(
    task: Task, way: TrainingWay, optimizer: torch.optim.Optimizer, seconds: float
) -> Taken:
    """Steps that nothing interrupts, over batches as the run's feed gives them: of all lengths, not
    a few.
    """
    with closing(_steps(task, way, endless(way.feed), optimizer)) as steps:
        steps.take(1)  # warms up
        return steps.take(_CALM_STEPS, seconds)


def _with_witnesses(tried: Tried, *others: float) -> Tried:
    """Other witnesses beside the try, such as the run's own pace: where they differ, both bounds
    count.
    """
    bounds = tried.speedup
    tried.low = min(bounds.low, *others)
    tried.high = max(bounds.high, *others)
    return tried


def _open_in_process(feed: Feed) -> Feed:
    """A feed without processes: what they make is waited for, which no way of computing changes."""
    return open_feed(
        feed, kind=FeedKind.resident if feed.kind is FeedKind.resident else FeedKind.threaded
    )


def _steps(
    task: Task, way: TrainingWay, batches: Iterator[FlatBatch], optimizer: torch.optim.Optimizer
) -> Steps:
    return Steps(task, way, batches, optimizer, clip=float(task.trainer.gradient_clip_val or 0.0))


def _affordable(sides: list[Steps], rate: float, until: float) -> dict[Steps, int]:
    """The sides whose rounds fit into the time, warmed up, and their steps a round; the first
    (`rate`) always.
    """
    kept: list[Steps] = []
    round_rows = ROUND_S * rate
    row_s = 0.0
    for side in sides:
        if kept and time.perf_counter() > until:
            break
        try:
            side.take(max(1, ROWS_AROUND // side.rows_a_step))  # warms up
            taken = side.take(1)
        except (RuntimeError, UserError):  # not enough memory, most likely: then it is no way
            if not kept:
                return {}
            continue
        most = max(round_rows, side.rows_a_step)
        all_s = row_s + taken.seconds / taken.rows
        if kept and time.perf_counter() + ROUNDS * most * all_s > until:
            continue  # another may be quicker
        round_rows, row_s = most, all_s
        kept.append(side)
    largest = max(side.rows_a_step for side in kept)
    return {side: math.ceil(round_rows / largest) * largest // side.rows_a_step for side in kept}


def some_batches(feed: Feed) -> list[FlatBatch]:
    """The first batches of the fewest whole steps with so many rows."""
    feed.consumed, rows = 0, 0
    batches: list[FlatBatch] = []
    for batch in feed:
        batches.append(batch)
        rows += batch.num_real
        if rows >= ROWS_AROUND and batch.ends_step:
            break
    return batches


def _tried(way: TrainingWay, before: list[float], after: list[float]) -> Tried:
    about = {
        "cause": way.cause,
        "override": way.override,
        "batches_per_step": way.feed.plan.accumulate,
    }
    rows = way.feed.num_rows / max(1, len(way.feed))
    return Tried.by(speedup(before, after), statistics.median(before), rows_per_batch=rows, **about)


def _try_feeds(task: Task, ways: list[TrainingWay], evidence: Evidence, until: float) -> None:
    """Fill in what each feed was worth; one that the time is too short for is named, as
    untested.
    """
    optimizer = standing_optimizer(task.model, task)
    # An epoch starts its feed's workers for training, and for each validation.
    usual = 1 + evidence.counts.get("validation", 0) / max(evidence.epochs, 1e-9)
    sides = [_Stretch(task, way, optimizer, getattr(way.feed, "starts", usual)) for way in ways]
    while len(sides) > 1 and _needed_s(sides, evidence) > until - time.perf_counter():
        evidence.untested = sides.pop().way.override
    if len(sides) == 1:
        return
    was, *rates = take_turns(
        [side.rate for side in sides], least=_FED_ROUNDS, most=MOST_ROUNDS // 2, until=until
    )
    for side, found in zip(sides[1:], rates, strict=True):
        most = most_fed(side.way.feed, ways[0].feed, evidence.feed_alone)
        tried = _tried(side.way, was, [min(rate, most) for rate in found])
        even = min(statistics.median(side.even), most) / statistics.median(sides[0].even)
        of_run = statistics.median(found) / evidence.model_rows_per_s
        evidence.tried.append(_with_witnesses(tried, of_run, even))


def _needed_s(sides: list[_Stretch], evidence: Evidence) -> float:
    step_s = evidence.ms_of(*COMPUTED) * evidence.accumulate / 1000
    starts_s = _START_S * sum(side.way.feed.kind is FeedKind.workers for side in sides)
    return _FED_ROUNDS * (starts_s + sum(max(_FED_S, side.steps * step_s) for side in sides))


@dataclass(slots=True)
class _Stretch:
    """Steps of one way from the start of its feed on, as an epoch has them."""

    task: Task
    way: TrainingWay
    optimizer: torch.optim.Optimizer
    starts: float
    even: list[float] = field(default_factory=list)
    """Rows a second of each round but for the start, which weighs less in a longer epoch."""

    @property
    def ahead(self) -> int:
        """Steps that live on what was gathered while the feed started: what workers read ahead, or
        a run.
        """
        feed = self.way.feed
        of_workers = getattr(feed, "prefetch", 2) * feed.workers  # torch's own default is two
        batches = {FeedKind.workers: of_workers, FeedKind.threaded: BATCHES_A_RUN}.get(feed.kind, 1)
        return -(-batches // feed.plan.accumulate)

    @property
    def steps(self) -> int:
        """Of one round."""
        return 1 + self.ahead + max(_FED_STEPS, 2 * self.ahead)

    def rate(self) -> float:
        """Rows a second of an epoch: the start, then steps at the even pace."""
        feed = self.way.feed
        feed.consumed = 0
        with closing(_steps(self.task, self.way, endless(feed), self.optimizer)) as steps:
            first_s = steps.take(1).seconds
            steps.take(self.ahead)
            even = steps.take(self.steps - 1 - self.ahead, _FED_S)
        self.even.append(even.rate)
        step_s = even.seconds * feed.plan.accumulate / even.batches
        rows = feed.num_rows
        start_s = max(0.0, first_s - step_s)
        return rows / (rows / even.rate + self.starts * start_s)


def alone_ms(task: Task, feeds: Feeds, seconds: float) -> float:
    """Milliseconds that this rank computes for a batch where it waits for no other."""
    way = _way_of(task, _open_in_process(feeds.train))
    with _nothing_stays(task):
        return _time_calm(task, way, standing_optimizer(task.model, task), seconds).computing_ms
