"""Make a run's decisions before it trains: threads, length, learning rate, precision, metric.

Each decision is made here, once, and printed with its reason and its evidence. `Settings` holds the
decisions, and no later stage changes one. Open this file to change a choice that is made by a rule;
choices that are measured are in `run/tuning.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import nn

from flatout.checkpoints.settings import Mode
from flatout.config import RunConfig
from flatout.data.batches.gather import TOKENS
from flatout.distributed.limits import keep_freed_memory, let_segments_grow
from flatout.distributed.ranks import Ranks, cores_here
from flatout.engine.compile import STATIC, compile_in_place, compiles_layers
from flatout.engine.graph_choice import planned_token_counts
from flatout.engine.optimizer import OptimConfig, ScaleRate
from flatout.engine.precision import Precision, choose_precision, fast_fp32_products
from flatout.engine.run_length import batches_in_epoch, planned_steps, whole_steps
from flatout.errors import require
from flatout.models.contract import recommended_clip, recommended_lr
from flatout.perf.compile_choice import Passes, choose_compile, choose_static_shapes
from flatout.price.settings import Target
from flatout.report.summary import plain
from flatout.run.context import OurParts, Run, RunContext, Settings
from flatout.run.run_folder import RunFolder
from flatout.run_log import Choice
from flatout.tasks.metrics import require_metric

_COMPILED_SHAPES = "compiled shapes"


def resolve(config: RunConfig, ours: OurParts, context: RunContext) -> Settings:
    """Make the decisions that follow from the built network, and collect all of them."""
    task = ours.task
    feed = ours.feeds.train
    folder = context.folder
    trainer = whole_steps(config.trainer, feed, folder)
    precision = resolve_precision(config.precision, context)
    metric = config.checkpoint.metric
    if metric is None:
        metric = task.usual_metric
    else:
        require_metric(metric, [*task.all_metric_names, "loss"], "checkpoint.metric")
    if config.until is not None:
        require_metric(Target.of(config.until).metric, [*task.all_metric_names, "loss"], "until")
    mode = config.checkpoint.mode_of(metric)
    if metric in task.own_metrics:
        report_mode(config, mode, metric, folder)
    return Settings(
        asked=config,
        values=plain(replace(config, trainer=trainer)),
        trainer=trainer,
        precision=precision,
        optim=task.optim,
        clip=clip_of(config),
        batches=batches_in_epoch(trainer, feed),
        total_steps=planned_steps(trainer, feed),
        metric=metric,
        monitor=f"val/{metric}",
        mode=mode,
    )


def report_mode(config: RunConfig, mode: str, metric: str, folder: RunFolder) -> None:
    """Say of a metric of the user's whether a higher value is better, if nothing was set."""
    if config.checkpoint.mode is Mode.auto:
        why = f"by the name of {metric}"
        folder.decision("checkpoint.mode", mode, why, "checkpoint.mode=min or max sets it")


def clip_of(config: RunConfig) -> float:
    """The norm at which gradients are clipped, set or recommended by the model; 0: none are."""
    clip = config.optim.clip
    return recommended_clip(config.model) if clip is None else float(clip)


def choose_rate(config: RunConfig, world: int, folder: RunFolder) -> OptimConfig:
    """The optimizer's settings with the learning rate of a run on `world` devices.

    It is the rate that was set or measured, else the one that suits the model, scaled to the rows
    of a step if asked. This is the only place that decides it, before the task is made:

        optim.lr=0.01 optim.scale_lr=sqrt optim.base_batch=16, 64 rows a step   →   0.02
    """
    optim = config.optim
    data = config.data
    is_built = isinstance(config.model, nn.Module)
    recommended = None if is_built or optim.lr is not None else recommended_lr(config.model)
    if recommended is not None:
        folder.decision(
            "optim.lr",
            f"{recommended:g}",
            "usual for such a model",
            "set optim.lr for another",
            replaces=True,
        )
        optim = replace(optim, lr=recommended)
    if data.effective_batch is None and optim.scale_lr is ScaleRate.none:
        return optim
    require(
        data.tokens_per_batch is None,
        "optim.scale_lr",
        f"{optim.scale_lr.value}, but data.tokens_per_batch makes steps of unequal rows",
        hint="Leave one of them out.",
    )
    rows_per_batch, accumulate = data.batches(world)
    rows = rows_per_batch * accumulate * world
    scaled = optim.scaled(rows)
    if scaled is optim:
        how = "not scaled"
    else:
        how = f"{optim.scale_lr.value} from {optim.base_batch} rows"
        if scaled.highest == optim.max_lr:
            how += ", capped"
    folder.decision(
        "micro × accumulation × devices",
        f"{rows_per_batch} × {accumulate} × {world} = {rows} rows,"
        f" lr {optim.highest:g} → {scaled.highest:g}",
        "as asked",
        f"lr {how}",
    )
    return scaled


