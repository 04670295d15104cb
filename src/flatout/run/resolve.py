"""What a run decides before it trains: its threads, its length, its learning rate, its number
format, its metric.

Each decision is made here, once, and printed with its reason. `Settings` holds them; no later stage
changes one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, astuple, dataclass, replace
from typing import Any

import lightning as L
import torch

from flatout.checkpoints.settings import Mode
from flatout.config import RunConfig
from flatout.data.batches.feed import Feeds
from flatout.data.batches.gather import TOKENS
from flatout.data.batches.plan import PlanSettings
from flatout.distributed.limits import keep_freed_memory, let_segments_grow
from flatout.distributed.ranks import Ranks, cores_here
from flatout.engine.compile import choose_compile, compile_in_place, compiles_layers
from flatout.engine.optimizer import OptimConfig, ScaleRate
from flatout.engine.precision import Precision, choose_precision, fast_fp32_products
from flatout.engine.run_length import batches_in_epoch, planned_steps, whole_steps
from flatout.errors import require
from flatout.models.contract import recommended_clip, recommended_lr
from flatout.report.summary import plain
from flatout.run.own_parts import plain_name
from flatout.run.run_folder import RunFolder
from flatout.run_log import Choice
from flatout.tasks.metrics import require_metric
from flatout.tasks.task import Task


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run has decided; the rest of its settings is as they were asked for."""

    asked: RunConfig
    # all settings as plain values, as checkpoints and dashboards compare them
    values: dict[str, Any]
    # arguments of Lightning's Trainer; epochs and validations end where an optimizer step does
    trainer: dict[str, Any]
    precision: Choice[Precision]
    optim: OptimConfig
    _: KW_ONLY
    clip: float | None = None  # the longest gradient; None: as the Trainer's arguments say
    batches: int | None = None  # of an epoch; None where the user's own DataModule decides
    total_steps: int | None = None
    # the plain name of the validation metric that decides which checkpoint is best; None: none does
    metric: str | None
    monitor: str | None  # the name under which it is logged
    mode: str  # whether it is better when higher (`max`) or lower (`min`)


def resolve(
    config: RunConfig,
    task: Task,
    feeds: Feeds | None,
    device: torch.device,
    ranks: Ranks,
    folder: RunFolder,
) -> Settings:
    """Decide, and give the task its length and its learning rate."""
    # the user's own module trains: optimizer, clipping and epochs are its own and its Trainer's
    if feeds is None:
        precision = resolve_precision(config.precision, device, ranks, folder)
        name = config.checkpoint.metric
        trainer = trainer_of_own(config, ranks.world)
        mode = config.checkpoint.mode_of(plain_name(name or "", "val"))
        if name is not None and config.checkpoint.mode is Mode.auto:
            folder.decision(
                "checkpoint.mode",
                mode,
                f"by the name of {name}",
                "checkpoint.mode=min or max sets it",
            )
        metric = None if name is None else plain_name(name, "val")
        return Settings(
            config,
            plain(config),
            trainer,
            precision,
            config.optim,
            metric=metric,
            monitor=name,
            mode=mode,
        )
    trainer = whole_steps(config.trainer, feeds.train, folder)
    total_steps = planned_steps(trainer, feeds.train)
    optim = resolve_rate(config, task.model_config, feeds.train.plan, folder)
    task.total_steps, task.optim = total_steps, optim
    precision = resolve_precision(config.precision, device, ranks, folder)
    metric = config.checkpoint.metric
    if metric is not None:
        require_metric(metric, [*task.metric_names, "loss"], "checkpoint.metric")
    metric = metric or task.usual_metric
    return Settings(
        asked=config,
        values=plain(replace(config, trainer=trainer)),
        trainer=trainer,
        precision=precision,
        optim=optim,
        clip=clip_of(config),
        batches=batches_in_epoch(trainer, feeds.train),
        total_steps=total_steps,
        metric=metric,
        monitor=f"val/{metric}",
        mode=config.checkpoint.mode_of(metric),
    )


def trainer_of_own(config: RunConfig, world: int) -> dict[str, Any]:
    """The Trainer's arguments for the user's own module, with what `optim.clip` and
    `data.accumulate` say.
    """
    batches = 1 if isinstance(config.data, L.LightningDataModule) else config.data.batches(world)[1]
    asked = (
        ("gradient_clip_val", "optim.clip", config.optim.clip),
        ("accumulate_grad_batches", "data.accumulate", batches if batches > 1 else None),
    )
    trainer = config.trainer | {name: value for name, _, value in asked if value}
    for name, where, value in (each for each in asked if each[0] in trainer):
        is_once = not value or name not in config.trainer
        require(is_once, where, f"is set, and trainer.{name} too", hint="Leave one of them out.")
        require(
            config.task.automatic_optimization,
            where if value else f"trainer.{name}",
            f"{type(config.task).__name__} uses manual optimisation: it clips and accumulates by"
            " itself",
            hint="Leave it out.",
        )
    return trainer


def clip_of(config: RunConfig) -> float:
    """The longest gradient: the setting's, or what the model recommends; 0: no clipping."""
    clip = config.optim.clip
    return recommended_clip(config.model) if clip is None else float(clip)


