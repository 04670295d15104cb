"""The evidence and the verdict of a run: while it trains, at its end, and for a finished run folder."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import psutil
import torch

from flatout.callbacks.clock import PARTS, compiled_so_far
from flatout.callbacks.run_curves import RunCurves
from flatout.data.batches.feed import Feed, Feeds
from flatout.data.batches.plan import FeedKind, PlanSettings
from flatout.distributed.collectives import of_all_ranks
from flatout.distributed.ranks import cores_here
from flatout.engine.precision import LIGHTNING_NAMES, Precision, choose_precision
from flatout.errors import UserError, require
from flatout.models.encoder.transformer import Transformer
from flatout.perf.verdict.evidence import LEAST_STEPS, OWN_LOADER, Evidence
from flatout.perf.verdict.experiments import SHARE, alone_ms, try_out, try_safely
from flatout.perf.verdict.rules import findings
from flatout.report.page import read_curves
from flatout.report.summary import SCHEMA, read_summary
from flatout.run_log import RunLog
from flatout.tasks.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Judging:
    """What a verdict needs to know of a run's settings."""

    batches_in_epoch: int
    effective_batch: int | None
    is_precision_asked: bool  # whether the settings name fp32 or bf16, and no measurement chose it
    is_compiled: bool
    may_try: bool  # whether it may try other settings
    pieces: int  # micro-batches of a training batch


def report_early(curves: RunCurves, feed: Feed, precision: str, batches_an_epoch: int, log: RunLog) -> None:
    """After some dozens of steps, report what plainly holds the run back: you can still end and fix it."""
    evidence = evidence_of(
        curves, feed, precision, curves.throughput.volume.counted().batches / max(1, batches_an_epoch)
    )
    if evidence is not None and (found := [each for each in findings(evidence) if each.is_plain]):
        log.say(f"after {evidence.steps} steps: {found[0].sentence()}")


def judge(task: Task, feeds: Feeds, curves: RunCurves, known: Judging, log: RunLog) -> Evidence | None:
    """At the end, on all ranks: try what could be faster; the evidence, None after too few steps."""
    evidence, is_alone = _evidence_of(task, feeds, curves, known), feeds.train.plan.world == 1
    ranks: list[dict[str, float]] = []
    if not is_alone:
        tries = known.may_try and evidence is not None
        seconds = SHARE * evidence.total_ms * evidence.batches / 1000 if tries and evidence is not None else 0.0
        ranks = _of_all_ranks(task, feeds, curves, seconds, known.pieces)
    if evidence is None:
        log.say(f"verdict: none, a verdict needs {LEAST_STEPS} steps")
    elif not is_alone:
        evidence.ranks, evidence.not_tried = ranks, "on several ranks nothing else is tried"
    elif known.may_try:
        try_safely(evidence, partial(try_out, task, feeds, evidence, is_compiled=known.is_compiled))
    return evidence


def _evidence_of(task: Task, feeds: Feeds, curves: RunCurves, known: Judging) -> Evidence | None:
    epochs = curves.throughput.volume.total.batches / max(1, known.batches_in_epoch)
    evidence = evidence_of(curves, feeds.train, str(task.trainer.precision), epochs)
    if evidence is None:
        return None
    evidence.effective_batch, evidence.pieces = known.effective_batch, known.pieces
    evidence.tuned_layers = _tuned_layers(task)
    usual = choose_precision(Precision.auto, task.device).value
    if known.is_precision_asked and LIGHTNING_NAMES[usual] != evidence.precision:
        evidence.native = usual.value
    return evidence


def _tuned_layers(task: Task) -> int:
    """Layers of a pretrained encoder of which all are trained."""
    network, is_pretrained = task.model, getattr(task.model_config, "pretrained", None) is not None
    if not is_pretrained or not isinstance(network, Transformer) or not network.is_flat or network.predicts_words:
        return 0
    return len(network.in_order()) if all(weight.requires_grad for weight in network.parameters()) else 0


def _of_all_ranks(task: Task, feeds: Feeds, curves: RunCurves, seconds: float, pieces: int) -> list[dict[str, float]]:
    """Each rank's parts of a batch, and what it takes alone."""
    counted = curves.timer.times.counted()
    own = {name: 1000 * spent / max(1, counted.batches) for name, spent in counted.split().items()}
    if seconds and pieces == 1:
        with suppress(Exception):  # your own model may raise anything, and the other ranks wait for this one
            own["alone"] = alone_ms(task, feeds, min(seconds, 5.0))
    return of_all_ranks(own)