def resolve_precision(asked: Precision, context: RunContext) -> Choice[Precision]:
    """The number format of matrix products; ranks take the first one's, a resumed run its own."""
    folder = context.folder
    before = folder.before.get("precision", {}).get("value")

    def choose() -> tuple[Any, ...]:
        return astuple(choose_precision(asked, context.device, before))

    name, why, evidence = context.ranks.agreed("precision", choose)
    folder.decision("precision", name, why, evidence)
    return Choice(Precision(name), why, evidence)


def share_processor(
    threads: int | None, ranks: Ranks, device: torch.device, folder: RunFolder
) -> None:
    """Set how many threads this rank computes with, and how it keeps freed memory.

    Without `threads` the ranks of a machine share its cores: torchrun would leave each one thread.
    """
    _keep_memory(device, folder)
    num_cores = os.cpu_count()
    if threads is not None:
        most = 4 * (num_cores or threads)
        require(
            threads <= most,
            "threads",
            f"{threads:,}",
            allowed=f"at most {most}: this machine has {num_cores or threads} cores",
        )
        torch.set_num_threads(threads)
        return
    is_shared_by_srun = "SLURM_CPUS_PER_TASK" in os.environ
    is_shared_by_user = os.environ.get("OMP_NUM_THREADS", "1") != "1"
    if ranks.local_world == 1 or is_shared_by_srun or is_shared_by_user:
        return
    threads = max(1, len(cores_here()) // ranks.local_world)
    torch.set_num_threads(threads)
    if device.type == "cpu":
        evidence = f"{len(cores_here())} cores, {ranks.local_world} ranks on this machine"
        folder.decision("threads a rank", threads, "an equal share of the cores", evidence)


def _keep_memory(device: torch.device, folder: RunFolder) -> None:
    """Let the allocator of the device keep freed memory, and report it in the log only."""
    if device.type == "cpu" and keep_freed_memory():
        folder.decision(
            "allocator",
            "malloc keeps freed memory",
            "avoids page faults in each step",
            "mallopt accepted it",
            prints=False,
        )
    if device.type == "cuda" and let_segments_grow():
        folder.decision(
            "allocator",
            "segments of a GPU's memory grow",
            "batches have another shape in each step, and gaps would stay",
            "PYTORCH_ALLOC_CONF was not set",
            prints=False,
        )


@contextmanager
def exact_products(run: Run, device: torch.device) -> Iterator[None]:
    """Inside it, products of fp32 are made in the faster of the ways that are exact.

    Afterwards torch is set as before.
    """
    with fast_fp32_products(run.settings.precision.value, device) as choice:
        if choice is not None:
            run.folder.decision("fp32 products", choice.value, choice.why, choice.evidence)
        yield


def compile_network(run: Run, ours: OurParts) -> None:
    """Compile as asked; by default the layers of a flat encoder where that pays.

    A resumed run keeps its choices.
    """
    model = ours.task.model
    asked = run.settings.asked.compile
    folder = run.folder
    if asked:
        compile_in_place(model, run.device)
        folder.decision("compile", True, "asked for", "the first step waits for it")
    if asked is not None or not compiles_layers(model):
        return
    shapes: Choice[str] | None = None
    if "compile" in folder.before:
        choice, shapes = _compile_as_before(run, ours)
    elif run.ranks.are_several:
        choice = Choice(
            False, "compile=auto measures on one device", "compile=true compiles on several"
        )
    else:
        device = ours.feeds.train.device
        precision = run.settings.precision.value
        passes = _passes_of(run, ours)
        choice = choose_compile(model, device, precision, passes, folder.say)
        if choice.value and passes.token_counts:
            shapes = choose_static_shapes(model, device, precision, passes, folder.say)
    folder.decision("compile", choice.value, choice.why, choice.evidence)
    if shapes is not None:
        folder.decision(_COMPILED_SHAPES, shapes.value, shapes.why, shapes.evidence)


def _compile_as_before(run: Run, ours: OurParts) -> tuple[Choice[bool], Choice[str] | None]:
    """Compile as a resumed run did; its choices."""
    before = run.folder.before
    choice: Choice[bool] = _choice_of(before["compile"])
    shapes: Choice[str] | None = None
    if _COMPILED_SHAPES in before:
        shapes = _choice_of(before[_COMPILED_SHAPES])
    if choice.value:
        is_static = shapes is not None and shapes.value == STATIC
        token_counts = _passes_of(run, ours).token_counts if is_static else ()
        compile_in_place(ours.task.model, run.device, token_counts)
    return choice, shapes


def _choice_of(kept: dict[str, Any]) -> Choice[Any]:
    return Choice(kept["value"], kept["why"], kept["evidence"])


def _passes_of(run: Run, ours: OurParts) -> Passes:
    """The forward passes of a run of a flat encoder."""
    feed = ours.feeds.train
    plan = feed.plan
    steps = run.settings.total_steps or 1
    tokens = plan.rows_per_batch * float(feed.split.lengths(TOKENS).mean())
    if plan.tokens_per_batch:
        tokens = min(tokens, plan.tokens_per_batch)
    counts = list[int]()
    if plan.accumulate == 1 and not run.ranks.are_several:
        counts = planned_token_counts(run.settings.asked.graph, ours.task, feed, steps)
    return Passes(steps * plan.accumulate, int(tokens), counts)