def resolve_rate(
    config: RunConfig, model_config: Any, plan: PlanSettings, folder: RunFolder
) -> OptimConfig:
    """The learning rate that was asked for or that suits the model, scaled to the rows of a step
    where that is set.
    """
    optim = config.optim
    if optim.lr is None and (rate := recommended_lr(model_config)) is not None:
        folder.decision(
            "optim.lr",
            f"{rate:g}",
            "usual for such a model",
            "set optim.lr for another",
            replaces=True,
        )
        optim = replace(optim, lr=rate)
    if config.data.effective_batch is None and optim.scale_lr is ScaleRate.none:
        return optim
    require(
        plan.tokens_per_batch is None,
        "optim.scale_lr",
        f"{optim.scale_lr.value}, but data.tokens_per_batch makes steps of unequal rows",
        hint="Leave one of them out.",
    )
    rows = plan.rows_per_batch * plan.parts
    scaled = optim.scaled(rows)
    product = f"{plan.rows_per_batch} × {plan.accumulate} × {plan.world}"
    rates = (optim.highest, scaled.highest)
    is_capped = scaled is not optim and scaled.highest == optim.max_lr
    how = (
        "not scaled" if scaled is optim else f"{optim.scale_lr.value} from {optim.base_batch} rows"
    )
    value = f"{product} = {rows} rows, lr {rates[0]:g} → {rates[1]:g}"
    folder.decision(
        "micro × accumulation × devices",
        value,
        "as asked",
        f"lr {how}{', capped' if is_capped else ''}",
    )
    return scaled


def resolve_precision(
    asked: Precision, device: torch.device, ranks: Ranks, folder: RunFolder
) -> Choice[Precision]:
    """The first rank's choice, on all; a resumed run keeps its own."""
    before = folder.before.get("precision", {}).get("value")
    name, why, evidence = ranks.agreed(
        "precision", lambda: astuple(choose_precision(asked, device, before))
    )
    folder.decision("precision", name, why, evidence)
    return Choice(Precision(name), why, evidence)


def share_processor(
    threads: int | None, ranks: Ranks, device: torch.device, folder: RunFolder
) -> None:
    """Divide the cores among the ranks of this machine, as torchrun would leave each a single
    thread; keep memory.
    """
    if device.type == "cpu" and keep_freed_memory():
        why, evidence = "avoids page faults in each step", "mallopt accepted it"
        folder.decision("allocator", "malloc keeps freed memory", why, evidence, prints=False)
    if device.type == "cuda" and let_segments_grow():
        why, evidence = (
            "batches have another shape in each step, and gaps would stay",
            "PYTORCH_ALLOC_CONF was not set",
        )
        folder.decision("allocator", "segments of a GPU's memory grow", why, evidence, prints=False)
    if threads is not None:
        there = os.cpu_count() or threads
        require(
            threads <= 4 * there,
            "threads",
            f"{threads:,}",
            allowed=f"at most {4 * there}: this machine has {there} cores",
        )
        torch.set_num_threads(threads)
        return
    has_own = "SLURM_CPUS_PER_TASK" in os.environ  # srun has divided them
    if ranks.local_world > 1 and not has_own and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        threads = max(1, len(cores_here()) // ranks.local_world)
        torch.set_num_threads(threads)
        if device.type == "cpu":
            evidence = f"{len(cores_here())} cores, {ranks.local_world} ranks on this machine"
            folder.decision("threads a rank", threads, "an equal share of the cores", evidence)


@contextmanager
def exact_products(precision: Precision, feeds: Feeds | None, folder: RunFolder) -> Iterator[None]:
    """Products of fp32 in the faster of two ways that are as exact, while a run computes; as torch
    is set without.
    """
    if feeds is None:
        yield
        return
    with fast_fp32_products(precision, feeds.train.device) as found:
        if found is not None:
            folder.decision("fp32 products", found.value, found.why, found.evidence)
        yield


def compile_network(
    settings: Settings, task: Task, feeds: Feeds | None, ranks: Ranks, folder: RunFolder
) -> None:
    """Compile as asked; by default the layers of a flat encoder where that pays.

    A resumed run keeps its choice.
    """
    if feeds is None:
        return
    asked = settings.asked.compile
    device = feeds.train.device
    plan = feeds.train.plan
    if asked:
        compile_in_place(task.model, device)
        folder.decision("compile", True, "asked for", "the first step waits for it")
    if asked is not None or not compiles_layers(task.model):
        return
    if before := folder.before.get("compile"):
        choice = Choice(before["value"], before["why"], before["evidence"])
        if choice.value:
            compile_in_place(task.model, device)
    elif ranks.are_several:
        choice = Choice(
            False, "compile=auto measures on one device", "compile=true compiles on several"
        )
    else:
        rows = plan.rows_per_batch * float(feeds.train.split.lengths(TOKENS).mean())
        tokens = int(min(rows, plan.tokens_per_batch or rows))
        passes = (task.total_steps or 1) * plan.accumulate
        choice = choose_compile(
            task.model, device, settings.precision.value, tokens=tokens, passes=passes
        )
    folder.decision("compile", choice.value, choice.why, choice.evidence)
