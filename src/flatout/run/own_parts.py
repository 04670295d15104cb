"""A run of the user's own LightningModule, with the user's own DataModule or one of flatout.

The fast loop, exact checkpoints, curves, loggers, the verdict and the report serve any module. Flatout does not know
its answers: there is no `model/` folder, no calibration and no table of classes, and `tune` measures nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping

from flatout.callbacks.loggers import RunLoggers, RunPlace, build_loggers
from flatout.callbacks.progress_line import ProgressLine
from flatout.callbacks.run_curves import Listener, MetricsFile, RunCurves
from flatout.callbacks.step_timer import StepTimer
from flatout.callbacks.throughput import Throughput
from flatout.checkpoints.exact import ExactCheckpoint
from flatout.checkpoints.kept import CHECKPOINTS, Start
from flatout.checkpoints.same_run import facts_of_run
from flatout.distributed.ranks import Ranks, end_group
from flatout.distributed.signals import Signals
from flatout.engine.fast_loop import FastLoop
from flatout.engine.lightning_internals import disable_signal_handling
from flatout.engine.limits import limits
from flatout.engine.precision import PrecisionChoice
from flatout.errors import UserError, require
from flatout.perf.verdict.collect import evidence_of_own
from flatout.perf.verdict.evidence import LEAST_STEPS
from flatout.perf.verdict.rules import verdict
from flatout.report.closing import print_closing
from flatout.report.page import read_curves, write_page
from flatout.report.summary import choice_of, hardware
from flatout.run import trainer as trainers
from flatout.run.build import RunBuilder
from flatout.run.closing import summarise_speed
from flatout.run.own_settings import OwnSettings
from flatout.run.resume import length_of
from flatout.run.run_folder import RunFolder, folder_of_one, open_run_folder
from flatout.run.stages import (
    Result,
    fit_to_end,
    load_best,
    restore_threads,
    share_processor,
    where_to_start,
    without_loader_advice,
)
from flatout.run.trainer import Training

_LOWER_IS_BETTER = ("loss", "error", "mae", "mse", "rmse", "perplexity")


def run_own_parts(build: RunBuilder, path: Path, *, overrides: Sequence[str] = (), number: int = 0) -> Result:
    """One run of the user's own module, from its settings to its report."""
    started, ranks, settings = time.perf_counter(), Ranks.here(), build.own_settings
    title = build.title(overrides)
    before = choice_of(path, "precision") if build.is_resumed else None
    with (
        Signals() as signals,
        folder_of_one(path) if ranks.is_first else nullcontext(),
        open_run_folder(path, title, is_first=ranks.is_first, is_again=build.is_resumed) as folder,
        restore_threads(),
    ):
        device = ranks.device(build.accelerator, number)
        share_processor(build, ranks, device, folder)
        precision = build.choose_precision(device, ranks, folder, before)
        about = _about(build.settings, settings, precision, ranks)
        start = where_to_start(build, about, ranks, folder)
        training = _build_training(settings, ranks, device, precision, folder, about, signals, start)
        _report_parts(settings, ranks, folder)
        ranks.join(device)
        with training.loggers:
            fit_to_end(training, settings.module, settings.data, folder, signals, start)
            load_best(training, settings.module)
            metrics = _evaluate(training.trainer, settings)
            training.loggers.log_final(metrics, training.curves.steps)
        end_group()
        seconds = training.checkpoints.seconds_before + time.perf_counter() - started
        if ranks.is_first:
            _summarise(folder, settings, training, device, metrics, seconds)
            _report(folder)
    values = folder.summary.values
    return Result(path, metrics, [], NoAnswers(settings.name_of_module), values, values["metric"] or "loss")


def _about(composed: dict[str, Any], settings: OwnSettings, precision: PrecisionChoice, ranks: Ranks) -> dict[str, Any]:
    """What a resumed run is compared with; `composed`: all settings as plain values."""
    plan = {"devices": ranks.world} if settings.has_own_data else {}
    return facts_of_run(composed, None, settings.module, plan, precision.lightning_name, length_of(composed))


