"""Build the Trainer of a run, once, from arguments a reader can see.

Later arguments win: flatout's defaults, those of the settings, then what only the run knows, such
as ranks, strategy and loggers. The callbacks are the fast loop, those of the run's parts, curves,
the profiler, early stopping, those of the settings, and checkpoints. Whatever only reads curves is
a `Listener` (`_build_listeners`), which the first rank alone has; a callback runs on every rank.
Open this file to add either to every run.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

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
from flatout.checkpoints.exact import ExactCheckpoint
from flatout.checkpoints.folder import FolderCheckpointIO
from flatout.checkpoints.kept import CHECKPOINTS, Start
from flatout.distributed.limits import limits
from flatout.distributed.ranks import Ranks
from flatout.distributed.signals import Signals
from flatout.engine.fast_loop import FastLoop
from flatout.engine.lightning_internals import disable_signal_handling
from flatout.engine.precision import LIGHTNING_NAMES, Precision
from flatout.engine.run_length import EPOCHS
from flatout.errors import UserError
from flatout.price.settings import Target
from flatout.report.summary import hardware
from flatout.run.context import Run, Settings, Training
from flatout.run.run_folder import FolderWatch, RunFolder
from flatout.run.strategy import choose_strategy
from flatout.run_log import Choice


def build_training(run: Run, signals: Signals, start: Start | None) -> Training:
    """Lightning's Trainer with our callbacks; `start`: the checkpoint to resume from.

    The hardware is written into the run's summary.
    """
    settings = run.settings
    config = settings.asked
    folder = run.folder
    asked = settings.trainer.get("strategy")
    strategy = choose_strategy(asked, run.parts.module, settings.precision.value, run)
    resumed_from = None if start is None else start.step
    if resumed_from is None and config.resume is not None:
        resumed_from = 0  # a resumed run may have ended before its first checkpoint
    monitor = HardwareMonitor(
        sources=hardware_of(run.device) if folder.is_first else [], say=folder.say
    )
    has_card = any(source.name == "gpu" for source in monitor.watch.sources)
    loggers = _build_loggers(run, resumed_from, has_card=has_card)
    is_new = not resumed_from  # a run that is resumed at step 0 has no curves to continue either
    curves = RunCurves(
        _build_listeners(run, loggers, is_new=is_new),
        config.monitor.flush_every,
        timer=StepTimer(callbacks=config.callbacks),
        monitor=monitor,
    )
    for listener in curves.listeners:
        if isinstance(listener, ProgressLine):
            curves.each_second.append(listener.show_step)
    loop = FastLoop(not_finite=config.optim.not_finite, graph=config.graph)
    checkpoints = _build_checkpoints(run, signals)
    stopping = _build_stopping(settings)
    callbacks = [
        loop,
        *run.parts.callbacks(settings),
        curves,
        *_build_profiler(settings, folder),
        *stopping,
        *config.callbacks.values(),
        checkpoints,  # Lightning moves checkpoints behind all others anyway
    ]
    arguments = {
        **_trainer_arguments(run),
        **strategy,
        "logger": loggers.for_trainer(is_first=folder.is_first),
        **run.parts.trainer_arguments(settings),
    }
    trainer = _build_quiet_trainer(arguments, callbacks)
    disable_signal_handling(trainer)
    run.parts.connect(run, loop, curves)
    facts = hardware(run.device, run.ranks.world, str(trainer.precision))
    folder.summary.set("hardware", facts | limits().facts())
    folder.summary.write()  # the doctor may look before the run has ended
    return Training(trainer, curves, loggers, checkpoints, loop, stopping)


def _build_checkpoints(run: Run, signals: Signals) -> ExactCheckpoint:
    """The callback that saves checkpoints; the run's facts are kept in each, to compare."""
    settings = run.settings
    asked = settings.asked
    return ExactCheckpoint(
        run.folder.path / CHECKPOINTS,
        every_steps=asked.checkpoint.every_steps,
        every_minutes=asked.checkpoint.every_minutes,
        monitor=settings.monitor,
        mode=settings.mode,
        min_delta=asked.checkpoint.min_delta,
        about=run.facts,
        signals=signals,
        others_draw=run.parts.may_draw or bool(asked.callbacks),
        log=run.folder,
    )


