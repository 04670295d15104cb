"""What a run of the user's own LightningModule or DataModule does differently: `OwnRunParts`.

The fast loop, exact checkpoints, curves, loggers, the verdict and the report serve any module, with
a DataModule of its own or one of flatout. flatout does not know what its answers mean: there is no
`model/` folder, no calibration and no table of classes, and `tune` measures nothing. Open this file
to change what such a run does; `run/our_parts.py` has the same methods for tasks of flatout.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, ClassVar, Self

import lightning as L
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from flatout.callbacks.loggers import RunLoggers
from flatout.callbacks.throughput import FetchTimes
from flatout.checkpoints.same_run import facts_of_run
from flatout.config import RunConfig
from flatout.data.batches.store_data import StoreData
from flatout.engine.lightning_internals import callbacks_of, overrides
from flatout.engine.precision import LIGHTNING_NAMES
from flatout.engine.run_length import EPOCHS
from flatout.errors import UserError, class_name, require
from flatout.masking import mask_settings
from flatout.perf.verdict.evidence import Evidence
from flatout.perf.verdict.experiments import MOST_S
from flatout.perf.verdict.gathering import evidence_of_own
from flatout.perf.verdict.own_tries import try_own
from flatout.report.summary import plain
from flatout.run.context import (
    Answers,
    NoAnswers,
    Run,
    RunAnswers,
    RunContext,
    RunParts,
    Settings,
    Training,
)
from flatout.run.kinds import kind_of
from flatout.run.resolve import report_mode, resolve_precision


@dataclass(frozen=True, slots=True)
class OwnParts:
    """The user's own LightningModule, on data of the user's or of flatout."""

    module: L.LightningModule
    data: L.LightningDataModule


@dataclass(frozen=True, slots=True)
class OwnRunParts(OwnParts, RunParts):
    """What a run does with them: the answers to the questions of `RunParts`."""

    blames: ClassVar[str] = "task"
    compares_words: ClassVar[bool] = True
    may_draw: ClassVar[bool] = True

    @classmethod
    def name_of(cls, config: RunConfig) -> str:
        return type(config.task).__name__

    @classmethod
    def require_startable(cls, config: RunConfig, world: int, *, is_here: bool) -> None:
        if not is_here:
            require_picklable(config.task, config.data)
        trainer_of_own(config, world)

    @classmethod
    def of_this_process(cls, config: RunConfig) -> RunConfig:
        # a module that came from another process shares its memory
        return copy.deepcopy(config)

    @classmethod
    def open_answers(cls, config: RunConfig, folder: Path) -> Answers:
        return NoAnswers(type(config.task).__name__)

    @classmethod
    def metric_of(cls, config: RunConfig) -> str:
        return plain_name(config.checkpoint.metric or "loss", "val")

    @classmethod
    def metrics_of(cls, config: RunConfig) -> list[str]:
        return [cls.metric_of(config)]  # others are those that the module logs

    @classmethod
    def mode_of(cls, config: RunConfig) -> str:
        return config.checkpoint.mode_of(cls.metric_of(config))

    @classmethod
    def leaves_length_open(cls, config: RunConfig) -> bool:
        return False

    @classmethod
    def make(cls, config: RunConfig, context: RunContext) -> tuple[Self, Settings]:
        """The module has an optimizer of its own; its Trainer opens the data, clips and counts."""
        epochs = config.trainer.get("max_epochs") or EPOCHS
        config = replace(config, trainer={**config.trainer, "max_epochs": epochs})
        parts = cls(config.task, _data_of(config))
        context.folder.summary.set("data", {"source": type(parts.data).__name__})
        checkpoint = config.checkpoint
        precision = resolve_precision(config.precision, context)
        logged_name = checkpoint.metric
        metric = None if logged_name is None else plain_name(logged_name, "val")
        mode = checkpoint.mode_of(metric or "")
        if logged_name is not None:
            report_mode(config, mode, logged_name, context.folder)
        settings = Settings(
            asked=config,
            values=plain(config),
            trainer=trainer_of_own(config, context.ranks.world),
            precision=precision,
            optim=config.optim,
            metric=metric,
            monitor=logged_name,
            mode=mode,
        )
        return parts, settings

    def list_facts(self, settings: Settings, context: RunContext) -> dict[str, Any]:
        plan = {} if isinstance(self.data, StoreData) else {"devices": context.ranks.world}
        values = settings.values | _typed_for_own_parts(settings, context.overrides)
        precision = LIGHTNING_NAMES[settings.precision.value]
        return facts_of_run(values, None, self.module, plan, precision)

    def exact_products(self, run: Run) -> AbstractContextManager[None]:
        return nullcontext()  # the user's own module keeps torch's settings

    def trainer_arguments(self, settings: Settings) -> dict[str, Any]:
        return {}

    def callbacks(self, settings: Settings) -> list[L.Callback]:
        return [KeepResults(settings.monitor), FetchTimes()]

    def curve_names(self, settings: Settings) -> list[str]:
        return sorted({"loss", settings.metric or "loss"})

    def wrap_loggers(self, loggers: dict[str, Any], run: Run, *, has_card: bool) -> RunLoggers:
        return RunLoggers(loggers, settings=mask_settings(dict(self.module.hparams)))

    def prepare(self, run: Run) -> None:
        """Say what serves the user's parts, and what does not."""
        folder = run.folder
        names = f"{type(self.module).__name__} with {type(self.data).__name__}"
        folder.say(
            f"own parts: {names}, without what needs parts of flatout: tune, a model/ folder,"
            " calibrated probabilities, a table of classes"
        )
        if run.ranks.are_several:
            folder.say(
                "own parts: metrics of all devices need self.log(…, sync_dist=True); others are"
                " the first device's"
            )
        if run.settings.monitor is None:
            follows = "the last weights are evaluated, and nothing ends training early"
            remedy = "set it to a name that your validation_step logs"
            folder.say(f"own parts: checkpoint.metric is not set: {follows}; {remedy}")

    def take_weights(self, state: dict[str, Tensor] | None, strategy: Strategy) -> None:
        if state is not None:
            self.module.load_state_dict(state)

    def can_judge(self, split: str) -> bool:
        # Our stores know their splits. Of your own data only the hooks that they define are known.
        data = self.data
        has_rows = split == "val" or not isinstance(data, StoreData) or split in data.store.splits
        return has_rows and has_own(self.module, data, split)

    def scores_of(self, split: str, logged: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        # A module of your own logs under names of its choice, and may have several loaders a split.
        scores = {}
        for metrics_of_loader in logged:
            for name, value in metrics_of_loader.items():
                scores[plain_name(name, split)] = float(value)
        return scores

    def keep_answers(self, run: Run, training: Training) -> RunAnswers:
        return RunAnswers(NoAnswers(type(self.module).__name__), [], [])

    def find_evidence(self, run: Run, training: Training) -> Evidence | None:
        trainer = training.trainer
        fetches = next(
            callback for callback in callbacks_of(trainer) if isinstance(callback, FetchTimes)
        )
        evidence = evidence_of_own(training.curves, trainer, fetches.ms)
        if evidence is not None and run.settings.asked.monitor.verdict:
            trained_s = evidence.total_ms * evidence.batches / 1000
            try_own(trainer, fetches.loader, evidence, seconds=MOST_S, trained_s=trained_s)
            for note in evidence.notes:
                run.folder.say(f"verdict: {note}")
        return evidence

    @property
    def network(self) -> nn.Module:
        return self.module

    def rows_per_step(self, training: Training) -> int:
        total = training.curves.throughput.volume.total
        return round(total.rows / max(1, total.steps))


def _data_of(config: RunConfig) -> L.LightningDataModule:
    """The user's own DataModule, or flatout's for the user's own module."""
    if isinstance(config.data, L.LightningDataModule):
        return config.data
    # The Trainer accumulates `data.accumulate` batches, so the DataModule must not do it too.
    settings = replace(config.data, accumulate=1)
    data: L.LightningDataModule = kind_of(config.data).data.of(settings, seed=config.seed)
    return data


def _typed_for_own_parts(settings: Settings, overrides: Sequence[str]) -> dict[str, str]:
    """The words that were typed for parts of the user's own: `model.width=8`.

    The settings hold such a part as an object without fields, `<my.Network>`, so the words are all
    that can be compared.
    """
    typed = {}
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        group = key.split(".")[0]
        if str(settings.values.get(group)).startswith("<"):
            typed[f"{key} as typed"] = value
    return typed


def trainer_of_own(config: RunConfig, world: int) -> dict[str, Any]:
    """The Trainer's arguments for the user's own module, which neither clips nor accumulates.

    `optim.clip` and `data.accumulate` are passed on to Lightning. Set twice they are refused, and
    so are they for a module that optimises by itself.
    """
    accumulate = None
    if not isinstance(config.data, L.LightningDataModule):
        _, batches = config.data.batches(world)
        accumulate = batches if batches > 1 else None
    ours = (
        ("gradient_clip_val", "optim.clip", config.optim.clip),
        ("accumulate_grad_batches", "data.accumulate", accumulate),
    )
    trainer = dict(config.trainer)
    for argument, key, value in ours:
        if value:
            require(
                argument not in config.trainer,
                key,
                f"is set, and trainer.{argument} too",
                hint="Leave one of them out.",
            )
            trainer[argument] = value
        if argument in trainer:
            require(
                config.task.automatic_optimization,
                key if value else f"trainer.{argument}",
                f"{type(config.task).__name__} uses manual optimisation: it clips and accumulates"
                " by itself",
                hint="Leave it out.",
            )
    return trainer


def has_own(module: L.LightningModule, data: L.LightningDataModule, split: str) -> bool:
    """Whether module and DataModule define what judges a split, `val` or `test`."""
    step = "validation_step" if split == "val" else "test_step"
    has_step = overrides(module, step, L.LightningModule)
    return has_step and overrides(data, f"{split}_dataloader", L.LightningDataModule)


def require_picklable(task: object, data: object) -> None:
    """Refuse parts of the user's that cannot be sent to other processes."""
    for key, part in (("task", task), ("data", data)):
        try:
            ForkingPickler.dumps(part)
        except Exception as error:
            # Pickling runs methods of all its attributes, which may raise anything.
            kind = part if isinstance(part, type) else type(part)
            raise UserError(
                key,
                f"{class_name(kind)} cannot be sent to other processes: {error}",
                hint=(
                    "Make it picklable, or start one run with torchrun: each process then builds"
                    " its parts."
                ),
            ) from None


def plain_name(name: str, split: str) -> str:
    """The name of a metric without its split: `val_loss`, `val/loss`, `valid_loss` → `loss`."""
    return re.sub(rf"(?i)^{split}(id|idation)?[/_.-]+(?=.)", "", name)


class KeepResults(L.Callback):
    """After a validation, puts what the module logged where the curves look: `module.results`.

    `metric`: the logged name of `checkpoint.metric`, which must be among it.
    """

    def __init__(self, metric: str | None) -> None:
        self.metric = metric

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        logged = trainer.callback_metrics
        require(
            self.metric is None or self.metric in logged,
            "checkpoint.metric",
            f"{self.metric!r} is not logged",
            allowed=", ".join(logged),
            hint="Log it in validation_step, or name another.",
        )
        results = {}
        for name, value in logged.items():
            plain = plain_name(name, "val")
            # others are of the training
            if plain != name or name == self.metric:
                results[plain] = float(value)
        # not by setattr: a module may have a property of that name
        vars(pl_module)["results"] = results