def _build_training(
    settings: OwnSettings,
    ranks: Ranks,
    device: torch.device,
    precision: PrecisionChoice,
    folder: RunFolder,
    about: dict[str, Any],
    signals: Signals,
    start: Start | None,
) -> Training:
    """The plain Trainer with our callbacks around the user's module."""
    loggers, loop = _build_loggers(settings, folder, start), FastLoop(not_finite=settings.not_finite)
    metric, kept = settings.checkpoint.metric, settings.checkpoint
    listeners = _listeners(settings, folder, loggers, is_new=start is None)
    timer, throughput = StepTimer(callbacks=settings.callbacks), Throughput()
    monitor = trainers.build_monitor(device, folder)
    curves = RunCurves(listeners, settings.flush_every, timer=timer, throughput=throughput, monitor=monitor)
    checkpoints = ExactCheckpoint(
        folder.path / CHECKPOINTS,
        every_steps=kept.every_steps,
        every_minutes=kept.every_minutes,
        monitor=metric,
        mode=_mode_of(metric or ""),
        min_delta=kept.min_delta,
        about=about,
        signals=signals,
        log=folder,
    )
    given = {
        **trainers.lightning_defaults(precision, ranks, folder.path),
        "use_distributed_sampler": settings.has_own_data,
        "log_every_n_steps": settings.flush_every,
        **settings.trainer,
        **ranks.lightning_settings(device),
        **trainers.choose_strategy(settings.trainer, settings.module, device, precision, ranks, folder),
        "logger": loggers.for_trainer(is_first=ranks.is_first),
    }
    profile = trainers.build_profile(settings.profile, folder)
    stopping = [] if metric is None or kept.patience is None else [_stopping(metric, settings)]
    own = settings.callbacks.values()
    trainer = trainers.quiet_trainer(given, [loop, _Results(metric), curves, *profile, *stopping, *own, checkpoints])
    disable_signal_handling(trainer)
    folder.summary.update("hardware", hardware(device, ranks.world, str(trainer.precision)) | limits().facts())
    return Training(trainer, curves, loggers, checkpoints, loop, stopping)


def _listeners(settings: OwnSettings, folder: RunFolder, loggers: RunLoggers, *, is_new: bool) -> list[Listener]:
    """What receives the curves; nothing on ranks after the first."""
    if not folder.is_first:
        return []
    metric = settings.checkpoint.metric
    name = _plain_name(metric, "val") if metric else "loss"
    file = MetricsFile(folder.path / "metrics.csv", sorted({"loss", name}), is_new=is_new)
    return [file, _Curves(loggers), ProgressLine(metric=name, say=folder.say, live=settings.progress)]


def _build_loggers(settings: OwnSettings, folder: RunFolder, start: Start | None) -> RunLoggers:
    if not folder.is_first:
        return RunLoggers({})
    place = RunPlace(folder.path, settings.name, None if start is None else start.step)
    found = build_loggers(settings.logger, place, settings.trainer.get("logger"))
    folder.summary.set("loggers", list(found))
    return RunLoggers(found, settings=dict(settings.module.hparams))


def _stopping(metric: str, settings: OwnSettings) -> EarlyStopping:
    kept = settings.checkpoint
    return EarlyStopping(
        metric,
        mode=_mode_of(metric),
        patience=kept.patience or 1,
        min_delta=kept.min_delta,
        check_on_train_epoch_end=False,
    )


def _report_parts(settings: OwnSettings, ranks: Ranks, folder: RunFolder) -> None:
    names = f"{settings.name_of_module} with {type(settings.data).__name__}"
    folder.say(f"own parts: {names}; tune, model/, calibration and the table of classes do not serve them")
    if ranks.are_several:
        folder.say("own parts: metrics of all devices need self.log(…, sync_dist=True); others are the first device's")
    if settings.checkpoint.metric is None:
        folder.say(
            "own parts: checkpoint.metric is not set: the last weights are evaluated, and nothing ends training early;"
            " set it to a name that your validation_step logs"
        )


