"""The learning-rate range test, in the process that measures: steps whose rate rises until the loss does too."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments import LightningEnvironment

from flatout.data.feeding import FeedKind
from flatout.engine.fast_loop import FastLoop, fast_loop_of
from flatout.engine.optimizer import NotFinite, ScaleRate, Schedule
from flatout.engine.precision import LIGHTNING_NAMES, Precision, fast_fp32_products
from flatout.errors import UserError
from flatout.perf.tune.probe import Parts, feed_of

_RISEN = 4.0
"""So many times its least the smoothed loss may be before the test is over."""


def range_test(parts: Parts, *, feed: str, precision: str, rows: int, accumulate: int, until: float) -> dict[str, Any]:
    """Rates and losses of steps whose rate rises from step to step."""
    plan = replace(parts.plan, rows_per_batch=rows, accumulate=accumulate)
    task, before = parts.task, parts.task.optim
    rising = _Rising(until)
    # The rate is the test's own; a loss that is no number is its natural end.
    task.optim = replace(
        before,
        lr=LEAST,
        schedule=Schedule.constant,
        warmup=0.0,
        scale_lr=ScaleRate.none,
        not_finite=NotFinite.skip,
    )
    trainer = _plain_trainer(parts, Precision(precision), accumulate, rising)
    try:
        with fast_fp32_products(Precision(precision), parts.device), _without_advice():
            trainer.fit(task, train_dataloaders=feed_of(parts, FeedKind(feed), plan))
    except UserError:
        pass  # many steps that were not finite, one after the other
    finally:
        task.optim = before
    return {"rates": rising.rates, "losses": rising.losses}


class _Rising(L.Callback):
    """Sets the rate of each step, and ends when the loss has risen."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.loop: Any = None
        self._rate = LEAST

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.loop = fast_loop_of(trainer)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._rate = LEAST * (MOST / LEAST) ** (len(self.rates) / (STEPS - 1))
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = self._rate * group["lr_share"]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not batch.ends_step:
            return
        loss = float(self.loop.losses.last)
        self.rates.append(self._rate)
        self.losses.append(loss)
        seen = smoothed(self.losses)
        has_risen = len(seen) > LEAST_STEPS and (not math.isfinite(seen[-1]) or seen[-1] > _RISEN * abs(min(seen)))
        if has_risen or not math.isfinite(loss) or len(self.rates) == STEPS or time.time() > self.until:
            trainer.should_stop = True


def _plain_trainer(parts: Parts, precision: Precision, accumulate: int, rising: _Rising) -> L.Trainer:
    """Lightning's Trainer as a run has it, with nothing around the steps."""
    settings: dict[str, Any] = {"precision": LIGHTNING_NAMES[precision]}  # as a string: their type lists each name
    device = parts.device
    return L.Trainer(
        **settings,
        accelerator=device.type,
        devices=1 if device.index is None else [device.index],
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        use_distributed_sampler=False,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=parts.clip or None,
        callbacks=[FastLoop(not_finite=NotFinite.skip), rising],
        plugins=[LightningEnvironment()],  # this process is no rank, even where ranks run
    )


@contextmanager
def _without_advice() -> Iterator[None]:
    """Lightning's advice does not fit a loop as odd as this one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


STEPS = 80
LEAST, MOST = 1e-6, 1.0
_MEMORY = 0.9
LEAST_STEPS = 12


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A learning rate, and the smoothed losses it was read off."""

    rate: float
    why: str
    evidence: str


def smoothed(losses: Sequence[float]) -> list[float]:
    """A running mean that forgets, corrected for its beginning."""
    mean, found = 0.0, []
    for number, loss in enumerate(losses, 1):
        mean = _MEMORY * mean + (1 - _MEMORY) * loss
        found.append(mean / (1 - _MEMORY**number))
    return found


def suggested(rates: Sequence[float], losses: Sequence[float]) -> Suggestion | None:
    """The rate at which the smoothed loss falls fastest; None where it does not fall."""
    kept = [(rate, loss) for rate, loss in zip(rates, losses, strict=True) if math.isfinite(loss)]
    if len(kept) < LEAST_STEPS:
        return None
    rates, seen = [rate for rate, _ in kept], smoothed([loss for _, loss in kept])
    lowest = min(range(len(seen)), key=lambda place: seen[place])
    reach = 3
    falls = {place: seen[place + reach] - seen[place - reach] for place in range(reach, min(lowest, len(seen) - reach))}
    if not falls or seen[lowest] > 0.98 * seen[0]:
        return None
    steepest = min(falls, key=lambda place: falls[place])
    rate = float(f"{rates[steepest]:.1e}")
    first, least = f"{seen[0]:.3f} at {rates[0]:.0e}", f"{seen[lowest]:.3f} at {rates[lowest]:.1e}"
    evidence = f"smoothed loss {first}, {seen[steepest]:.3f} here, lowest {least}; {len(rates)} steps"
    return Suggestion(rate, "the loss falls fastest there", evidence)