def evidence_in(folder: Path) -> Evidence:
    """What a run's folder tells: all its evidence where it has ended, else what its curves say so far."""
    summary = read_summary(folder)
    kept, is_known = summary.get("evidence"), summary["schema"] == SCHEMA
    if kept and is_known:
        with suppress(TypeError):  # another version may have written other keys
            return Evidence.from_dict(kept)
    if kept or not is_known:
        theirs = (summary.get("versions") or {}).get("flatout", "an unknown version")
        what = f"a run by flatout {theirs}, whose summary.json this version cannot read"
        raise UserError(str(folder), what, hint="Use the doctor of that version, or train it again.")
    rows = [row for row in read_curves(folder) if row.get("speed/rows_per_s")]
    steps = int(float(rows[-1]["step"])) if rows else 0
    hint = "Look again later." if summary["status"] == "running" else "Train it for longer."
    require(steps >= LEAST_STEPS, "run", f"{folder} has {steps} steps", allowed=f"{LEAST_STEPS} or more", hint=hint)
    later = rows[1:] or rows  # the first steps warm up

    def mean(name: str) -> float:
        values = [float(row[name]) for row in later if row.get(name)]
        return sum(values) / len(values) if values else 0.0

    ms = {part: value for part in PARTS if (value := mean(f"time/{part}_ms"))}
    gpu = {name.removeprefix("gpu/"): value for name in rows[0] if name.startswith("gpu/") and (value := mean(name))}
    hardware = summary["hardware"]
    return Evidence(
        device="cuda" if gpu else "cpu",
        steps=steps,
        batches=steps,
        rows_per_batch=mean("speed/rows_per_s") * (sum(ms.values()) - ms.get("validation", 0.0)) / 1000,
        ms=ms,
        host={name.removeprefix("host/"): mean(name) for name in rows[0] if name.startswith("host/")},
        gpu=gpu,
        world=hardware["count"] or 1,
        machine_cores=hardware["cores"] or 1,
        epochs=math.ceil(float(rows[-1]["epoch"])),
        flush_every=max(1, round(steps / len(rows))),
        counts={"logging": len(rows), "validation": sum(bool(row.get("val/loss")) for row in read_curves(folder))},
        not_tried=f"from the curves of a run that is {summary['status']}",
        mfu=mean("speed/mfu") or None,
        padding_share=mean("speed/padding_share"),
    )


def evidence_of_own(curves: RunCurves, trainer: L.Trainer, fetch_ms: float | None = None) -> Evidence | None:
    """What was measured with the user's own loader, whose batch size and tokens are not known.

    `fetch_ms`: what a batch took to come out of the loader; the wait that curves show has Lightning's own work in it.
    """
    plan = PlanSettings(rows_per_batch=1, accumulate=max(1, trainer.accumulate_grad_batches))
    epochs = curves.throughput.volume.counted().batches / max(1.0, float(trainer.num_training_batches))
    loader: Any = SimpleNamespace(plan=plan, device=trainer.strategy.root_device, kind=FeedKind.threaded)
    found = evidence_of(curves, loader, str(trainer.precision), epochs)
    if found is None:
        return None
    wait = found.ms.get("wait", 0.0)
    fetched = wait if fetch_ms is None else min(wait, fetch_ms)
    found.ms |= {"wait": fetched, "other": found.ms.get("other", 0.0) + wait - fetched}
    return replace(found, feed=OWN_LOADER, world=trainer.world_size, batch_size=None, padding_share=0.0)


def evidence_of(curves: RunCurves, feed: Feed, precision: str, epochs: float) -> Evidence | None:
    """What was measured so far; None where it is too little for a verdict."""
    throughput, plan, clock = curves.throughput, feed.plan, curves.clock
    counted = throughput.volume.counted()
    batches = counted.batches
    steps = batches // plan.accumulate
    if steps < LEAST_STEPS:
        return None
    seen, split = curves.monitor.summary(), curves.timer.times.counted().split()
    # Of what callbacks took, a device's own work behind them costs nothing.
    scale = split["callbacks"] / max(sum(clock.callbacks.values()), 1e-9)
    return Evidence(
        device=feed.device.type,
        steps=steps,
        batches=batches,
        rows_per_batch=(counted.rows or batches) / batches,  # of some batches the rows are not known
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