def _evaluate(trainer: L.Trainer, settings: OwnSettings) -> dict[str, float]:
    """What the module logs on the validation rows, and on the test rows where it has both step and loader."""
    found: dict[str, float] = {}
    module, data = settings.module, settings.data
    for split, hook in (("val", "validation_step"), ("test", "test_step")):
        has_step = getattr(type(module), hook) is not getattr(L.LightningModule, hook)
        loader = f"{split}_dataloader"
        if not (has_step and getattr(type(data), loader) is not getattr(L.LightningDataModule, loader)):
            continue
        judge = trainer.validate if split == "val" else trainer.test
        with without_loader_advice():
            for each in judge(module, datamodule=data, verbose=False):
                found |= {f"{split}/{_plain_name(name, split)}": float(value) for name, value in each.items()}
    return found


def _summarise(
    folder: RunFolder,
    settings: OwnSettings,
    training: Training,
    device: torch.device,
    metrics: dict[str, float],
    seconds: float,
) -> None:
    summary, curves, trainer = folder.summary, training.curves, training.trainer
    summary.update("data", {"source": type(settings.data).__name__})
    summary.update("metrics", metrics)
    chosen = settings.checkpoint.metric
    names = [name.removeprefix("val/") for name in metrics if name.startswith("val/")]
    summary.set("metric", _plain_name(chosen, "val") if chosen else next(iter(sorted(names, key="loss".__ne__)), None))
    rows = curves.throughput.total.rows / max(1, trainer.global_step)
    summarise_speed(folder, settings.module, training, seconds, rows_per_step=round(rows))
    batches = curves.throughput.total.batches / max(1, float(trainer.num_training_batches))
    evidence = evidence_of_own(curves, device, str(trainer.precision), batches)
    if evidence is None:
        folder.say(f"verdict: none, a verdict needs {LEAST_STEPS} steps")
        return
    summary.update("evidence", evidence.as_dict())
    summary.update("verdict", verdict(evidence))


def _report(folder: RunFolder) -> None:
    values = {**folder.summary.values, "status": "finished"}
    write_page(folder.path, values, read_curves(folder.path), [])
    artifacts = {"checkpoints": CHECKPOINTS, "page": "report.html", "curves": "metrics.csv"}
    folder.summary.update("artifacts", artifacts)
    print_closing(values, folder.path, [])


def _plain_name(name: str, split: str) -> str:
    """The name of a metric without its split: `val_loss` and `val/loss` are `loss`."""
    return name.removeprefix(split).lstrip("/_") or name


def _mode_of(metric: str) -> str:
    return "min" if any(word in metric.lower() for word in _LOWER_IS_BETTER) else "max"


class _Results(L.Callback):
    """Keeps what the module logged in a validation where the curves look for it."""

    def __init__(self, metric: str | None) -> None:
        self.metric = metric

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        known = trainer.callback_metrics
        hint = "Log it in validation_step, or name another."
        is_logged = self.metric is None or self.metric in known
        require(is_logged, "checkpoint.metric", f"{self.metric!r} is not logged", allowed=", ".join(known), hint=hint)
        logged = {name: value for name, value in known.items() if name.startswith("val")}
        vars(pl_module)["results"] = {_plain_name(name, "val"): float(value) for name, value in logged.items()}


class _Curves:
    """The loggers without the metrics of validations, which Lightning logs as the module names them."""

    def __init__(self, loggers: RunLoggers) -> None:
        self.loggers = loggers

    def on_flush(self, step: int, epoch: float, values: dict[str, float]) -> None:
        self.loggers.on_flush(step, epoch, values)

    def on_validation(self, step: int, epoch: float, values: dict[str, float]) -> None:
        return

    def close(self) -> None:
        return


class NoAnswers:
    """Flatout does not know what the module's answers mean."""

    def __init__(self, name: str) -> None:
        self.name = name

    def predict(self, rows: Sequence[Any]) -> list[Any]:
        raise UserError("predict", f"{self.name} is your own", hint="Use trainer.predict in a script of your own.")

    def save(self, folder: Path, model_config: Any) -> None:
        self.predict([])
