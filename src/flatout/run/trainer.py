"""Build the Trainer of a run, once, from arguments a reader can see.

The arguments are flatout's, then those of the settings, which win, then what only the run knows:
ranks, strategy, loggers, accumulation. Its callbacks are the fast loop, curves, checkpoints and the
user's own. Open this file to add a callback to every run.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from flatout.callbacks.hardware_monitor import HardwareMonitor
from flatout.callbacks.hardware_watch import hardware_of
from flatout.callbacks.loggers import RunLoggers, RunPlace, build_loggers
from flatout.callbacks.profile_steps import ProfileSteps
from flatout.callbacks.progress_line import ProgressLine
from flatout.callbacks.run_curves import Listener, MetricsFile, RunCurves
from flatout.callbacks.step_timer import StepTimer
from flatout.callbacks.throughput import FetchTimes
from flatout.checkpoints.exact import ExactCheckpoint
from flatout.checkpoints.folder import FolderCheckpointIO
from flatout.checkpoints.kept import CHECKPOINTS, Start
from flatout.data.batches.feed import Feed
from flatout.distributed.limits import limits
from flatout.distributed.ranks import Ranks
from flatout.distributed.signals import Signals
from flatout.engine.fast_loop import FastLoop
from flatout.engine.lightning_internals import disable_signal_handling
from flatout.engine.precision import LIGHTNING_NAMES, Precision
from flatout.engine.run_length import EPOCHS
from flatout.errors import UserError
from flatout.masking import mask_settings
from flatout.price.settings import Target
from flatout.report.dashboard import compared_settings, layout
from flatout.report.summary import hardware
from flatout.run.context import OurParts, RunContext, RunParts
from flatout.run.own_parts import KeepResults
from flatout.run.run_folder import RunFolder
from flatout.run.strategy import choose_strategy
from flatout.run_log import Choice

if TYPE_CHECKING:
    from flatout.run.resolve import Settings

_MOST_ROWS = 12  # rows of a step that its message names


@dataclass(frozen=True, slots=True)
class Training:
    """A Trainer, and the callbacks that later stages ask."""

    trainer: L.Trainer
    curves: RunCurves
    loggers: RunLoggers
    checkpoints: ExactCheckpoint
    loop: FastLoop
    stopping: list[EarlyStopping]  # of `checkpoint.patience`; the user's own are not among them


def build_training(
    settings: Settings,
    parts: RunParts,
    context: RunContext,
    checkpoints: ExactCheckpoint,
    start: Start | None,
) -> Training:
    """Lightning's Trainer with our callbacks, for our task or for the user's own module."""
    config = settings.asked
    folder = context.folder
    asked = settings.trainer.get("strategy")
    strategy = choose_strategy(asked, parts.module, settings.precision.value, context)
    resumed_from = None if start is None else start.step
    if resumed_from is None and config.resume is not None:
        resumed_from = 0  # a resumed run may have ended before its first checkpoint
    monitor = HardwareMonitor(
        sources=hardware_of(context.device) if folder.is_first else [], say=folder.say
    )
    has_card = any(source.name == "gpu" for source in monitor.watch.sources)
    loggers = _build_loggers(settings, parts, folder, resumed_from, has_card)
    curves = RunCurves(
        _build_listeners(settings, parts, folder, loggers, is_new=not resumed_from),
        config.monitor.flush_every,
        timer=StepTimer(callbacks=config.callbacks),
        monitor=monitor,
    )
    for listener in curves.listeners:
        if isinstance(listener, ProgressLine):
            curves.show_step = listener.show_step
    loop = FastLoop(not_finite=config.optim.not_finite, graph=config.graph)
    if parts.ours is not None:
        feed = parts.ours.feeds.train
        steps_an_epoch = (settings.batches or 1) // feed.plan.accumulate
        loop.losses.describe_rows = partial(describe_rows, feed, steps_an_epoch)
    stopping = _build_stopping(settings)
    callbacks = [
        loop,
        *_callbacks_of_own_parts(settings),
        curves,
        *_build_profiler(settings, folder),
        *stopping,
        *config.callbacks.values(),
        checkpoints,
    ]
    arguments = {
        **_trainer_arguments(settings, parts, context),
        **strategy,
        "logger": loggers.for_trainer(is_first=folder.is_first),
        **_planned_arguments(settings, parts.ours),
    }
    trainer = _build_quiet_trainer(arguments, callbacks)
    disable_signal_handling(trainer)
    facts = hardware(context.device, context.ranks.world, str(trainer.precision))
    folder.summary.set("hardware", facts | limits().facts())
    folder.summary.write()  # the doctor may look before the run has ended
    return Training(trainer, curves, loggers, checkpoints, loop, stopping)


def build_checkpoints(
    settings: Settings, facts: dict[str, Any], signals: Signals, folder: RunFolder
) -> ExactCheckpoint:
    """The callback that saves checkpoints; `facts` are kept in each, to compare on resuming."""
    asked = settings.asked
    return ExactCheckpoint(
        folder.path / CHECKPOINTS,
        every_steps=asked.checkpoint.every_steps,
        every_minutes=asked.checkpoint.every_minutes,
        monitor=settings.monitor,
        mode=settings.mode,
        min_delta=asked.checkpoint.min_delta,
        about=facts,
        signals=signals,
        others_draw=asked.has_own_parts or bool(asked.callbacks),
        log=folder,
    )


def _trainer_arguments(settings: Settings, parts: RunParts, context: RunContext) -> dict[str, Any]:
    """Ours, then those of the settings, which win, then how many processes there are."""
    config = settings.asked
    flush_every = config.monitor.flush_every
    if settings.batches is not None:
        flush_every = min(flush_every, settings.batches)
    return {
        **_default_arguments(settings.precision, context.ranks, context.folder.path),
        # feeds of ours divide their rows among ranks on their own
        "use_distributed_sampler": isinstance(config.data, L.LightningDataModule),
        "log_every_n_steps": flush_every,
        **settings.trainer,
        # one process a device runs already
        **context.ranks.lightning_settings(context.device),
    }


def _default_arguments(precision: Choice[Precision], ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Arguments that settings may change; what flatout does itself is off."""
    plugins: list[Any] = [FolderCheckpointIO()]
    if ranks.are_several:
        plugins.append(ranks.environment())
    return {
        "max_epochs": EPOCHS,
        "precision": LIGHTNING_NAMES[precision.value],
        "default_root_dir": str(folder),
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "plugins": plugins,
    }


