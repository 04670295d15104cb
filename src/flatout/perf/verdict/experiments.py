"""Try other ways to train after a run has finished, in turn with steps as they were.

So a verdict can say what a fix is worth on this machine, with these rows. The tries take a small
fraction of the run's time and change nothing: the learning rate is zero, and random numbers are
restored. Feeds are raced from their start (`try_feeds`), models and batch sizes by their steps
alone (`try_models`).
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from flatout.data.batches.feed import Feed, Feeds
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.feeding import FeedKind
from flatout.engine.precision import by_lightning_name
from flatout.errors import UserError, first_line
from flatout.perf.measure.intervals import MOST_ROUNDS, speedup, take_turns
from flatout.perf.measure.own_clock import OwnClock
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

if TYPE_CHECKING:
    from flatout.tasks.task import Task

# All tries together take this fraction of the training's time; with less than `LEAST_S` for them
# nothing is tried.
SHARE = 0.1
LEAST_S = 0.2
MOST_S = 20.0
# In a short run they may take so many seconds, but no larger fraction than this.
_SHORT_S = 3.0
_SHORT_SHARE = 0.3
WAITS = 0.05  # fraction of time spent waiting, from which on other feeds are tried
_FEEDS_S = 6.0  # for feeds, in a short run
ROWS_AROUND = 256  # rows of the batches that are raced, and of those that warm up
_MOST_WARMING = 32  # steps
# Steps that nothing interrupts: the fewest, and their time as a fraction of all tries, and at most.
_CALM_STEPS = 2
_CALM_SHARE = 0.2
_CALM_S = 1.0
_MOSTLY_WAITS = 0.3  # fraction of time spent waiting, from which on only feeds are tried
# Rounds of a race of feeds, and steps and seconds of a round, at least: cores that slept while they
# waited are slow at first.
_FED_ROUNDS = 2
_FED_STEPS = 12
_FED_S = 0.3
_START_S = 0.3  # a guess: how long starting a feed takes
# Seconds of the fewest rounds of two feeds, one of which has workers, and of a few models.
_LEAST_FEEDS_S = _FED_ROUNDS * (2 * _FED_S + _START_S) + _FED_S
_LEAST_MODELS_S = 0.8


def try_safely(evidence: Evidence, tries: Callable[[], None]) -> None:
    """Call `tries`. If it fails, the verdict does without tries, and the evidence says why."""
    try:
        tries()
        return
    except Refused as why:
        evidence.not_tried = f"nothing was tried: {why}"
    except Exception as error:
        # Your own model may raise anything, and a try must not lose the trained weights.
        evidence.not_tried = f"trying other ways failed: {first_line(error)}"
    except KeyboardInterrupt:  # the training itself is done, and only has to be reported
        evidence.not_tried = "trying other ways was stopped"
    evidence.tried = []


def time_for_tries(trained_s: float, most_s: float = MOST_S) -> float:
    """The seconds that all tries may take, after a training of `trained_s`.

    trained      1 s     4 s     20 s    100 s
    tries        0.1     1.2     3.0     10.0
    """
    seconds = min(SHARE * trained_s, most_s)
    if seconds < LEAST_S:
        return seconds
    return max(seconds, min(_SHORT_S, _SHORT_SHARE * trained_s, most_s))


def try_out(
    task: Task,
    feeds: Feeds,
    evidence: Evidence,
    *,
    is_compiled: bool,
    most_s: float = MOST_S,
) -> None:
    """Race other ways to train, and add the results to the evidence, or why nothing was tried.

    `most_s`: that all of it may take.
    """
    trained_s = evidence.total_ms * evidence.batches / 1000
    waits = evidence.share("wait") >= WAITS
    seconds = time_for_tries(trained_s, min(most_s, MOST_S))
    if waits:
        seconds = max(seconds, min(_FEEDS_S, trained_s / 2, most_s))
    starving = starved(evidence)
    is_calm = seconds >= LEAST_S and evidence.pieces == 1 and starving is None
    if is_calm and evidence.compiling_share >= LEAST_COMPILING:
        with torch.compiler.set_stance("force_eager"):
            evidence.eager_ms = alone_ms(task, feeds, min(_CALM_S, _CALM_SHARE * seconds))
    if seconds < LEAST_S:
        evidence.not_tried = "nothing was tried: the run was short"
    elif evidence.pieces > 1:
        evidence.not_tried = "nothing was tried: whole batches do not fit into memory"
    elif is_compiled:
        evidence.not_tried = "nothing was tried: each way would be compiled first"
    elif starving is not None:
        # Times would be those of the other processes' turns.
        evidence.not_tried = f"nothing was tried: {starving.limit} would disturb it"
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
    """Measure the feed `was` without a model, and race it against others.

    Returns whether training mostly waited for its feed: then no other try is worth its time.
    `until`: the end of the tries, a time of `time.perf_counter`.
    """
    alone = measure_feed(was.feed, (until - time.perf_counter()) / 10)
    if alone is not None:
        evidence.feed_alone, evidence.feed_cores = alone
    ways = [was, *others(was, evidence)]
    if len(ways) > 1:
        _race_feeds(task, ways, evidence, until)
    elif not evidence.not_tried:
        evidence.not_tried = "no other feed was tried: none makes more rows here"
    return evidence.share("wait") >= _MOSTLY_WAITS


def end_of_feeds(evidence: Evidence, until: float) -> float:
    """When the tries of feeds end, if all tries end at `until`; both by `time.perf_counter`.

    Where training waits little, other feeds gain little: half of the time is for what computes. In
    4 s that are left, feeds get 2.1 s, which their fewest rounds take; in 2.4 s they get 1.2 s.
    """
    if evidence.share("wait") >= _MOSTLY_WAITS:
        return until
    now = time.perf_counter()
    left_s = until - now
    feeds_s = left_s / 2
    if left_s - _LEAST_FEEDS_S >= _LEAST_MODELS_S:
        feeds_s = max(feeds_s, _LEAST_FEEDS_S)
    return now + feeds_s


def _way_of(task: Task, feed: Feed) -> TrainingWay:
    return TrainingWay(
        feed=feed, precision=by_lightning_name(str(task.trainer.precision)), model=task.model
    )


@contextmanager
def _nothing_stays(task: Task) -> Iterator[None]:
    """Context manager that restores weights, running statistics and random numbers.

    Gradients are removed.
    """
    state = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    threads = torch.get_num_threads()
    was_training = task.model.training
    # A task of bit strings cycles through recombined texts: the next one is restored, too.
    recombined = [(texts, texts.next) for texts in getattr(task, "recombined", [])]
    with torch.random.fork_rng([task.device] if task.device.type == "cuda" else []):
        task.model.train()
        try:
            yield
        finally:
            task.model.load_state_dict(state)
            task.model.train(was_training)
            task.zero_grad()
            torch.set_num_threads(threads)
            for texts, number in recombined:
                texts.next = number


def try_models(task: Task, ways: list[TrainingWay], evidence: Evidence, until: float) -> None:
    """Race the steps of each way against those of the first, and add the results to `evidence`."""
    optimizers = {id(way.model): standing_optimizer(way.model, task) for way in ways}
    calm_s = min(_CALM_S, _CALM_SHARE * (until - time.perf_counter()))
    calm = _time_calm(task, ways[0], optimizers[id(ways[0].model)], calm_s)
    # Beside other processes the run's own times are not those of its steps alone.
    is_disturbed = starved(evidence) is not None
    evidence.alone_ms = None if is_disturbed else calm.computing_ms
    # Each flat batch has another shape, and a new shape costs time. If one of the models is flat,
    # repeating the same few batches would make it look faster than it is.
    has_other_model = any(way.model is not ways[0].model for way in ways)
    all_sides = []
    for way in ways:
        batches = endless(way.feed) if has_other_model else itertools.cycle(some_batches(way.feed))
        all_sides.append(_steps(task, way, batches, optimizers[id(way.model)]))
    try:
        sides = _affordable(all_sides, calm.computing_rate, until)
        if len(sides) < 2:
            if len(ways) > 1 and not (evidence.tried or evidence.not_tried):
                evidence.not_tried = "nothing was tried: a step takes too long for it"
            return
        turns = [partial(_computing_rate, steps, count) for steps, count in sides.items()]
        was, *rates = take_turns(turns, least=ROUNDS, most=MOST_ROUNDS, until=until)
        for steps, rates_of_way in zip(list(sides)[1:], rates, strict=True):
            tried = _tried(steps.way, was, rates_of_way)
            if evidence.alone_ms is not None:
                of_run = tried.rows_per_s / tried.as_was * evidence.model_ms / evidence.alone_ms
                tried = _with_estimates(tried, of_run)
            evidence.tried.append(tried)
    finally:
        for steps in all_sides:
            steps.close()


def _computing_rate(steps: Steps, count: int) -> float:
    return steps.take(count).computing_rate


def _time_calm(
    task: Task, way: TrainingWay, optimizer: torch.optim.Optimizer, seconds: float
) -> Taken:
    """Time steps that nothing interrupts, on batches of all lengths from the run's feed."""
    with closing(_steps(task, way, endless(way.feed), optimizer)) as steps:
        steps.take(1)  # warms up
        return steps.take(_CALM_STEPS, seconds)


