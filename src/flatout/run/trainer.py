"""Lightning's Trainer for one run: our callbacks, our checkpoints, and whatever a person set, which wins."""

from __future__ import annotations

import inspect
import logging
import math
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flatout.callbacks.hardware_monitor import HardwareMonitor, hardware_of
from flatout.callbacks.loggers import RunLoggers, RunPlace, build_loggers
from flatout.callbacks.profile_steps import ProfileSteps
from flatout.callbacks.progress_line import ProgressLine
from flatout.callbacks.run_curves import Listener, MetricsFile, RunCurves
from flatout.callbacks.step_timer import StepTimer
from flatout.callbacks.throughput import Throughput
from flatout.checkpoints.exact import ExactCheckpoint
from flatout.checkpoints.folder import FolderCheckpointIO
from flatout.checkpoints.kept import CHECKPOINTS
from flatout.checkpoints.settings import best_mode
from flatout.config import RunConfig
from flatout.data.batches.feed import Feed, free_memory
from flatout.distributed.ranks import Ranks
from flatout.distributed.signals import Signals
from flatout.engine.fast_loop import FastLoop
from flatout.engine.lightning_internals import NoProfiler, disable_signal_handling, silence_unused_hooks
from flatout.engine.precision import Precision, PrecisionChoice
from flatout.errors import UserError, require
from flatout.report.dashboard import layout
from flatout.report.hyperparameters import compared_settings
from flatout.run.resume import Start
from flatout.run.run_folder import RunFolder, plain
from flatout.tasks.metrics import require_metric
from flatout.tasks.task import Task

EPOCHS = 8


@dataclass(frozen=True, slots=True)
class Training:
    """A Trainer, and the callbacks that are asked afterwards."""

    trainer: L.Trainer
    curves: RunCurves
    loggers: RunLoggers
    checkpoints: ExactCheckpoint
    loop: FastLoop


def whole_steps(trainer: dict[str, Any], feed: Feed, place: RunFolder) -> dict[str, Any]:
    """A Trainer's settings with epochs and validations that end where an optimizer step does, never inside one."""
    accumulate, settings = feed.plan.accumulate, dict(trainer)
    if overfit := settings.pop("overfit_batches", 0):  # the plan repeats its first epoch, so a limit is enough
        settings = {"limit_train_batches": overfit, "limit_val_batches": overfit, **settings}
    limit = settings.get("limit_train_batches")
    if limit is not None:
        batches = _whole(_count(limit, len(feed)), accumulate)
        require(batches > 0, "trainer.limit_train_batches", f"{limit}", allowed="at least one batch")
        settings["limit_train_batches"] = min(batches, len(feed))
    interval = settings.get("val_check_interval")
    is_timed = interval is not None and not isinstance(interval, int | float)
    hint = "Count batches, or set data.accumulate=1: the clock knows no steps."
    require(not is_timed or accumulate == 1, "trainer.val_check_interval", f"{interval}", hint=hint)
    if accumulate > 1 and isinstance(interval, int | float) and interval != 1.0:
        asked = _count(interval, batches_in_epoch(settings, feed))
        settings["val_check_interval"] = batches = _whole(asked, accumulate)
        if batches != asked:
            evidence = f"{accumulate} batches make a step, {asked} were asked for"
            place.choose("validation every", f"{batches} batches", "a step is never cut in two", evidence)
    return settings


def batches_in_epoch(trainer: dict[str, Any], feed: Feed) -> int:
    """Batches of one rank in each epoch."""
    limit = trainer.get("limit_train_batches")
    return len(feed) if limit is None else min(len(feed), _count(limit, len(feed)))


def planned_steps(trainer: dict[str, Any], feed: Feed) -> int:
    """Optimizer steps of the whole run."""
    epochs, most = trainer.get("max_epochs") or EPOCHS, trainer.get("max_steps")
    if most is not None and most != -1:
        require(most > 0, "trainer.max_steps", f"{most}", allowed="1 or more")
        return int(most)
    return epochs * batches_in_epoch(trainer, feed) // feed.plan.accumulate


def _count(given: float, total: int) -> int:
    """A number of batches, given as such or as a share."""
    return int(given) if isinstance(given, int) and not isinstance(given, bool) else math.floor(float(given) * total)