def _planned_arguments(settings: Settings, ours: OurParts | None) -> dict[str, Any]:
    """How long a step of ours accumulates, and where its gradient is cut."""
    if ours is None:
        return {}
    return {
        "accumulate_grad_batches": ours.feeds.train.plan.accumulate,
        "gradient_clip_val": settings.clip or None,
    }


def _build_stopping(settings: Settings) -> list[EarlyStopping]:
    """Early stopping by `checkpoint.patience`, and where `until` is reached."""
    checkpoint = settings.asked.checkpoint
    until = settings.asked.until
    target = None if until is None else Target.of(until)
    patience: dict[str, int] = {}  # by the metric that is watched
    if target is not None:
        patience[f"val/{target.metric}"] = sys.maxsize
    if checkpoint.patience is not None and settings.monitor is not None:
        patience[settings.monitor] = checkpoint.patience
    stopping = []
    for monitor, most in patience.items():
        is_target = target is not None and monitor == f"val/{target.metric}"
        one = EarlyStopping(
            monitor,
            mode=checkpoint.mode_of(monitor.removeprefix("val/")),
            patience=most,
            min_delta=checkpoint.min_delta,
            stopping_threshold=target.value if target is not None and is_target else None,
            check_on_train_epoch_end=False,
        )
        stopping.append(one)
    return stopping


def _build_profiler(settings: Settings, folder: RunFolder) -> list[L.Callback]:
    profile = settings.asked.monitor.profile
    if not profile.enabled or not folder.is_first:
        return []
    profiler = ProfileSteps(
        wait=profile.wait,
        warmup=profile.warmup,
        active=profile.active,
        folder=folder.path,
        say=folder.say,
    )
    return [profiler]