def _with_estimates(tried: Tried, *others: float) -> Tried:
    """Widen the bounds of a try to contain other estimates, such as by the run's own speed."""
    bounds = tried.speedup
    tried.low = min(bounds.low, *others)
    tried.high = max(bounds.high, *others)
    return tried


def _open_in_process(feed: Feed) -> Feed:
    """The feed without worker processes: they would only add noise to what is computed."""
    kind = FeedKind.resident if feed.kind is FeedKind.resident else FeedKind.threaded
    return open_feed(feed, kind=kind)


def _steps(
    task: Task, way: TrainingWay, batches: Iterator[FlatBatch], optimizer: torch.optim.Optimizer
) -> Steps:
    clip = float(task.trainer.gradient_clip_val or 0.0)
    steps = Steps(task, way, batches, optimizer, clip=clip)
    # With one thread each way can be timed without the time that other processes took.
    if way.threads == 1 and way.feed.device.type == "cpu":
        steps.clock = OwnClock()
    return steps


def has_own_clock(evidence: Evidence) -> bool:
    """Whether steps can be timed while other processes keep the cores busy."""
    return evidence.device == "cpu" and evidence.threads == 1


def _affordable(sides: list[Steps], rate: float, until: float) -> dict[Steps, int]:
    """Sides that can be raced until `until`, warmed up, and how many steps each takes in a round.

    The first side, which trains `rate` rows a second, is always among them. All sides train the
    same rows in a round: with 32 and 128 rows in a step and rounds of 200 rows, that is 8 and 2
    steps.
    """
    affordable: list[Steps] = []
    round_rows = ROUND_S * rate
    row_s = 0.0  # seconds of a row in all affordable sides together
    for side in sides:
        if affordable and time.perf_counter() > until:
            break
        try:
            warming = min(_MOST_WARMING, ROWS_AROUND // side.rows_a_step)
            for _ in range(max(1, warming)):
                side.take(1)
                if time.perf_counter() > until:  # such as two threads that wait for one core
                    break
            taken = side.take(1)
        except (RuntimeError, UserError):  # it does not fit into memory, most likely
            if not affordable:
                return {}
            continue
        rows = max(round_rows, side.rows_a_step)
        all_s = row_s + taken.wall_s / taken.rows
        if affordable and time.perf_counter() + ROUNDS * rows * all_s > until:
            continue  # a later one may be faster
        round_rows = rows
        row_s = all_s
        affordable.append(side)
    largest = max(side.rows_a_step for side in affordable)
    rows = math.ceil(round_rows / largest) * largest
    return {side: rows // side.rows_a_step for side in affordable}


def some_batches(feed: Feed) -> list[FlatBatch]:
    """The first batches of a feed: whole steps, with `ROWS_AROUND` rows or more."""
    feed.consumed = 0
    rows = 0
    batches: list[FlatBatch] = []
    for batch in feed:
        batches.append(batch)
        rows += batch.num_real
        if rows >= ROWS_AROUND and batch.ends_step:
            break
    return batches


def _tried(way: TrainingWay, before: list[float], after: list[float]) -> Tried:
    """The result of a way, from rows a second of each round before it and with it."""
    return Tried.by(
        speedup(before, after),
        statistics.median(before),
        cause=way.cause,
        override=way.override,
        rows_per_batch=way.feed.num_rows / max(1, len(way.feed)),
        batches_per_step=way.feed.plan.accumulate,
    )


def _race_feeds(task: Task, ways: list[TrainingWay], evidence: Evidence, until: float) -> None:
    """Race the feeds of all ways against the first one, and add the results to `evidence`.

    A feed for which there is no time is `untested`.
    """
    optimizer = standing_optimizer(task.model, task)
    # An epoch of the run starts workers for training, and for each validation.
    usual = 1 + evidence.counts.get("validation", 0) / max(evidence.epochs, 1e-9)
    sides = [_FeedSide(task, way, optimizer, way.feed.starts or usual) for way in ways]
    while len(sides) > 1 and _needed_s(sides, evidence) > until - time.perf_counter():
        evidence.untested = sides.pop().way.override
    if len(sides) == 1:
        return
    was, *rates = take_turns(
        [side.rate for side in sides], least=_FED_ROUNDS, most=MOST_ROUNDS // 2, until=until
    )
    for side, rates_of_way in zip(sides[1:], rates, strict=True):
        most = most_fed(side.way.feed, ways[0].feed, evidence.feed_alone)
        tried = _tried(side.way, was, [min(rate, most) for rate in rates_of_way])
        even = min(statistics.median(side.even), most) / statistics.median(sides[0].even)
        of_run = statistics.median(rates_of_way) / evidence.model_rows_per_s
        evidence.tried.append(_with_estimates(tried, of_run, even))


def _needed_s(sides: list[_FeedSide], evidence: Evidence) -> float:
    """Seconds that the fewest rounds of these sides will take."""
    step_s = evidence.ms_of(*COMPUTED) * evidence.accumulate / 1000
    starts_s = _START_S * sum(side.way.feed.kind is FeedKind.workers for side in sides)
    return _FED_ROUNDS * (starts_s + sum(max(_FED_S, side.steps * step_s) for side in sides))


@dataclass(slots=True)
class _FeedSide:
    """One side of a race of feeds: steps of a way from the start of its feed."""

    task: Task
    way: TrainingWay
    optimizer: torch.optim.Optimizer
    starts: float  # how often an epoch starts the feed's workers
    # Rows a second of each round without the start of the feed.
    even: list[float] = field(default_factory=list)

    @property
    def ahead(self) -> int:
        """Steps whose batches were gathered while the feed started."""
        feed = self.way.feed
        batches = 1
        if feed.kind is FeedKind.workers:
            batches = feed.prefetch * feed.workers
        elif feed.kind is FeedKind.threaded:
            batches = BATCHES_A_RUN
        return -(-batches // feed.plan.accumulate)

    @property
    def steps(self) -> int:
        """Steps of one round."""
        return 1 + self.ahead + max(_FED_STEPS, 2 * self.ahead)

    def rate(self) -> float:
        """Rows a second of a whole epoch, from a round of its steps.

        The start of the feed is measured by the first step. Steps with batches that were gathered
        ahead are not timed, and the others give the speed of all further steps.
        """
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
    """Milliseconds that this rank computes for a batch if it waits for no other rank."""
    way = _way_of(task, _open_in_process(feeds.train))
    with _nothing_stays(task):
        return _time_calm(task, way, standing_optimizer(task.model, task), seconds).computing_ms
