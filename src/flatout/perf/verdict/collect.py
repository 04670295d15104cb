"""Collect the evidence of a run from its callbacks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import psutil
import torch

from flatout.callbacks.clock import compiled_so_far
from flatout.callbacks.run_curves import RunCurves
from flatout.data.batches.feed import Feed
from flatout.data.batches.plan import FeedKind, PlanSettings
from flatout.distributed.ranks import cores_here
from flatout.perf.verdict.evidence import LEAST_STEPS, OWN_LOADER, Evidence


def evidence_of_own(curves: RunCurves, device: torch.device, precision: str, epochs: float) -> Evidence | None:
    """What was measured with the user's own DataModule, whose batch size and tokens are not known."""
    accumulate = max(1, round(curves.throughput.total.batches / max(1, curves.steps)))
    plan = PlanSettings(rows_per_batch=1, accumulate=accumulate)
    found = evidence_of(curves, _Loader(plan, device, FeedKind.threaded), precision, epochs)
    if found is None:
        return None
    return replace(
        found,
        feed=OWN_LOADER,
        batch_size=None,
        padding_share=0.0,
        not_tried="with your own parts nothing else is tried",
    )


@dataclass(frozen=True, slots=True)
class _Loader:
    plan: PlanSettings
    device: torch.device
    kind: FeedKind


def evidence_of(curves: RunCurves, feed: Feed | _Loader, precision: str, epochs: float) -> Evidence | None:
    """What was measured so far; None where it is too little for a verdict."""
    throughput, plan = curves.throughput, feed.plan
    counted = throughput.counted()
    steps = counted.batches // plan.accumulate
    if steps < LEAST_STEPS or not counted.rows:
        return None
    batches, clock = counted.batches, curves.clock
    seen, split = curves.monitor.summary(), curves.timer.counted().split()
    # Of what callbacks took, a device's own work behind them costs nothing.
    scale = split["callbacks"] / max(sum(clock.callbacks.values()), 1e-9)
    return Evidence(
        device=feed.device.type,
        steps=steps,
        batches=batches,
        rows_per_batch=counted.rows / batches,
        accumulate=plan.accumulate,
        world=plan.world,
        batch_size=None if plan.tokens_per_batch else plan.rows_per_batch,
        ms={part: 1000 * seconds / batches for part, seconds in split.items() if seconds},
        padding_share=1 - counted.tokens / max(1, counted.computed),
        mfu=throughput.mfu(counted),
        feed=feed.kind.value,
        precision=precision,
        threads=torch.get_num_threads(),
        cores=len(cores_here()),
        machine_cores=psutil.cpu_count() or 1,
        flush_every=curves.every_n_steps,
        counts=dict(clock.counts),
        epochs=epochs,
        callbacks={name: 1000 * scale * seconds / batches for name, seconds in clock.callbacks.items() if seconds},
        reads=clock.reads_a_step,
        compiled={name: now - clock.compiled.get(name, 0.0) for name, now in compiled_so_far().items()},
        host={name: value for name, value in seen.get("host", {}).items() if value is not None},
        gpu={name: value for name, value in seen.get("gpu", {}).items() if value is not None},
    )