def _trainer_arguments(run: Run) -> dict[str, Any]:
    """Our defaults, then those of the settings, then those of the ranks; later ones win."""
    settings = run.settings
    config = settings.asked
    flush_every = config.monitor.flush_every
    if settings.batches is not None:
        flush_every = min(flush_every, settings.batches)
    return {
        **_default_arguments(settings.precision, run.ranks, run.folder.path),
        # feeds of ours divide their rows among ranks on their own
        "use_distributed_sampler": isinstance(config.data, L.LightningDataModule),
        "log_every_n_steps": flush_every,
        **settings.trainer,
        # one process a device runs already
        **run.ranks.lightning_settings(run.device),
    }


def _default_arguments(precision: Choice[Precision], ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Arguments that settings may change; what flatout does itself is off.

    With `trainer.plugins` the callback of checkpoints sets how they are written (`route_folders`).
    """
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


def _build_stopping(settings: Settings) -> list[EarlyStopping]:
    """Early stopping by `checkpoint.patience`, and where `until` is reached."""
    checkpoint = settings.asked.checkpoint
    until = settings.asked.until
    target = None if until is None else Target.of(until)
    patience_of: dict[str, int] = {}  # by the metric that is watched
    if target is not None:
        patience_of[f"val/{target.metric}"] = sys.maxsize
    if checkpoint.patience is not None and settings.monitor is not None:
        patience_of[settings.monitor] = checkpoint.patience
    stopping = []
    for monitor, patience in patience_of.items():
        is_target = target is not None and monitor == f"val/{target.metric}"
        stopper = EarlyStopping(
            monitor,
            mode=checkpoint.mode_of(monitor.removeprefix("val/")),
            patience=patience,
            min_delta=checkpoint.min_delta,
            stopping_threshold=target.value if target is not None and is_target else None,
            check_on_train_epoch_end=False,
        )
        stopping.append(stopper)
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


def _build_listeners(run: Run, loggers: RunLoggers, *, is_new: bool) -> list[Listener]:
    """Who gets the curves: `metrics.csv`, loggers and the progress line, on the first rank."""
    folder = run.folder
    if not folder.is_first:
        return []
    settings = run.settings
    names = run.parts.curve_names(settings)
    progress = ProgressLine(
        metric=settings.metric or "loss",
        total_steps=settings.total_steps,
        say=folder.say,
        live=settings.asked.monitor.progress,
    )
    curves = MetricsFile(folder.path / "metrics.csv", names, is_new=is_new)
    # The watch is first: it ends a run whose folder is gone, before others write into it again.
    return [FolderWatch(folder.path), curves, loggers, progress]


def _build_loggers(run: Run, resumed_from: int | None, *, has_card: bool) -> RunLoggers:
    """The loggers of the settings, on the first rank."""
    folder = run.folder
    if not folder.is_first:
        return RunLoggers({})
    settings = run.settings
    place = RunPlace(folder.path, settings.asked.name, resumed_from)
    loggers = build_loggers(settings.asked.logger, place, settings.trainer.get("logger"))
    folder.summary.set("loggers", list(loggers))
    return run.parts.wrap_loggers(loggers, run, has_card=has_card)


def _build_quiet_trainer(arguments: dict[str, Any], callbacks: list[L.Callback]) -> L.Trainer:
    """Lightning's Trainer, without its own messages; what it refuses is a user's mistake.

    The cause stays with the error: from Python a defect of ours in an argument has its traceback.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Lightning checks few of its arguments. So settings of the right type fail somewhere inside:
    # max_time=3 is an AttributeError, {days: inf} an OverflowError, accelerator=tpu an ImportError.
    try:
        return L.Trainer(**arguments, callbacks=callbacks)
    except (
        ArithmeticError,
        AttributeError,
        ImportError,
        MisconfigurationException,
        TypeError,
        ValueError,
    ) as error:
        raise UserError(
            "trainer", str(error), hint="These settings go to Lightning's Trainer."
        ) from error
