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

from flatout.callbacks.flush import Curves, Flush, Listener, MetricsFile, NoProfiler, silence_unused_hooks
from flatout.callbacks.gpu import watched_card
from flatout.callbacks.hardware import Watch
from flatout.callbacks.host import Host
from flatout.callbacks.profile_steps import Profile
from flatout.callbacks.progress_line import ProgressLine
from flatout.callbacks.step_timer import Clock
from flatout.checkpoints.exact import CHECKPOINTS, Checkpoints, best_mode
from flatout.checkpoints.folder import FolderCheckpointIO
from flatout.config import RunConfig
from flatout.data.batches.feed import Feed, free_memory
from flatout.distributed.ranks import Ranks
from flatout.distributed.signals import Signals
from flatout.engine.peaks import known_peak
from flatout.engine.precision import Precision, PrecisionChoice
from flatout.errors import UserError, require
from flatout.report.dashboard import Layout, layout
from flatout.run.resume import Start
from flatout.run.run_folder import RunFolder
from flatout.tasks.metrics import require_metric
from flatout.tasks.step import StepTask

EPOCHS = 8


@dataclass(frozen=True, slots=True)
class Training:
    """A Trainer, and the callbacks that are asked afterwards."""

    trainer: L.Trainer
    flush: Flush
    checkpoints: Checkpoints


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
    mend = "Count batches, or set data.accumulate=1: the clock knows no steps."
    require(not is_timed or accumulate == 1, "trainer.val_check_interval", f"{interval}", mend=mend)
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
    task: StepTask,
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
    watch = watch_of(feed.device, place)
    charts = charts_of(task, watch)
    listeners = listeners_of(config, task, metric, place, after if start is None else start.step, charts)
    clock = Clock()
    clock.watch(config.callbacks)
    flush = Flush(feed, listeners, config.monitor.flush_every, watch, clock)
    checkpoints = Checkpoints(
        place.path / CHECKPOINTS,
        config.checkpoint,
        metric,
        feed=feed,
        batches_in_epoch=batches_in_epoch(config.trainer, feed),
        about=about,
        signals=signals,
        others_draw=bool(config.callbacks),
        clock=clock,
    )
    stopping = [] if config.checkpoint.patience is None else [_early_stopping(config, metric)]
    looking = profile_of(config, feed, flush, place)
    defaults = lightning_defaults(precision, ranks, place)
    # One process a device is running already, however many were asked for.
    settings = {**defaults, **config.trainer, **ranks.lightning_settings(feed.device), **strategy}
    trainer = quiet_trainer(settings, [flush, *looking, *stopping, *config.callbacks.values(), checkpoints])
    silence_unused_hooks(trainer)
    flush.peak = known_peak(feed.device, str(trainer.precision))
    _leave_signals_to_us(trainer)
    return Training(trainer, flush, checkpoints)


def lightning_defaults(precision: PrecisionChoice, ranks: Ranks, place: RunFolder) -> dict[str, Any]:
    """What is set unless a person sets it otherwise: what flatout does itself is off."""
    defaults: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "precision": precision.lightning_name,
        "logger": False,
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
        raise UserError("trainer", str(error), mend="These settings go to Lightning's Trainer.") from None


def listeners_of(
    config: RunConfig,
    task: StepTask,
    metric: str,
    place: RunFolder,
    after: int | None = None,
    charts: Layout | None = None,
) -> list[Listener]:
    """Who is told how training goes, from the step `after` on; on other ranks than the first, nobody."""
    if not place.is_first:
        return []
    return [
        MetricsFile(place.path / "metrics.csv", ["loss", *task.metric_names], is_afresh=not after),
        Curves(place.path, after, charts),
        ProgressLine(task.total_steps, metric, place.log.say, live=config.monitor.progress),
    ]


def charts_of(task: StepTask, watch: Watch) -> Layout:
    """Which curves stand together in TensorBoard."""
    has_card = any(source.name == "gpu" for source in watch.sources)
    return layout(task.metric_names, has_card=has_card)


def profile_of(config: RunConfig, feed: Feed, flush: Flush, place: RunFolder) -> list[Profile]:
    """A close look at some steps of the first rank, where it is asked for."""
    if not (config.monitor.profile.enabled and place.is_first):
        return []
    show = next((each.text for each in flush.listeners if isinstance(each, Curves)), None)
    return [Profile(config.monitor.profile, feed, place.path, place.log.say, show, flush.leave_out)]


def watch_of(device: torch.device, place: RunFolder) -> Watch:
    """The first rank looks at its machine and its card while it trains; the others look at nothing."""
    if not place.is_first:
        return Watch([])
    found = [Host(), watched_card(device)]
    return Watch([source for source in found if source is not None], place.log.say)


def strategy_of(
    config: RunConfig, task: StepTask, device: torch.device, precision: PrecisionChoice, ranks: Ranks, place: RunFolder
) -> dict[str, Any]:
    """How ranks train together, as arguments of Lightning's Trainer: whole copies of the model, or slices of it."""
    asked = config.trainer.get("strategy")
    if not config.shares_weights:
        is_ours = ranks.are_several and asked in (None, "auto", "ddp")
        return {"strategy": ddp(task, device)} if is_ours else {}
    what, mend = "does not go with fp16: its scaler looks at whole gradients", "Set precision=fp32."
    require(precision.precision is not Precision.fp16, f"trainer.strategy: {asked}", what, mend=mend)
    what = "batch normalisation would have other means on every rank"
    require(not _has_means(task), f"trainer.strategy: {asked}", what, mend="Leave it out.")
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


def ddp(task: StepTask, device: torch.device) -> DDPStrategy:
    """Lightning's DDP without a copy of the gradients, and without buffers in each step that never change."""
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    settings: dict[str, Any] = {"gradient_as_bucket_view": True, buffers: _has_means(task)}
    if device.type == "cpu":
        settings["bucket_cap_mb"] = _ONE_BUCKET_MB
    return DDPStrategy(**settings)


def _has_means(task: StepTask) -> bool:
    """Whether there are running means, of batch normalisation; of several ranks' the first one's count."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in task.modules())


def chosen_metric(config: RunConfig, task: StepTask) -> str:
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


def _leave_signals_to_us(trainer: L.Trainer) -> None:
    """Lightning's handlers end a run without a checkpoint, and its ranks wait for each other before every batch."""
    vars(vars(trainer)["_signal_connector"])["register_signal_handlers"] = lambda: None
    vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = lambda: None
