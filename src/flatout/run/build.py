"""Build the parts of a run from its settings. Only this module reads `RunConfig`: each part gets what it needs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn

from flatout.callbacks.loggers import RunLoggers, RunPlace, build_loggers
from flatout.callbacks.progress_line import ProgressLine
from flatout.callbacks.run_curves import Listener, MetricsFile, RunCurves
from flatout.callbacks.step_timer import StepTimer
from flatout.callbacks.throughput import Throughput
from flatout.checkpoints.exact import ExactCheckpoint
from flatout.checkpoints.kept import CHECKPOINTS, Start
from flatout.checkpoints.settings import best_mode
from flatout.config import RunConfig
from flatout.data.batches.feed import Feeds
from flatout.data.batches.plan import Layout
from flatout.data.plans import Placement
from flatout.data.store_data import StoreData
from flatout.distributed.ranks import Ranks
from flatout.distributed.signals import Signals
from flatout.engine.compile import is_compiled
from flatout.engine.fast_loop import FastLoop
from flatout.engine.lightning_internals import disable_signal_handling
from flatout.engine.optimizer import ScaleRate
from flatout.engine.precision import Precision, PrecisionChoice, choose_precision
from flatout.engine.run_length import batches_in_epoch, whole_steps
from flatout.errors import UserError
from flatout.models.contract import Recommended
from flatout.perf.tune.probe import Parts
from flatout.perf.tune.prober import Child
from flatout.perf.tune.settings import TuneConfig, is_typed
from flatout.perf.tune.tuning import Question, RunSettings, of_all_devices, override_line
from flatout.perf.verdict.judge import Judging
from flatout.report.dashboard import compared_settings, layout
from flatout.report.summary import plain, read_summary
from flatout.run import trainer as trainers
from flatout.run.compiling import compile_network
from flatout.run.confirmed import find_confirmed
from flatout.run.kinds import Kind, kind_of
from flatout.run.learning_rate import set_rate
from flatout.run.model_memory import require_memory
from flatout.run.own_settings import OwnSettings
from flatout.run.resume import RunRequest
from flatout.run.run_folder import RunFolder, RunTitle, unwritten_run
from flatout.run.trainer import Training
from flatout.run_log import RunLog
from flatout.tasks.metrics import require_metric
from flatout.tasks.networks import report_network
from flatout.tasks.task import Task


@dataclass(frozen=True, slots=True)
class RunBuilder:
    """The settings of one run, and the parts that they describe."""

    config: RunConfig

    @classmethod
    def of(cls, *, max_epochs: int | None = None, **settings: Any) -> RunBuilder:
        """A run of these fields of RunConfig; `max_epochs` is short for `trainer.max_epochs`."""
        unknown = settings.keys() - RunConfig.__dataclass_fields__.keys()
        if unknown:
            allowed = ", ".join(RunConfig.__dataclass_fields__)
            raise UserError("fit", f"no setting {', '.join(sorted(unknown))}", allowed=allowed)
        config = RunConfig(**settings)
        if max_epochs is not None:
            config.trainer = {**config.trainer, "max_epochs": max_epochs}
        return cls(config)

    # What starting a run must know of it.

    @property
    def trainer(self) -> dict[str, Any]:
        """Arguments of Lightning's Trainer."""
        return self.config.trainer

    @property
    def shards_weights(self) -> bool:
        """Whether each rank keeps a slice of each weight."""
        return self.config.shares_weights

    @property
    def is_resumed(self) -> bool:
        return self.config.resume is not None

    @property
    def resume_anyway(self) -> bool:
        return self.config.resume_anyway

    @property
    def has_own_parts(self) -> bool:
        """Whether the user's own LightningModule or DataModule trains."""
        return self.config.has_own_parts

    @property
    def own_settings(self) -> OwnSettings:
        """What a run of the user's own parts needs of these settings."""
        config = self.config
        is_ours = not isinstance(config.data, L.LightningDataModule)
        return OwnSettings(
            module=config.task,
            data=kind_of(config.data).data.of(config.data, seed=config.seed) if is_ours else config.data,
            trainer=config.trainer,
            checkpoint=config.checkpoint,
            callbacks=config.callbacks,
            logger=config.logger,
            name=config.name,
            flush_every=config.monitor.flush_every,
            progress=config.monitor.progress,
            profile=config.monitor.profile,
            not_finite=config.optim.not_finite,
        )

    def with_copied_weights(self) -> RunBuilder:
        """The same run with copies of a module that came from another process, which shares its memory."""
        return RunBuilder(copy.deepcopy(self.config)) if self.has_own_parts else self

    def require_picklable(self) -> None:
        """Refuse parts of the user's that cannot be sent to other processes."""
        for where, part in (("task", self.config.task), ("data", self.config.data)):
            try:
                ForkingPickler.dumps(part)
            except Exception as error:  # pickling runs methods of all its attributes, which may raise anything
                what = f"{type(part).__name__} cannot be sent to other processes: {error}"
                hint = "Start the command with torchrun: each process then builds its parts."
                raise UserError(where, what, hint=hint) from None

    @property
    def has_own_network(self) -> bool:
        """Whether the network is an object of the user's, not the Config of one."""
        return isinstance(self.config.model, nn.Module)

    @property
    def accelerator(self) -> str:
        return str(self.trainer.get("accelerator", "auto"))

    @property
    def runs(self) -> Path:
        """The folder of all runs of this name."""
        return Path(self.config.output) / self.config.name

    @property
    def settings(self) -> dict[str, Any]:
        """All settings as plain values."""
        found: dict[str, Any] = plain(self.config)
        return found

    def request(self, overrides: Sequence[str]) -> RunRequest:
        """What these settings ask to resume."""
        return RunRequest(self.config.resume, self.runs, self.settings, overrides)

    def title(self, overrides: Sequence[str]) -> RunTitle:
        return RunTitle(self.config.name, self.config.seed, self.settings, overrides)

    def resuming(self, folder: str | None) -> RunBuilder:
        """The same run in the folder of an earlier one; None: from the beginning."""
        return RunBuilder(replace(self.config, resume=folder))

    def for_one_rank(self) -> RunBuilder:
        """The same run without a choice of devices: each rank counts those it sees."""
        return RunBuilder(replace(self.config, trainer={**self.trainer, "devices": None}))

    def without_trials(self) -> RunBuilder:
        """The same run, whose verdict tries nothing: the trials of a sweep wait for each other."""
        return RunBuilder(replace(self.config, monitor=replace(self.config.monitor, verdict=False)))

    @property
    def kind(self) -> Kind:
        """The record of this kind of data."""
        return kind_of(self.config.data)

    # What a sweep compares.

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def metric(self) -> str:
        """The validation metric that the settings name, else the usual one; known before there is any data."""
        return self.config.checkpoint.metric or self.kind.usual_metric(self.config.data)

    @property
    def metrics(self) -> list[str]:
        """The metrics to choose from; some depend on the data, as those of two classes do."""
        return self.kind.metrics(self.config.data)

    # Data, task and feeds.

    def draw_from_seed(self) -> None:
        L.seed_everything(self.config.seed, verbose=False)

    def set_threads(self) -> bool:
        """Use the threads that the settings name; whether they name any."""
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        return self.config.threads is not None

    def build_data(self, log: RunLog) -> StoreData[Any, Any]:
        return self.kind.data.of(self.config.data, seed=self.config.seed, log=log)

    def build_task(self, data: StoreData[Any, Any], log: RunLog) -> Task:
        """The task of the data, with the network of the settings or the user's own."""
        config = self.config
        task = self.kind.task(config.model, config.task, config.optim)
        report_network(task.build(data.info), config.model, data.info, log)
        return task

    def require_memory_for_model(self, data: StoreData[Any, Any], ranks: Ranks, device: torch.device) -> None:
        """Refuse a model that this device cannot train, before building it."""
        config = self.config
        copies = ranks.local_world if device.type == "cpu" else 1
        shares = ranks.world if config.shares_weights else 1

        def build(model: Any) -> nn.Module:
            return self.kind.task(model, config.task).build(data.info)

        require_memory(config.model, build, device, copies / shares)

    def place_feeds(self, data: StoreData[Any, Any], task: Task, device: torch.device, ranks: Ranks) -> Feeds:
        """One feed a split, for this rank and for the layout that the network reads."""
        layout = Layout.of(task.model)
        repeats = bool(self.trainer.get("overfit_batches"))
        data.config = self.config.data
        data.place(Placement(ranks.rank, ranks.world, device, layout, repeats))
        return data.feeds

    def with_whole_steps(self, feeds: Feeds, log: RunLog) -> RunBuilder:
        """The same run with epochs and validations that end where an optimizer step does."""
        return RunBuilder(replace(self.config, trainer=whole_steps(self.trainer, feeds.train, log)))

    def prepare_task(self, task: Task, feeds: Feeds, log: RunLog) -> dict[str, Any]:
        """Prepare a task for its data; facts for the summary."""
        return task.prepare(feeds, log, self.config.seed)

    def compile_network(
        self,
        task: Task,
        feeds: Feeds,
        precision: PrecisionChoice,
        ranks: Ranks,
        folder: RunFolder,
        before: dict[str, Any] | None,
    ) -> None:
        """Compile the network where the settings say so, or its layers where that pays; `before`: a resumed choice."""
        compile_network(
            task, feeds, precision, folder, asked=self.config.compile, may_measure=not ranks.are_several, before=before
        )

    # Measured settings.

    def question(
        self,
        data: StoreData[Any, Any],
        ranks: Ranks,
        device: torch.device,
        overrides: Sequence[str],
        *,
        counts_time: bool = True,
    ) -> Question:
        """What these settings leave open."""
        confirmed = find_confirmed(self.runs, self.settings, device, overrides)
        build = self.with_answers(confirmed.values)
        prober = Child(build.probe(ranks, device), torch.get_num_threads())
        return Question(build.open_settings, data.store, ranks, device, overrides, prober, counts_time, confirmed)

    @property
    def open_settings(self) -> RunSettings:
        config = self.config
        return RunSettings(
            data=config.data,
            network=config.model,
            task=config.task,
            optim=config.optim,
            trainer=config.trainer,
            precision=config.precision,
            compile=bool(config.compile),
            tune=config.tune,
        )

    def probe(self, ranks: Ranks, device: torch.device) -> Callable[[], Parts]:
        """Builds in another process what this run would train."""
        alone = replace(self.config, callbacks={}, tune=TuneConfig(), compile=False)
        return partial(build_parts, RunBuilder(alone), ranks, device)

    def tune(
        self,
        data: StoreData[Any, Any],
        ranks: Ranks,
        device: torch.device,
        overrides: Sequence[str],
        folder: RunFolder,
    ) -> RunBuilder:
        """The settings with everything decided that they leave open: from the run's beginning, or measured now."""
        before = ranks.agreed("earlier answers", lambda: json.dumps(self._answers_in(folder.path)))
        if known := json.loads(before):
            folder.summary.set("tune", known)
            kept = {name: value for name, value in known["values"].items() if not is_typed(name, overrides)}
            folder.say(f"tune: as at the beginning of this run ({override_line(kept) or 'nothing is changed'})")
            return self.with_answers(kept)
        if not self.config.tune.enabled:
            return self
        if self.is_resumed and any((folder.path / CHECKPOINTS).glob("step-*")):
            folder.say("tune: this run began without it and continues without it")
            return self
        found = of_all_devices(self.question(data, ranks, device, overrides), folder.say)
        for line in found.lines:
            folder.say(line)
        for choice in found.answers.choices:
            folder.decision(choice.name, choice.value, choice.why, choice.evidence)
        folder.summary.set("tune", {"key": found.key, "cached": found.is_known, **found.answers.as_dict()})
        folder.summary.write()
        return self.with_answers(found.answers.values)

    def _answers_in(self, folder: Path) -> dict[str, Any] | None:
        """The answers of the run that is resumed; None where there are none."""
        if not self.is_resumed:
            return None
        try:
            known = read_summary(folder).get("tune")
        except UserError:
            return None
        return known if isinstance(known, dict) and isinstance(known.get("values"), dict) else None

    def with_answers(self, values: dict[str, Any]) -> RunBuilder:
        """The same run with measured settings."""
        config = self.config
        of_data = {name.removeprefix("data."): value for name, value in values.items() if name.startswith("data.")}
        if config.data.effective_batch is not None:
            of_data.pop("accumulate", None)  # it follows
        changed: dict[str, Any] = {"data": replace(config.data, **of_data)} if of_data else {}
        if "optim.lr" in values:  # measured with the rows of a step: it is not scaled to them again
            changed["optim"] = replace(config.optim, lr=values["optim.lr"], scale_lr=ScaleRate.none)
        changed |= {name: values[name] for name in ("precision", "compile") if name in values}
        return RunBuilder(replace(config, **changed) if changed else config)

    # Training.

    def choose_precision(
        self, device: torch.device, ranks: Ranks, log: RunLog, before: dict[str, Any] | None
    ) -> PrecisionChoice:
        """The first rank's choice, on all; `before`: that of the run that resumes here."""

        def choose() -> str:
            known = before["value"] if before else None
            found = choose_precision(self.config.precision, device, known)
            return json.dumps([found.precision, found.why, found.evidence])

        name, why, evidence = json.loads(ranks.agreed("precision", choose))
        precision = PrecisionChoice(Precision(name), why, evidence)
        log.decision("precision", precision.precision.value, precision.why, precision.evidence)
        return precision

    @property
    def clip(self) -> float:
        """The longest gradient: the setting's, or what the model recommends; 0: no clipping."""
        clip = self.config.optim.clip
        return Recommended.by(self.config.model).clip if clip is None else float(clip)

    def build_loop(self, describe_rows: Callable[[int], str]) -> FastLoop:
        """The fast loop, which names the rows of a step that fails."""
        return FastLoop(not_finite=self.config.optim.not_finite, describe_rows=describe_rows)

    def choose_metric(self, task: Task) -> str:
        """The validation metric that decides which checkpoint is best."""
        metric = self.config.checkpoint.metric
        if metric is None:
            return task.usual_metric
        require_metric(metric, [*task.metric_names, "loss"], "checkpoint.metric")
        return metric

    def build_training(
        self,
        task: Task,
        loop: FastLoop,
        feeds: Feeds,
        precision: PrecisionChoice,
        ranks: Ranks,
        folder: RunFolder,
        *,
        about: dict[str, Any],
        signals: Signals,
        start: Start | None,
    ) -> Training:
        """Lightning's Trainer with our callbacks; the user's own settings come last and win."""
        config, feed, metric = self.config, feeds.train, self.choose_metric(task)
        device, in_epoch = feed.device, batches_in_epoch(self.trainer, feed)
        strategy = trainers.choose_strategy(self.trainer, task, device, precision, ranks, folder)
        first = 0 if self.is_resumed else None  # a resumed run may have ended before its first checkpoint
        after = first if start is None else start.step
        monitor = trainers.build_monitor(device, folder)
        loggers = self._loggers(task, folder, after, has_card=any(each.name == "gpu" for each in monitor.watch.sources))
        listeners = self._listeners(task, metric, folder, loggers, is_new=not after)
        every = config.monitor.flush_every
        timer, throughput = StepTimer(callbacks=config.callbacks), Throughput()
        curves = RunCurves(listeners, every, timer=timer, throughput=throughput, monitor=monitor)
        checkpoints = ExactCheckpoint(
            folder.path / CHECKPOINTS,
            every_steps=config.checkpoint.every_steps,
            every_minutes=config.checkpoint.every_minutes,
            monitor=f"val/{metric}",
            mode=best_mode(metric),
            min_delta=config.checkpoint.min_delta,
            about=about,
            signals=signals,
            others_draw=bool(config.callbacks),
            log=folder,
        )
        settings = {
            **trainers.lightning_defaults(precision, ranks, folder.path),
            "log_every_n_steps": min(every, in_epoch),
            **self.trainer,
            **ranks.lightning_settings(device),  # one process a device runs already
            **strategy,
            "logger": loggers.for_trainer(is_first=folder.is_first),
            "accumulate_grad_batches": feed.plan.accumulate,
            "gradient_clip_val": self.clip or None,
        }
        stopping = trainers.early_stopping(config.checkpoint, metric)
        profile = trainers.build_profile(config.monitor.profile, folder)
        callbacks = [loop, curves, *profile, *stopping, *config.callbacks.values(), checkpoints]
        trainer = trainers.quiet_trainer(settings, callbacks)
        disable_signal_handling(trainer)
        return Training(trainer, curves, loggers, checkpoints, loop, stopping)

    def _listeners(
        self, task: Task, metric: str, folder: RunFolder, loggers: RunLoggers, *, is_new: bool
    ) -> list[Listener]:
        """What receives the curves; nothing on ranks after the first."""
        if not folder.is_first:
            return []
        file = MetricsFile(folder.path / "metrics.csv", ["loss", *task.metric_names], is_new=is_new)
        live = self.config.monitor.progress
        return [
            file,
            loggers,
            ProgressLine(metric=metric, total_steps=task.total_steps or 0, say=folder.say, live=live),
        ]

    def _loggers(self, task: Task, folder: RunFolder, after: int | None, *, has_card: bool) -> RunLoggers:
        """The loggers of the settings, on the first rank; they write from the step `after` on."""
        if not folder.is_first:
            return RunLoggers({})
        place = RunPlace(folder.path, self.config.name, after)
        found = build_loggers(self.config.logger, place, self.trainer.get("logger"))
        folder.summary.set("loggers", list(found))
        names = [f"val/{name}" for name in ("loss", *task.metric_names)]
        charts = layout(task.metric_names, has_card=has_card)
        return RunLoggers(found, metrics=names, settings=self.compared_settings(task), charts=charts)

    def compared_settings(self, task: Task) -> dict[str, Any]:
        """The settings that dashboards compare, with the learning rate that was chosen."""
        return compared_settings(self.settings) | {"optim.lr": task.optim.highest}

    # The end.

    @property
    def writes_tensorboard(self) -> bool:
        return "tensorboard" in self.config.logger

    @property
    def network(self) -> Any:
        """The Config of the network, or the user's own network."""
        return self.config.model

    def judging(self, task: Task, feeds: Feeds, pieces: int, *, is_precision_measured: bool) -> Judging:
        """What a verdict needs to know of these settings."""
        config = self.config
        return Judging(
            batches_in_epoch=batches_in_epoch(config.trainer, feeds.train),
            effective_batch=config.data.effective_batch,
            is_precision_asked=config.precision in (Precision.fp32, Precision.bf16) and not is_precision_measured,
            is_compiled=bool(config.compile) or is_compiled(task.model),
            may_try=config.monitor.verdict and not config.shares_weights,
            pieces=pieces,
        )


def build_parts(build: RunBuilder, ranks: Ranks, device: torch.device) -> Parts:
    """Task and feed as a run has them, to measure how fast they are."""
    with unwritten_run() as folder:
        build.draw_from_seed()
        data = build.build_data(folder)
        data.setup()
        task = build.build_task(data, folder)
        feeds = build.place_feeds(data, task, device, ranks)
        build = build.with_whole_steps(feeds, folder)
        set_rate(task, data, build.trainer, folder)
        task.prepare_probe(feeds, build.seed)
        workers = data.config.workers
        return Parts(task, feeds.train.split, feeds.train.plan, device, workers, build.clip)