def _whole(batches: int, accumulate: int) -> int:
    return -(-batches // accumulate) * accumulate


def build_trainer(
    config: RunConfig,
    task: Task,
    loop: FastLoop,
    feed: Feed,
    precision: PrecisionChoice,
    ranks: Ranks,
    place: RunFolder,
    *,
    about: dict[str, Any],
    signals: Signals,
    start: Start | None,
) -> Training:
    """Lightning's Trainer with our callbacks; a person's own settings come last and win."""
    metric = chosen_metric(config, task)
    strategy = strategy_of(config, task, feed.device, precision, ranks, place)
    after = 0 if config.resume is not None else None  # one that was cut short before its first checkpoint
    monitor = monitor_of(feed.device, place)
    after = after if start is None else start.step
    loggers = loggers_of(config, task, monitor, place, after)
    timer, throughput = StepTimer(callbacks=config.callbacks), Throughput()
    listeners = listeners_of(config, task, metric, place, loggers, after)
    every = config.monitor.flush_every
    curves = RunCurves(listeners, every, timer=timer, throughput=throughput, monitor=monitor)
    checkpoints = ExactCheckpoint(
        place.path / CHECKPOINTS,
        every_steps=config.checkpoint.every_steps,
        every_minutes=config.checkpoint.every_minutes,
        monitor=f"val/{metric}",
        mode=best_mode(metric),
        min_delta=config.checkpoint.min_delta,
        about=about,
        signals=signals,
        others_draw=bool(config.callbacks),
        log=place,
    )
    stopping = [] if config.checkpoint.patience is None else [_early_stopping(config, metric)]
    looking = profile_of(config, place)
    defaults = lightning_defaults(precision, ranks, place)
    defaults["log_every_n_steps"] = min(every, batches_in_epoch(config.trainer, feed))
    # One process a device is running already, however many were asked for.
    settings = {**defaults, **config.trainer, **ranks.lightning_settings(feed.device), **strategy}
    settings["logger"] = loggers.for_trainer(is_first=place.is_first)
    settings |= {"accumulate_grad_batches": feed.plan.accumulate, "gradient_clip_val": clip_of(config) or None}
    trainer = quiet_trainer(settings, [loop, curves, *looking, *stopping, *config.callbacks.values(), checkpoints])
    silence_unused_hooks(trainer)
    disable_signal_handling(trainer)
    return Training(trainer, curves, loggers, checkpoints, loop)


def clip_of(config: RunConfig) -> float:
    """The longest gradient: the setting's, or what the model recommends; 0: no clipping."""
    recommended = getattr(config.model, "recommended_clip", 0.0)
    return float(recommended if config.optim.clip is None else config.optim.clip)


def lightning_defaults(precision: PrecisionChoice, ranks: Ranks, place: RunFolder) -> dict[str, Any]:
    """What is set unless a person sets it otherwise: what flatout does itself is off."""
    defaults: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "precision": precision.lightning_name,
        "profiler": NoProfiler(),
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "default_root_dir": str(place.path),
        "plugins": [FolderCheckpointIO(), *([ranks.environment()] if ranks.are_several else [])],
    }
    return defaults


