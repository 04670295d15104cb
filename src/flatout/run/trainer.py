"""The Trainer of a run, built once from arguments a reader can see: ours, then the user's own,
which win.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from flatout.callbacks.hardware_monitor import HardwareMonitor, hardware_of
from flatout.callbacks.loggers import RunLoggers, RunPlace, build_loggers
from flatout.callbacks.profile_steps import ProfileSteps
from flatout.callbacks.progress_line import ProgressLine
from flatout.callbacks.run_curves import Listener, MetricsFile, RunCurves
from flatout.callbacks.step_timer import StepTimer
from flatout.callbacks.throughput import FetchTimes
from flatout.checkpoints.exact import ExactCheckpoint
from flatout.checkpoints.folder import FolderCheckpointIO
from flatout.checkpoints.kept import CHECKPOINTS, Start
from flatout.data.batches.feed import Feed, Feeds, free_memory
from flatout.distributed.limits import limits
from flatout.distributed.ranks import Ranks
from flatout.distributed.signals import Signals
from flatout.engine.fast_loop import FastLoop
from flatout.engine.lightning_internals import disable_signal_handling
from flatout.engine.passes import BATCH_NORMS
from flatout.engine.precision import LIGHTNING_NAMES, Precision
from flatout.engine.run_length import EPOCHS
from flatout.errors import UserError, require
from flatout.masking import mask_settings
from flatout.report.dashboard import compared_settings, layout
from flatout.report.summary import hardware
from flatout.run.own_parts import KeepResults
from flatout.run.run_folder import RunFolder
from flatout.run_log import Choice, RunLog

if TYPE_CHECKING:
    from flatout.run.resolve import Settings

_MOST_ROWS = 12  # rows of a step that its message names
_DDP_BF16 = "ddp_bf16"  # DDP whose gradients are sent in bf16: for cards that are joined by PCIe


@dataclass(frozen=True, slots=True)
class Training:
    """A Trainer, and the callbacks that are asked afterwards."""

    trainer: L.Trainer
    curves: RunCurves
    loggers: RunLoggers
    checkpoints: ExactCheckpoint
    loop: FastLoop
    # those of `checkpoint.patience`; callbacks of the user are not among them
    stopping: list[EarlyStopping]


def build_training(
    settings: Settings,
    module: L.LightningModule,
    feeds: Feeds | None,
    device: torch.device,
    ranks: Ranks,
    folder: RunFolder,
    about: dict[str, Any],
    signals: Signals,
    start: Start | None,
) -> Training:
    """Lightning's Trainer with our callbacks, around a task of ours with its feeds or around the
    user's own module.
    """
    config = settings.asked
    after = None if start is None else start.step
    if after is None and config.resume is not None:
        after = 0  # a resumed run may have ended before its first checkpoint
    strategy = choose_strategy(
        settings.trainer.get("strategy"), module, device, settings.precision, ranks, folder
    )
    monitor = HardwareMonitor(
        sources=hardware_of(device) if folder.is_first else [], say=folder.say
    )
    has_card = any(each.name == "gpu" for each in monitor.watch.sources)
    loggers = _build_loggers(settings, module, folder, after, has_card)
    every = config.monitor.flush_every
    listeners = _listeners(settings, module, folder, loggers, not after)
    curves = RunCurves(
        listeners, every, timer=StepTimer(callbacks=config.callbacks), monitor=monitor
    )
    checkpoints = _checkpoints_of(settings, about, signals, folder)
    loop = FastLoop(not_finite=config.optim.not_finite)
    planned: dict[str, Any] = {}
    if feeds is not None:
        accumulate = feeds.train.plan.accumulate
        planned = {
            "accumulate_grad_batches": accumulate,
            "gradient_clip_val": settings.clip or None,
        }
        loop.losses.describe_rows = partial(
            describe_rows, feeds.train, (settings.batches or 1) // accumulate
        )
    arguments = {
        **_lightning_defaults(settings.precision, ranks, folder.path),
        "use_distributed_sampler": isinstance(config.data, L.LightningDataModule),
        "log_every_n_steps": every if settings.batches is None else min(every, settings.batches),
        **settings.trainer,
        **ranks.lightning_settings(device),  # one process a device runs already
        **strategy,
        "logger": loggers.for_trainer(is_first=folder.is_first),
        **planned,
    }
    results = [KeepResults(settings.monitor), FetchTimes()] if config.has_own_parts else []
    asked = config.checkpoint
    stopping = list[EarlyStopping]()
    if asked.patience is not None and settings.monitor is not None:
        least: dict[str, Any] = {"patience": asked.patience, "min_delta": asked.min_delta}
        stopping = [
            EarlyStopping(
                settings.monitor, mode=settings.mode, **least, check_on_train_epoch_end=False
            )
        ]
    profiled = config.monitor.profile
    profile = list[L.Callback]()
    if profiled.enabled and folder.is_first:
        window = {"wait": profiled.wait, "warmup": profiled.warmup, "active": profiled.active}
        profile = [ProfileSteps(**window, folder=folder.path, say=folder.say)]
    callbacks = [
        loop,
        *results,
        curves,
        *profile,
        *stopping,
        *config.callbacks.values(),
        checkpoints,
    ]
    trainer = _quiet_trainer(arguments, callbacks)
    disable_signal_handling(trainer)
    folder.summary.set(
        "hardware", hardware(device, ranks.world, str(trainer.precision)) | limits().facts()
    )
    folder.summary.write()  # the doctor may look before the run has ended
    return Training(trainer, curves, loggers, checkpoints, loop, stopping)


def _checkpoints_of(
    settings: Settings, about: dict[str, Any], signals: Signals, folder: RunFolder
) -> ExactCheckpoint:
    return ExactCheckpoint(
        folder.path / CHECKPOINTS,
        every_steps=settings.asked.checkpoint.every_steps,
        every_minutes=settings.asked.checkpoint.every_minutes,
        monitor=settings.monitor,
        mode=settings.mode,
        min_delta=settings.asked.checkpoint.min_delta,
        about=about,
        signals=signals,
        others_draw=settings.asked.has_own_parts or bool(settings.asked.callbacks),
        log=folder,
    )


def _listeners(
    settings: Settings, module: Any, folder: RunFolder, loggers: RunLoggers, is_new: bool
) -> list[Listener]:
    if not folder.is_first:
        return []
    metric = settings.metric or "loss"
    names = (
        sorted({"loss", metric}) if settings.asked.has_own_parts else ["loss", *module.metric_names]
    )
    file = MetricsFile(folder.path / "metrics.csv", names, is_new=is_new)
    live, steps = settings.asked.monitor.progress, settings.total_steps
    return [
        file,
        loggers,
        ProgressLine(metric=metric, total_steps=steps, say=folder.say, live=live),
    ]


def _build_loggers(
    settings: Settings, module: Any, folder: RunFolder, after: int | None, has_card: bool
) -> RunLoggers:
    """The loggers of the settings, on the first rank; they write from the step `after` on."""
    if not folder.is_first:
        return RunLoggers({})
    place = RunPlace(folder.path, settings.asked.name, after)
    found = build_loggers(settings.asked.logger, place, settings.trainer.get("logger"))
    folder.summary.set("loggers", list(found))
    if settings.asked.has_own_parts:
        return RunLoggers(found, settings=mask_settings(dict(module.hparams)))
    names = [f"val/{name}" for name in ("loss", *module.metric_names)]
    charts = layout(module.metric_names, has_card=has_card)
    return RunLoggers(found, metrics=names, settings=settings_to_compare(settings), charts=charts)


def settings_to_compare(settings: Settings) -> dict[str, Any]:
    """The settings that dashboards compare, with the learning rate that was chosen."""
    return compared_settings(settings.values) | {"optim.lr": settings.optim.highest}


def describe_rows(feed: Feed, steps_an_epoch: int, step: int) -> str:
    """The rows of the table that an optimizer step of the run trains, in words."""
    numbers = feed.rows_of_step(*divmod(step, steps_an_epoch))
    if "rows" in feed.split.columns:
        numbers = feed.split.fixed("rows")[numbers] + 1
    shown = ", ".join(map(str, sorted(numbers.tolist())[:_MOST_ROWS]))
    return f" (rows {shown}{', …' if len(numbers) > _MOST_ROWS else ''} of the table)"


def _lightning_defaults(precision: Choice[Precision], ranks: Ranks, folder: Path) -> dict[str, Any]:
    """What is set unless the user sets it otherwise: what flatout does itself is off."""
    plugins = [FolderCheckpointIO(), *([ranks.environment()] if ranks.are_several else [])]
    off = {"num_sanity_val_steps": 0, "enable_progress_bar": False, "enable_model_summary": False}
    own = {
        "max_epochs": EPOCHS,
        "precision": LIGHTNING_NAMES[precision.value],
        "default_root_dir": str(folder),
    }
    return {**own, **off, "plugins": plugins}


def _quiet_trainer(settings: dict[str, Any], callbacks: list[L.Callback]) -> L.Trainer:
    """Lightning's Trainer, without its own messages; what it refuses is a user's mistake."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return L.Trainer(**settings, callbacks=callbacks)
    except (
        TypeError,
        ValueError,
        L.pytorch.utilities.exceptions.MisconfigurationException,
    ) as error:
        raise UserError(
            "trainer", str(error), hint="These settings go to Lightning's Trainer."
        ) from None


