"""Measurements for tuning: real training steps of the run's own task, feed and optimizer.

The first step of a probe has the longest rows of the split: what fits then will fit later, too.
Typical rows come next, and their steps are timed. Weights do not change, except in a range test.
`Child` measures in a separate process, which is thrown away; `Here` in this one. Both answer the
questions in `ANSWERS`.
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
from numpy.typing import NDArray
from torch import nn

from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.gather import TOKENS, Gatherer, cut_run
from flatout.data.batches.plan import BatchRows, PlanSettings
from flatout.data.feeding import FeedKind
from flatout.data.store.store import StoreSplit
from flatout.distributed.limits import keep_freed_memory
from flatout.engine.compile import compile_in_place
from flatout.engine.optimizer import Schedule
from flatout.engine.pieces import is_out_of_memory
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

_LEAST_STEPS = 3  # timed even if there is no time left; if a step takes over a second, only 1
# A few steps of some milliseconds are too noisy: steps are timed for at least so long.
_LEAST_TIMED_S = 0.3
_RISEN = 4.0  # smoothed loss over its least, from which on a range test is over
_BYTES_A_WEIGHT = 12  # a gradient and the two means of AdamW, in fp32


@dataclass(slots=True)
class Parts:
    """The parts of the run that are measured."""

    task: Task
    split: StoreSplit
    plan: PlanSettings
    device: torch.device
    workers: int
    clip: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedSetting:
    """Values of all settings that a search may change."""

    feed: FeedKind
    precision: Precision
    rows: int  # at once
    accumulate: int
    compile: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingMeasurement:
    """Speed and memory of training steps with one setting."""

    step_s: float
    rows_per_s: float
    tokens_per_s: float
    wait_share: float  # fraction of the time that was spent waiting for the feed
    peak_bytes: int  # most memory held: by the process on a CPU, on the device elsewhere
    steps: int
    warm_s: float  # from the beginning to the first step that was timed


def about(parts: Parts) -> dict[str, Any]:
    """Facts of the model, before anything is computed."""
    weights = list(parts.task.model.parameters())
    lengths = parts.split.lengths(TOKENS)
    longest = int(lengths.max()) if len(lengths) else 1
    fits = partial(micro_batch_key, parts.task.model, longest=longest, device=parts.device)
    return {
        "weights": sum(weight.numel() for weight in weights),
        "fixed_bytes": _BYTES_A_WEIGHT * sum(w.numel() for w in weights if w.requires_grad),
        "base_bytes": held_bytes(parts.device),
        "longest": longest,
        "is_recurrent": any(
            isinstance(module, nn.RNNBase) for module in parts.task.model.modules()
        ),
        "row_keys": {name: fits(precision=name) for name in Precision},
    }


def feeds_alone(parts: Parts, kinds: list[str]) -> dict[str, float]:
    """Rows a second of each kind of feed without a model; 0 if it has too few batches."""
    rates = {}
    for kind in kinds:
        measured = measure_feed(feed_of(parts, FeedKind(kind), parts.plan), seconds=0.2)
        rates[kind] = 0.0 if measured is None else measured[0]
    return rates


def losses(parts: Parts, precisions: list[str], rows: int) -> dict[str, float]:
    """The mean loss in each precision, of the same weights on the longest rows and typical ones."""
    rows = min(rows, parts.split.num_rows)
    typical = np.sort(np.random.default_rng(0).choice(parts.split.num_rows, rows, replace=False))
    batches = [longest_batch(parts, rows), _batch_of(parts, typical)]
    task = parts.task.to(parts.device).eval()
    losses = {}
    try:
        for precision in map(Precision, precisions):
            with (
                torch.no_grad(),
                fast_fp32_products(precision, parts.device),
                arithmetic(precision, parts.device),
            ):
                losses_of_batches = [float(task.training_loss(batch)) for batch in batches]
            losses[str(precision)] = float(np.mean(losses_of_batches))
    finally:
        task.train()
    return losses


def measure(parts: Parts, setting: ProbedSetting, steps: int, until: float) -> SettingMeasurement:
    """Time `steps` optimizer steps, and read their memory.

    After `until`, a time of `time.time`, no further step is begun.
    """
    began = time.perf_counter()
    way = _way_of(parts, setting)
    task = parts.task
    if setting.compile:
        compile_in_place(task.model, parts.device)
    # Layers that thaw later will take their memory then: measure as if they had.
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
    # The median, as other processes may disturb some steps.
    step_s = max(statistics.median(step.seconds for step in taken), 1e-9)
    total_s = sum(step.seconds for step in taken)
    return SettingMeasurement(
        step_s=step_s,
        rows_per_s=statistics.fmean(step.rows for step in taken) / step_s,
        tokens_per_s=statistics.fmean(step.tokens for step in taken) / step_s,
        wait_share=sum(step.wait_s for step in taken) / max(total_s, 1e-9),
        peak_bytes=peak_bytes(parts.device) or held_bytes(parts.device),
        steps=len(taken),
        warm_s=warm_s,
    )


def _way_of(parts: Parts, setting: ProbedSetting) -> TrainingWay:
    """The way to train with a setting. Moves the task to the device, in training mode."""
    plan = replace(parts.plan, rows_per_batch=setting.rows, accumulate=setting.accumulate)
    feed = feed_of(parts, setting.feed, plan)
    model = parts.task.to(parts.device).train().model
    return TrainingWay(feed=feed, precision=setting.precision, model=model)


def range_test(parts: Parts, setting: ProbedSetting, until: float) -> dict[str, Any]:
    """Take steps with a rising learning rate; return the rates and losses. It changes the weights.

    It ends after `RANGE_STEPS`, when the loss has risen, or at `until`, a time of `time.time`.
    """
    way = _way_of(parts, setting)
    task = parts.task
    # The test sets the rate of each step itself.
    optim = replace(task.optim, schedule=Schedule.constant, warmup=0.0).at_rate(LEAST_RATE)
    rates: list[float] = []
    losses: list[float] = []
    with fast_fp32_products(way.precision, parts.device):
        optimizer = optim.build(task.model)
        with closing(Steps(task, way, endless(way.feed), optimizer, clip=parts.clip)) as steps:
            while len(rates) < RANGE_STEPS and not _is_over(losses) and time.time() <= until:
                progress = len(rates) / (RANGE_STEPS - 1)
                rates.append(LEAST_RATE * (MOST_RATE / LEAST_RATE) ** progress)
                for group in optimizer.param_groups:
                    group["lr"] = rates[-1] * group["lr_share"]
                steps.take(1)
                losses.append(float(torch.stack(steps.losses).sum()))
    return {"rates": rates, "losses": losses}


def _is_over(losses: Sequence[float]) -> bool:
    """Whether the loss has risen, or is infinite or NaN."""
    if not losses:
        return False
    if not math.isfinite(losses[-1]):
        return True
    means = smoothed(losses)
    return len(means) > LEAST_STEPS and means[-1] > _RISEN * abs(min(means))


def _typical_steps(steps: Steps, count: int, until: float) -> Iterator[Taken]:
    """Take `count` steps, or fewer if it is later than `until`."""
    began = time.perf_counter()
    for number in itertools.count(1):
        taken = steps.take(1)
        yield taken
        least = 1 if taken.seconds > 1.0 else _LEAST_STEPS
        if time.time() > until and number >= least:
            return
        if number >= count and time.perf_counter() - began >= _LEAST_TIMED_S:
            return


def longest_batch(parts: Parts, rows: int) -> FlatBatch:
    """The longest rows of the split as one batch that ends a step."""
    lengths = np.asarray(parts.split.lengths(TOKENS))
    first = len(lengths) - min(rows, len(lengths))
    return _batch_of(parts, np.argpartition(lengths, first)[first:])


def _batch_of(parts: Parts, rows: NDArray[np.int64]) -> FlatBatch:
    """These rows of the split as one batch, shortest first."""
    lengths = np.asarray(parts.split.lengths(TOKENS))[rows]
    ordered = np.asarray(rows, dtype=np.int64)[np.argsort(lengths, kind="stable")]
    count = np.array([len(ordered)])
    batch_rows = BatchRows(
        rows=ordered,
        bounds=np.append(0, count),
        num_real=count,
        step_rows=count,
        ends_step=np.array([True]),
    )
    # Gathered on the CPU, as a store may be larger than the device's memory.
    batch = next(cut_run(Gatherer(parts.split, torch.device("cpu")).run(batch_rows)))
    return batch if parts.device.type == "cpu" else batch.to(parts.device)


def feed_of(parts: Parts, kind: FeedKind, plan: PlanSettings) -> Feed:
    return Feed(parts.split, plan, kind=kind, device=parts.device, workers=parts.workers)


# The questions that a search asks, and the functions that answer them.
ANSWERS: dict[str, Callable[..., Any]] = {
    "about": about,
    "feeds": feeds_alone,
    "losses": losses,
    "measure": measure,
    "range": range_test,
}


class Child:
    """Measures in a separate process, which builds the parts itself.

    After a failure the next question starts a new process. Memory and random numbers of this
    process stay as they are.
    """

    def __init__(self, build: Callable[[], Parts], threads: int) -> None:
        """`build`: makes the parts; pickled by its name."""
        self.build = build
        self.threads = threads
        self._apart: Apart | None = None

    def ask(self, question: str, latest: float, **asked: Any) -> Any:
        """The answer to a question of `ANSWERS`, or `NoAnswer`.

        Soon after `latest`, a time of `time.time`, the process is killed.
        """
        if self._apart is None:
            self._apart = Apart(partial(_build, self.build, self.threads))
        try:
            return self._apart.ask(partial(ANSWERS[question], **asked), latest)
        except Failed as failed:
            self.close()  # memory that it has not freed would count for the next question
            if failed.is_unread:
                raise UserError(
                    "tune",
                    "the process that measures could not import this script",
                    hint="Put the training below: if __name__ == '__main__':",
                ) from None
            return NoAnswer(failed.why, failed.is_memory)

    def close(self) -> None:
        if self._apart is not None:
            self._apart.close()
        self._apart = None


class Here:
    """Measures in this process.

    The caller passes a copy of the task, and restores random numbers afterwards.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def ask(self, question: str, latest: float, **asked: Any) -> Any:
        """The answer to a question of `ANSWERS`, or `NoAnswer`; `latest` is ignored."""
        try:
            return ANSWERS[question](self.parts, **asked)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return NoAnswer("out of memory", is_memory=True)
        except UserError as error:  # even a single row did not fit
            return NoAnswer(str(error), is_memory=True)

    def close(self) -> None:
        return


def _build(build: Callable[[], Parts], threads: int) -> Parts:
    """Make the parts in the process of a `Child`, with the allocator of a run."""
    torch.set_num_threads(threads)
    parts = build()
    if parts.device.type == "cpu":
        keep_freed_memory()
    return parts
