"""Try other ways of training a foreign module with a foreign loader, after its run has ended.

Where training waited for batches, other arguments of its DataLoader are raced. Elsewhere the step
is raced with larger batches, another precision, the fast loop (`loop_race.py`) and a compiled step
(`compiled_step.py`). Open this file to add a way to race, or to change when one is worth its time.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch

from flatout.engine.precision import (
    LIGHTNING_NAMES,
    by_lightning_name,
)
from flatout.perf.measure.steps import TrainingWay
from flatout.perf.verdict import experiments
from flatout.perf.verdict.compiled_step import compiled
from flatout.perf.verdict.copies import OwnTask, copy_of_loader, mover_of
from flatout.perf.verdict.evidence import ROUNDS, Evidence
from flatout.perf.verdict.loop_race import try_fast_loop
from flatout.perf.verdict.own_feed import OwnFeed
from flatout.perf.verdict.own_ways import larger_batches, other_loaders, other_precision
from flatout.perf.verdict.rules import starved
from flatout.perf.verdict.shared_copies import nothing_stays
from flatout.perf.verdict.ways import Refused, other_arithmetic

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
    most, and no more than `time_for_tries` allows a run that has trained `trained_s`.
    """
    device = trainer.strategy.root_device
    seconds = experiments.time_for_tries(trained_s, seconds)
    if trainer.world_size > 1:
        evidence.not_tried = "on several ranks nothing else is tried"
    elif seconds < experiments.LEAST_S:
        evidence.not_tried = "nothing was tried: the run was short"
    elif 4 * ROUNDS * evidence.total_ms * evidence.accumulate / 1000 > seconds:
        evidence.not_tried = "nothing was tried: a step takes too long for it"
    elif (finding := starved(evidence)) is not None and not experiments.has_own_clock(evidence):
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
        device=device,
        move=mover_of(task),
        rows=evidence.rows_per_batch,
        accumulate=evidence.accumulate,
        epochs=evidence.epochs,
        batches=evidence.batches / max(evidence.epochs, 1e-9),
    )
    was = TrainingWay(feed=feed, precision=precision, model=task.model)
    evidence.native = other_precision(precision, device)
    waits = evidence.share("wait") >= experiments.WAITS and starved(evidence) is None
    feeds_until = experiments.end_of_feeds(evidence, until)
    if waits and experiments.try_feeds(task, was, other_loaders, evidence, feeds_until):
        return
    # From here on what computes is raced. Batches are read in this process, so that none of the
    # ways waits for the start of workers.
    here = replace(was, feed=feed.opened(num_workers=0))
    some_batches = partial(experiments.some_batches, here.feed)
    is_disturbed = starved(evidence) is not None
    if not is_disturbed:
        try_fast_loop(task, some_batches, evidence, until)
    uncompiled = [here, *larger_batches(here, evidence, until), *other_arithmetic(here, evidence)]
    if is_disturbed:
        # Only ways of one thread can be timed then.
        uncompiled = [way for way in uncompiled if way.threads == here.threads]
    if is_disturbed or not _may_compile(module, evidence):
        experiments.try_models(task, uncompiled, evidence, until)
        return
    # Half of the time that is left is for compiling and racing the compiled step.
    half_until = (time.perf_counter() + until) / 2
    experiments.try_models(task, uncompiled, evidence, half_until)
    compiled_ways = list(compiled(task, here, evidence, until, experiments.ROWS_AROUND))
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
