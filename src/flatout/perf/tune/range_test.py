"""The learning-rate range test: steps whose rate rises a little each time, until the loss does too.

After Smith (2017, "Cyclical learning rates for training neural networks"). What is suggested is a rate at which the
smoothed loss falls fastest, not one at which it is lowest: there it is about to rise. A short test sees the first steps
only; for an encoder that is fine-tuned over hours, what its authors recommend is worth more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flatout.data.feeding import FeedKind
from flatout.engine.optimizer import ScaleRate, Schedule
from flatout.engine.precision import Precision, fast_fp32_products
from flatout.perf.measure.steps import Steps, Way, endless
from flatout.perf.tune.probe import Parts, feed_of

STEPS = 80
LEAST_STEPS = 12
LEAST, MOST = 1e-6, 1.0
_MEMORY = 0.9
_RISEN = 4.0
"""So many times its least the smoothed loss may be before the test is over."""


def range_test(parts: Parts, *, feed: str, precision: str, rows: int, accumulate: int, until: float) -> dict[str, Any]:
    """Rates and losses of steps whose rate rises from step to step, in the process that measures."""
    plan = replace(parts.plan, rows_per_batch=rows, accumulate=accumulate)
    task, kind = parts.task.to(parts.device).train(), Precision(precision)
    fed = feed_of(parts, FeedKind(feed), plan)
    way = Way(feed=fed, precision=kind, threads=torch.get_num_threads(), model=task.model)
    # The rate is the test's own.
    optim = replace(task.optim, lr=LEAST, schedule=Schedule.constant, warmup=0.0, scale_lr=ScaleRate.none)
    rates: list[float] = []
    losses: list[float] = []
    with fast_fp32_products(kind, parts.device):
        optimizer = optim.build(task.model)
        steps = Steps(task, way, endless(fed), optimizer, clip=parts.clip)
        try:
            while len(rates) < STEPS and not _is_over(losses) and time.time() <= until:
                rates.append(LEAST * (MOST / LEAST) ** (len(rates) / (STEPS - 1)))
                for group in optimizer.param_groups:
                    group["lr"] = rates[-1] * group["lr_share"]
                steps.take(1)
                losses.append(steps.last_loss)
        finally:
            steps.close()
    return {"rates": rates, "losses": losses}


def _is_over(losses: Sequence[float]) -> bool:
    """Whether the loss has risen; one that is no number is the test's natural end."""
    if not losses or not math.isfinite(losses[-1]):
        return bool(losses)
    seen = smoothed(losses)
    return len(seen) > LEAST_STEPS and seen[-1] > _RISEN * abs(min(seen))


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
