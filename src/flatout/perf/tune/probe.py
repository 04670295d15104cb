"""What is measured in a throw-away process: real training steps, on the longest rows first and on
typical ones then.

A probe takes steps of the run's own task, feed and optimizer. The first step has the longest rows
there are, so that what is found to fit also fits later; the time is that of typical ones. Weights
stay as they were, but for a range test.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
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
from flatout.distributed.limits import keep_freed_memory
from flatout.engine.compile import compile_in_place
from flatout.engine.optimizer import ScaleRate, Schedule
from flatout.engine.passes import is_out_of_memory
from flatout.engine.precision import Precision, arithmetic, fast_fp32_products
from flatout.errors import UserError
from flatout.models.contract import contract
from flatout.perf.measure.apart import Apart, Failed
from flatout.perf.measure.steps import (
    Steps,
    Taken,
    TrainingWay,
    endless,
    forget_peak,
    held_bytes,
    measure_feed,
    peak_bytes,
    standing_optimizer,
)
from flatout.perf.notes import micro_batch_key
from flatout.perf.tune.answers import NoAnswer
from flatout.perf.tune.reading import LEAST_RATE, LEAST_STEPS, MOST_RATE, RANGE_STEPS, smoothed
from flatout.tasks.task import Task

_LEAST_STEPS = 3  # of steps that take less than a second so many are timed, however late it is
# a few steps of some milliseconds tell nothing: more are timed, where there is time
_LEAST_TIMED_S = 0.3
_RISEN = 4.0  # so many times its least the smoothed loss may be before a range test is over
_BYTES_A_WEIGHT = 12  # a gradient and the two means of AdamW, in fp32


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
class ProbedSetting:
    feed: FeedKind
    precision: Precision
    rows: int
    accumulate: int
    compile: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingMeasurement:
    step_s: float
    rows_per_s: float
    tokens_per_s: float
    wait_share: float  # share of a step's time that was waited for the feed
    peak_bytes: int  # most memory that was held: the process's on a CPU, the device's elsewhere
    steps: int
    warm_s: float  # from the beginning to the first step whose time was taken


def about(parts: Parts) -> dict[str, Any]:
    """What is known of the model before anything is computed."""
    weights = list(parts.task.model.parameters())
    lengths = parts.split.lengths(TOKENS)
    longest = int(lengths.max()) if len(lengths) else 1
    fits = partial(micro_batch_key, parts.task.model, longest=longest, device=parts.device)
    return {
        "weights": sum(weight.numel() for weight in weights),
        "fixed_bytes": _BYTES_A_WEIGHT
        * sum(weight.numel() for weight in weights if weight.requires_grad),
        "base_bytes": held_bytes(parts.device),
        "longest": longest,
        "is_recurrent": any(
            isinstance(module, nn.RNNBase) for module in parts.task.model.modules()
        ),
        "row_keys": {name: fits(precision=name) for name in Precision},
    }


def feeds_alone(parts: Parts, kinds: list[str]) -> dict[str, float]:
    measured = {
        kind: measure_feed(feed_of(parts, FeedKind(kind), parts.plan), seconds=0.2)
        for kind in kinds
    }
    return {kind: found[0] if found else 0.0 for kind, found in measured.items()}


def losses(parts: Parts, precisions: list[str], rows: int) -> dict[str, float]:
    """The loss in each arithmetic, of the same weights on the same rows: longest ones and typical
    ones.
    """
    rows = min(rows, parts.split.num_rows)
    typical = np.sort(np.random.default_rng(0).choice(parts.split.num_rows, rows, replace=False))
    batches = [longest_batch(parts, rows), _batch_of(parts, typical)]
    task = parts.task.to(parts.device).eval()
    found = {}
    try:
        for name in map(Precision, precisions):
            with (
                torch.no_grad(),
                fast_fp32_products(name, parts.device),
                arithmetic(name, parts.device),
            ):
                found[str(name)] = float(
                    np.mean([float(task.training_loss(batch)) for batch in batches])
                )
    finally:
        task.train()
    return found


def measure(parts: Parts, setting: ProbedSetting, steps: int, until: float) -> SettingMeasurement:
    """Forward, backward and optimizer steps; `until` (of the system's clock) no further one is
    begun.
    """
    began = time.perf_counter()
    way = _way_of(parts, setting)
    task = parts.task
    if setting.compile:
        compile_in_place(task.model, parts.device)
    # layers that thaw later cost their memory then: they count as thawed
    contract(task.model).thaw(float("inf"))
    forget_peak(parts.device)
    rows, cap = setting.rows, parts.plan.tokens_per_batch
    if cap is not None:
        rows = max(1, cap // max(1, int(parts.split.lengths(TOKENS).max())))
    batches = itertools.chain([longest_batch(parts, rows)], endless(way.feed))
    with fast_fp32_products(setting.precision, parts.device):
        optimizer = standing_optimizer(task.model, task)
        with closing(Steps(task, way, batches, optimizer, clip=parts.clip)) as timed:
            timed.take(2)  # warms up
            warm_s = time.perf_counter() - began
            taken = list(_typical_steps(timed, steps, until))
    # others may use the machine too
    step_s = max(statistics.median(each.seconds for each in taken), 1e-9)
    return SettingMeasurement(
        step_s=step_s,
        rows_per_s=statistics.fmean(each.rows for each in taken) / step_s,
        tokens_per_s=statistics.fmean(each.tokens for each in taken) / step_s,
        wait_share=sum(each.wait_s for each in taken)
        / max(sum(each.seconds for each in taken), 1e-9),
        peak_bytes=peak_bytes(parts.device) or held_bytes(parts.device),
        steps=len(taken),
        warm_s=warm_s,
    )


def _way_of(parts: Parts, setting: ProbedSetting) -> TrainingWay:
    """The way that a setting asks for; the task is then on the device, and trains."""
    plan = replace(parts.plan, rows_per_batch=setting.rows, accumulate=setting.accumulate)
    feed = feed_of(parts, setting.feed, plan)
    model = parts.task.to(parts.device).train().model
    return TrainingWay(feed=feed, precision=setting.precision, model=model)


def range_test(parts: Parts, setting: ProbedSetting, until: float) -> dict[str, Any]:
    """Rates and losses of steps whose rate rises from step to step, in the process that
    measures.
    """
    way = _way_of(parts, setting)
    task = parts.task
    # The rate is the test's own.
    optim = replace(
        task.optim, lr=LEAST_RATE, schedule=Schedule.constant, warmup=0.0, scale_lr=ScaleRate.none
    )
    rates: list[float] = []
    losses: list[float] = []
    with fast_fp32_products(way.precision, parts.device):
        optimizer = optim.build(task.model)
        with closing(Steps(task, way, endless(way.feed), optimizer, clip=parts.clip)) as steps:
            while len(rates) < RANGE_STEPS and not _is_over(losses) and time.time() <= until:
                rates.append(
                    LEAST_RATE * (MOST_RATE / LEAST_RATE) ** (len(rates) / (RANGE_STEPS - 1))
                )
                for group in optimizer.param_groups:
                    group["lr"] = rates[-1] * group["lr_share"]
                steps.take(1)
                losses.append(float(torch.stack(steps.losses).sum()))
    return {"rates": rates, "losses": losses}


def _is_over(losses: Sequence[float]) -> bool:
    """Whether the loss has risen; one that is no number is the test's natural end."""
    if not losses or not math.isfinite(losses[-1]):
        return bool(losses)
    seen = smoothed(losses)
    return len(seen) > LEAST_STEPS and seen[-1] > _RISEN * abs(min(seen))


def _typical_steps(steps: Steps, count: int, until: float) -> Iterator[Taken]:
    began = time.perf_counter()
    for number in itertools.count(1):
        taken = steps.take(1)
        yield taken
        is_enough = number >= count and time.perf_counter() - began >= _LEAST_TIMED_S
        if is_enough or (
            time.time() > until and number >= (1 if taken.seconds > 1.0 else _LEAST_STEPS)
        ):
            return


def longest_batch(parts: Parts, rows: int) -> FlatBatch:
    """The longest rows of the split as one batch that ends a step."""
    lengths = np.asarray(parts.split.lengths(TOKENS))
    first = len(lengths) - min(rows, len(lengths))
    return _batch_of(parts, np.argpartition(lengths, first)[first:])


def _batch_of(parts: Parts, rows: Any) -> FlatBatch:
    lengths = np.asarray(parts.split.lengths(TOKENS))[rows]
    ordered = np.asarray(rows, dtype=np.int64)[np.argsort(lengths, kind="stable")]
    count, ends = np.array([len(ordered)]), np.array([True])
    whole = BatchRows(
        rows=ordered, bounds=np.append(0, count), num_real=count, step_rows=count, ends_step=ends
    )
    # On the host, whatever the device: a store may be larger than that.
    batch = next(cut_run(Gatherer(parts.split, torch.device("cpu")).run(whole)))
    return batch if parts.device.type == "cpu" else batch.to(parts.device)


def feed_of(parts: Parts, kind: FeedKind, plan: PlanSettings) -> Feed:
    return Feed(parts.split, plan, kind=kind, device=parts.device, workers=parts.workers)


ANSWERS: dict[str, Callable[..., Any]] = {
    "about": about,
    "feeds": feeds_alone,
    "losses": losses,
    "measure": measure,
}
ANSWERS |= {"range": range_test}


class Child:
    """Builds the parts in a process apart, and again after that was lost: who asks keeps memory and
    random numbers.
    """

    def __init__(self, build: Callable[[], Parts], threads: int) -> None:
        """`build`: makes what would be trained; pickled by its name."""
        self.build, self.threads = build, threads
        self._apart: Apart | None = None

    def ask(self, what: str, latest: float, **asked: Any) -> Any:
        """The answer to a question, or a NoAnswer; soon after `latest` the process is killed."""
        if self._apart is None:
            self._apart = Apart(partial(_build, self.build, self.threads))
        try:
            return self._apart.ask(partial(ANSWERS[what], **asked), latest)
        except Failed as failed:
            self.close()  # what it has left in memory would count for the next question
            if failed.is_unread:
                what = "the process that measures could not read this script"
                raise UserError(
                    "tune", what, hint="Put what trains below: if __name__ == '__main__':"
                ) from None
            return NoAnswer(failed.why, failed.is_memory)

    def close(self) -> None:
        if self._apart is not None:
            self._apart.close()
        self._apart = None


class Here:
    """Measures parts of this process: the caller gives a copy of the task, and puts random numbers
    back.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def ask(self, what: str, latest: float, **asked: Any) -> Any:
        """The answer to a question, or a NoAnswer, whatever `latest` says."""
        try:
            return ANSWERS[what](self.parts, **asked)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return NoAnswer("out of memory", is_memory=True)
        except UserError as error:  # a single row at once was too much
            return NoAnswer(str(error), is_memory=True)

    def close(self) -> None:
        return


def _build(build: Callable[[], Parts], threads: int) -> Parts:
    torch.set_num_threads(threads)
    parts = build()
    if parts.device.type == "cpu":
        keep_freed_memory()
    return parts