def _callbacks_of_own_parts(settings: Settings) -> list[L.Callback]:
    """What a task and a feed of ours would do themselves."""
    if not settings.asked.has_own_parts:
        return []
    return [KeepResults(settings.monitor), FetchTimes()]


def _build_listeners(
    settings: Settings,
    parts: RunParts,
    folder: RunFolder,
    loggers: RunLoggers,
    *,
    is_new: bool,
) -> list[Listener]:
    """Who gets the curves: `metrics.csv`, loggers and the progress line, on the first rank."""
    if not folder.is_first:
        return []
    metric = settings.metric or "loss"
    if parts.ours is None:
        names = sorted({"loss", metric})
    else:
        names = ["loss", *parts.ours.task.all_metric_names]
    progress = ProgressLine(
        metric=metric,
        total_steps=settings.total_steps,
        say=folder.say,
        live=settings.asked.monitor.progress,
    )
    return [MetricsFile(folder.path / "metrics.csv", names, is_new=is_new), loggers, progress]


def _build_loggers(
    settings: Settings,
    parts: RunParts,
    folder: RunFolder,
    resumed_from: int | None,
    has_card: bool,
) -> RunLoggers:
    """The loggers of the settings, on the first rank."""
    if not folder.is_first:
        return RunLoggers({})
    place = RunPlace(folder.path, settings.asked.name, resumed_from)
    loggers = build_loggers(settings.asked.logger, place, settings.trainer.get("logger"))
    folder.summary.set("loggers", list(loggers))
    if parts.ours is None:
        return RunLoggers(loggers, settings=mask_settings(dict(parts.module.hparams)))
    metric_names = parts.ours.task.all_metric_names
    return RunLoggers(
        loggers,
        metrics=[f"val/{name}" for name in ("loss", *metric_names)],
        settings=settings_to_compare(settings),
        charts=layout(metric_names, has_card=has_card),
    )


def settings_to_compare(settings: Settings) -> dict[str, Any]:
    """The settings that dashboards compare, with the learning rate that was chosen."""
    return compared_settings(settings.values) | {"optim.lr": settings.optim.highest}


def describe_rows(feed: Feed, steps_an_epoch: int, step: int) -> str:
    """The rows that an optimizer step trains, in words: ` (rows 12, 80 of the table)`.

    At most twelve are named, in order.
    """
    epoch, step_of_epoch = divmod(step, steps_an_epoch)
    numbers = feed.rows_of_step(epoch, step_of_epoch)
    if "rows" in feed.split.columns:
        numbers = feed.split.fixed("rows")[numbers] + 1
    named = sorted(numbers.tolist())[:_MOST_ROWS]
    rest = ", …" if len(numbers) > _MOST_ROWS else ""
    return f" (rows {', '.join(map(str, named))}{rest} of the table)"


def _build_quiet_trainer(arguments: dict[str, Any], callbacks: list[L.Callback]) -> L.Trainer:
    """Lightning's Trainer, without its own messages; what it refuses is a user's mistake."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return L.Trainer(**arguments, callbacks=callbacks)
    except (TypeError, ValueError, MisconfigurationException) as error:
        raise UserError(
            "trainer", str(error), hint="These settings go to Lightning's Trainer."
        ) from None


@contextmanager
def without_lightning_advice() -> Iterator[None]:
    """Inside it Lightning gives no advice that does not hold here.

    Feeds need no DataLoader workers, metrics are shared among ranks already, and a run resumes into
    a folder that holds checkpoints.
    """
    advice = (
        ".*does not have many workers.*",
        ".*recommended to use `self.log.*sync_dist=True.*",
        ".*isinstance.treespec, LeafSpec.*",
        ".*Checkpoint directory.*exists and is not empty.*",
        ".*smaller than the logging interval.*",
        ".*Be aware that when using `ckpt_path`.*",
    )
    with warnings.catch_warnings():
        for pattern in advice:
            warnings.filterwarnings("ignore", message=pattern)
        yield