def quiet_trainer(settings: dict[str, Any], callbacks: list[L.Callback]) -> L.Trainer:
    """Lightning's Trainer, which says nothing of its own accord; what it refuses is a person's mistake."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return L.Trainer(**settings, callbacks=callbacks)
    except (TypeError, ValueError, L.pytorch.utilities.exceptions.MisconfigurationException) as error:
        raise UserError("trainer", str(error), hint="These settings go to Lightning's Trainer.") from None


def listeners_of(
    config: RunConfig,
    task: Task,
    metric: str,
    place: RunFolder,
    loggers: RunLoggers,
    after: int | None = None,
) -> list[Listener]:
    """What receives the curves, from the step `after` on; nothing on ranks after the first."""
    if not place.is_first:
        return []
    return [
        MetricsFile(place.path / "metrics.csv", ["loss", *task.metric_names], is_new=not after),
        loggers,
        ProgressLine(metric=metric, total_steps=task.total_steps or 0, say=place.log.say, live=config.monitor.progress),
    ]


def loggers_of(
    config: RunConfig, task: Task, monitor: HardwareMonitor, place: RunFolder, after: int | None
) -> RunLoggers:
    """The loggers of the settings, on the first rank."""
    if not place.is_first:
        return RunLoggers({})
    found = build_loggers(config.logger, RunPlace(place.path, config.name, after), config.trainer.get("logger"))
    place.summary.set("loggers", list(found))
    names = [f"val/{name}" for name in ("loss", *task.metric_names)]
    has_card = any(source.name == "gpu" for source in monitor.watch.sources)
    settings = compared_settings(plain(config)) | {"optim.lr": task.optim.highest}
    return RunLoggers(found, metrics=names, settings=settings, charts=layout(task.metric_names, has_card=has_card))


def profile_of(config: RunConfig, place: RunFolder) -> list[ProfileSteps]:
    """A profile of some steps of the first rank, where it is asked for."""
    asked = config.monitor.profile
    if not (asked.enabled and place.is_first):
        return []
    window = {"wait": asked.wait, "warmup": asked.warmup, "active": asked.active}
    return [ProfileSteps(**window, folder=place.path, say=place.log.say)]


def monitor_of(device: torch.device, place: RunFolder) -> HardwareMonitor:
    """The first rank monitors its machine and its card; the others monitor nothing."""
    return HardwareMonitor(sources=hardware_of(device) if place.is_first else [], say=place.log.say)


def strategy_of(
    config: RunConfig, task: Task, device: torch.device, precision: PrecisionChoice, ranks: Ranks, place: RunFolder
) -> dict[str, Any]:
    """How ranks train together, as arguments of Lightning's Trainer: whole copies of the model, or slices of it."""
    asked = config.trainer.get("strategy")
    if not config.shares_weights:
        is_ours = ranks.are_several and asked in (None, "auto", "ddp")
        return {"strategy": ddp(task, device)} if is_ours else {}
    what, hint = "does not go with fp16: its scaler looks at whole gradients", "Set precision=fp32."
    require(precision.precision is not Precision.fp16, f"trainer.strategy: {asked}", what, hint=hint)
    what = "batch normalisation would have other means on every rank"
    require(not _has_means(task), f"trainer.strategy: {asked}", what, hint="Leave it out.")
    from flatout.distributed.fsdp import SharedOut

    # A trained weight comes with its gradient and with two numbers of AdamW.
    megabytes = sum(weight.nbytes * (4 if weight.requires_grad else 1) for weight in task.parameters()) / 1e6
    evidence = f"with gradients and AdamW {megabytes / ranks.world:,.1f} MB a device instead of {megabytes:,.1f}"
    place.choose("weights", f"1/{ranks.world} on each device", "trainer.strategy=fsdp", evidence)
    ranks_here = 1 if device.type == "cuda" else ranks.local_world
    if 2e6 * megabytes * ranks_here < (free := free_memory(device)):
        place.log.say(
            f"weights: whole ones would take less than half of the free {free / 1e9:,.1f} GB; trainer.strategy=auto"
            " keeps them so and sends less"
        )
    # Weights that were gathered in inference mode could not be trained afterwards.
    return {"strategy": SharedOut(ranks.world), "inference_mode": False}


_ONE_BUCKET_MB = 1 << 14
"""On a CPU what exchanges gradients takes its cores from what computes them: all are exchanged when all are there."""


def ddp(task: Task, device: torch.device) -> DDPStrategy:
    """Lightning's DDP without a copy of the gradients, and without buffers in each step that never change."""
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    settings: dict[str, Any] = {"gradient_as_bucket_view": True, buffers: _has_means(task)}
    if device.type == "cpu":
        settings["bucket_cap_mb"] = _ONE_BUCKET_MB
    return DDPStrategy(**settings)


def _has_means(task: Task) -> bool:
    """Whether there are running means, of batch normalisation; of several ranks' the first one's count."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in task.modules())


def chosen_metric(config: RunConfig, task: Task) -> str:
    """The validation metric that decides what is best."""
    available = [*task.metric_names, "loss"]
    if config.checkpoint.metric is None:
        return task.usual_metric
    require_metric(config.checkpoint.metric, available, "checkpoint.metric")
    return config.checkpoint.metric


def _early_stopping(config: RunConfig, metric: str) -> EarlyStopping:
    return EarlyStopping(
        f"val/{metric}",
        mode=best_mode(metric),
        patience=config.checkpoint.patience or 1,
        min_delta=config.checkpoint.min_delta,
        check_on_train_epoch_end=False,
    )
