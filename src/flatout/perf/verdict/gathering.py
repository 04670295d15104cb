"""Gather the evidence of a run: while it trains, at its end, or later from its folder.

Evidence of a training comes from its callbacks (`evidence_of`). `doctor` reads the summary of a run
folder, or its curves if the run has not ended (`evidence_in`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import psutil
import torch

from flatout.callbacks.clock import PARTS, compiled_so_far
from flatout.callbacks.run_curves import RunCurves
from flatout.data.batches.feed import Feed
from flatout.data.batches.plan import FeedKind, PlanSettings
from flatout.distributed.ranks import cores_here
from flatout.errors import UserError, require
from flatout.perf.verdict.evidence import LEAST_STEPS, OWN_LOADER, Evidence, without_none
from flatout.perf.verdict.rules import plain_finding
from flatout.report.page import read_curves
from flatout.report.summary import SCHEMA, read_summary
from flatout.run_log import RunLog


def report_early(
    curves: RunCurves, feed: Feed, precision: str, batches_an_epoch: int, log: RunLog
) -> None:
    """Report a cause that costs much, soon after the start: you can still stop the run."""
    batches = curves.throughput.volume.counted().batches
    evidence = evidence_of(curves, feed, precision, batches / max(1, batches_an_epoch))
    if evidence is not None and (finding := plain_finding(evidence)) is not None:
        log.say(f"after {evidence.steps} steps: {finding.sentence()}")


def evidence_in(folder: Path) -> Evidence:
    """The evidence in a run folder; from the curves so far if the run has not ended."""
    summary = read_summary(folder)
    evidence = summary.get("evidence")
    is_known = summary["schema"] == SCHEMA
    if evidence and is_known:
        with suppress(TypeError):  # another version may have written other keys
            return Evidence.from_dict(evidence)
    if evidence or not is_known:
        theirs = (summary.get("versions") or {}).get("flatout", "an unknown version")
        raise UserError(
            str(folder),
            f"a run by flatout {theirs}, whose summary.json this version cannot read",
            hint="Use the doctor of that version, or train it again.",
        )
    return _evidence_of_curves(folder, summary)


def _evidence_of_curves(folder: Path, summary: Mapping[str, Any]) -> Evidence:
    """The evidence of a run that has not ended: means over its curves."""
    rows = [row for row in read_curves(folder) if row.get("speed/rows_per_s")]
    steps = int(float(rows[-1]["step"])) if rows else 0
    hint = "Look again later." if summary["status"] == "running" else "Train it for longer."
    require(
        steps >= LEAST_STEPS,
        "run",
        f"{folder} has {steps} steps",
        allowed=f"{LEAST_STEPS} or more",
        hint=hint,
    )
    later = rows[1:] or rows  # the first steps warm up

    def mean(name: str) -> float:
        """Mean of a curve; 0 if it has no values."""
        values = [float(row[name]) for row in later if row.get(name)]
        return sum(values) / len(values) if values else 0.0

    ms = {part: mean(f"time/{part}_ms") for part in PARTS}
    gpu = {name.removeprefix("gpu/"): mean(name) for name in rows[0] if name.startswith("gpu/")}
    gpu = {name: value for name, value in gpu.items() if value}
    hardware = summary["hardware"]
    # Fractions of cores mean nothing if their number is unknown.
    host = [name for name in rows[0] if name.startswith("host/") and hardware["cores"]]
    return Evidence(
        device="cuda" if gpu else "cpu",
        steps=steps,
        batches=steps,
        rows_per_batch=statistics.mean(map(_rows_a_batch, later)),
        ms={part: value for part, value in ms.items() if value},
        host={name.removeprefix("host/"): mean(name) for name in host},
        gpu=gpu,
        world=hardware["count"] or 1,
        machine_cores=hardware["cores"] or 1,
        epochs=math.ceil(float(rows[-1]["epoch"])),
        flush_every=max(1, round(steps / len(rows))),
        counts={
            "logging": len(rows),
            "validation": sum(bool(row.get("val/loss")) for row in read_curves(folder)),
        },
        not_tried=f"from the curves of a run that is {summary['status']}",
        mfu=mean("speed/mfu") or None,
        padding_share=mean("speed/padding_share"),
    )


def _rows_a_batch(row: Mapping[str, str]) -> float:
    """Rows of a batch, by one row of the curves: the product of two means would differ."""
    ms = sum(float(row.get(f"time/{part}_ms") or 0.0) for part in PARTS if part != "validation")
    return float(row["speed/rows_per_s"]) * ms / 1000


def evidence_of_own(
    curves: RunCurves, trainer: L.Trainer, fetch_ms: float | None
) -> Evidence | None:
    """The evidence of a training with the user's own loader; None if it was too short.

    `fetch_ms`: how long the loader took for a batch. The timer's wait also contains Lightning's own
    work between batches, which counts as `other` then.
    """
    plan = PlanSettings(rows_per_batch=1, accumulate=max(1, trainer.accumulate_grad_batches))
    batches = curves.throughput.volume.counted().batches
    epochs = batches / max(1.0, float(trainer.num_training_batches))
    # The loader in the shape of a feed.
    loader: Any = SimpleNamespace(
        plan=plan, device=trainer.strategy.root_device, kind=FeedKind.threaded
    )
    evidence = evidence_of(curves, loader, str(trainer.precision), epochs)
    if evidence is None:
        return None
    if fetch_ms is not None:
        wait = evidence.ms.get("wait", 0.0)
        fetched = min(wait, fetch_ms)
        evidence.ms["wait"] = fetched
        evidence.ms["other"] = evidence.ms.get("other", 0.0) + wait - fetched
    return replace(
        evidence, feed=OWN_LOADER, world=trainer.world_size, batch_size=None, padding_share=0.0
    )


def evidence_of(curves: RunCurves, feed: Feed, precision: str, epochs: float) -> Evidence | None:
    """The evidence so far; None if it is too little for a verdict."""
    throughput = curves.throughput
    plan = feed.plan
    clock = curves.clock
    counted = throughput.volume.counted()
    batches, steps = counted.batches, counted.steps
    if steps < LEAST_STEPS:
        return None
    hardware = curves.monitor.summary()
    split = curves.timer.times.counted().split()
    # Time of callbacks costs nothing while the device computes. The split counts the rest, which is
    # divided among them.
    scale = split["callbacks"] / max(sum(clock.callbacks.values()), 1e-9)
    return Evidence(
        device=feed.device.type,
        steps=steps,
        batches=batches,
        # The rows of some kinds of batches are unknown: count batches then.
        rows_per_batch=(counted.rows or batches) / batches,
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
        callbacks={
            name: 1000 * scale * seconds / batches
            for name, seconds in clock.callbacks.items()
            if seconds
        },
        reads=clock.reads_a_step,
        compiled={
            name: now - clock.compiled.get(name, 0.0) for name, now in compiled_so_far().items()
        },
        host=without_none(hardware.get("host", {})),
        gpu=without_none(hardware.get("gpu", {})),
    )