def choose_strategy(
    asked: Any,
    module: nn.Module,
    device: torch.device,
    precision: Choice[Precision],
    ranks: Ranks,
    log: RunLog,
) -> dict[str, Any]:
    """How ranks train together, as arguments of Lightning's Trainer: whole copies of the model, or
    slices of it.
    """
    if asked != "fsdp":
        compresses = asked == _DDP_BF16
        if compresses:
            require(
                device.type == "cuda",
                f"trainer.strategy: {asked}",
                "gradients are sent in bf16 between GPUs alone",
                hint="Set trainer.strategy=ddp.",
            )
            log.decision(
                "gradients between devices",
                "bf16",
                "asked for",
                "half the traffic of fp32, rounded",
            )
        if ranks.are_several and asked in (None, "auto", "ddp", _DDP_BF16):
            return {"strategy": ddp(module, device, compresses=compresses)}
        return {"strategy": "auto"} if compresses else {}
    what, hint = "does not go with fp16: its scaler looks at whole gradients", "Set precision=fp32."
    require(precision.value is not Precision.fp16, f"trainer.strategy: {asked}", what, hint=hint)
    require(
        not _has_means(module),
        f"trainer.strategy: {asked}",
        "batch normalisation would have other means on every rank",
        hint="Leave it out.",
    )
    from flatout.engine.fsdp import SharedOut

    # A trained weight comes with its gradient and with two numbers of AdamW.
    megabytes = (
        sum(weight.nbytes * (4 if weight.requires_grad else 1) for weight in module.parameters())
        / 1e6
    )
    evidence = (
        f"with gradients and AdamW {megabytes / ranks.world:,.1f} MB a device instead of"
        f" {megabytes:,.1f}"
    )
    log.decision("weights", f"1/{ranks.world} on each device", "trainer.strategy=fsdp", evidence)
    ranks_here = 1 if device.type == "cuda" else ranks.local_world
    if 2e6 * megabytes * ranks_here < (free := free_memory(device)):
        whole = f"whole ones would take less than half of the free {free / 1e9:,.1f} GB"
        log.say(f"weights: {whole}; trainer.strategy=auto keeps them so and sends less")
    # Weights that were gathered in inference mode could not be trained afterwards.
    return {"strategy": SharedOut(ranks.world), "inference_mode": False}


def ddp(module: nn.Module, device: torch.device, *, compresses: bool) -> DDPStrategy:
    """Lightning's DDP without a copy of the gradients, and without buffers in each step that never
    change.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    settings: dict[str, Any] = {"gradient_as_bucket_view": True, buffers: _has_means(module)}
    # what exchanges gradients takes its cores from what computes them: it waits for all
    if device.type == "cpu":
        settings["bucket_cap_mb"] = 1 << 14
    if compresses:
        settings["ddp_comm_hook"] = bf16_compress_hook
    return DDPStrategy(**settings)


def _has_means(module: nn.Module) -> bool:
    """Whether there are running means, of batch normalisation; of several ranks' the first one's
    count.
    """
    return any(isinstance(layer, BATCH_NORMS) for layer in module.modules())
