"""All settings of one run, and the options of `conf/` behind them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import lightning as L
from torch import nn

from flatout.callbacks.loggers import chosen_loggers
from flatout.callbacks.profile_steps import ProfileConfig
from flatout.checkpoints.settings import CheckpointConfig
from flatout.data.store_data import StoreData
from flatout.data.text import TextDataConfig
from flatout.engine.optimizer import OptimConfig
from flatout.engine.precision import Precision
from flatout.errors import LARGEST_SEED, check_settings, did_you_mean, require, setting, settings_of
from flatout.models import model_class
from flatout.perf.tune.settings import StepRows, TuneConfig, tune_of
from flatout.tasks.task import Task

REPLACED = {
    "precision": "precision",
    "gradient_clip_val": "optim.clip",
    "gradient_clip_algorithm": "optim.clip",
}
REPLACED |= {
    "accumulate_grad_batches": "data.accumulate",
    "callbacks": "callbacks",
    "default_root_dir": "output",
}
"""Arguments of Lightning's Trainer that a setting of ours replaces."""
OWN_PARTS_MAY_SET = ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
"""Those that the Trainer takes all the same where your own module trains."""
TRAINER_ARGUMENTS = inspect.signature(L.Trainer).parameters
_STRATEGIES = ("auto", "ddp", "ddp_bf16", "ddp_find_unused_parameters_true", "fsdp")
_OF_FSDP = "trainer.strategy: fsdp"
_BASES: dict[str, type] = {
    "data": L.LightningDataModule,
    "model": nn.Module,
    "task": L.LightningModule,
}
_NAMES = "letters, digits, '_', '-', '+' and '.'"


@dataclass(kw_only=True, slots=True)
class MonitorConfig:
    """What a run prints and measures while it trains."""

    flush_every: int = setting(
        50, "Steps between rows of metrics.csv; losses stay on the device until then.", least=1
    )
    progress: bool = setting(True, "Whether a terminal shows a progress line.")
    profile: ProfileConfig = setting(ProfileConfig, "The profiler, for a few steps.")
    verdict: bool = setting(
        True, "Whether a run's end measures what could be faster, in a tenth of its time at most."
    )
    rival: bool = setting(
        True, "Whether a simple model stands beside the result; a tenth of the time, 20 s at most."
    )

    def __post_init__(self) -> None:
        check_settings(self, "monitor")


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """One run."""

    data: Any = setting(None, "The data; null: the built-in headlines.")
    model: Any = setting(None, "The model; null: a BiLSTM for texts, a bitmlp for bit strings.")
    task: Any = setting(None, "The loss; null: classification for texts, grams for bit strings.")
    optim: OptimConfig = setting(OptimConfig, "The optimizer and its schedule.")
    checkpoint: CheckpointConfig = setting(
        CheckpointConfig, "What counts as best, and when to stop."
    )
    monitor: MonitorConfig = setting(MonitorConfig, "What a run prints and measures.")
    trainer: dict[str, Any] = setting(dict, "Arguments of Lightning's Trainer.")
    logger: Any = setting(
        None,
        "Loggers of curves: tensorboard, csv, wandb, mlflow, none, or several; null: tensorboard.",
        allowed="tensorboard, csv, wandb, mlflow, none, or a list of them",
        example="[tensorboard,csv]",
    )
    callbacks: dict[str, Any] = setting(
        dict,
        "Your own Lightning callbacks, each under a name of your choice.",
        allowed="a mapping of names to `_target_` and its arguments",
        example=(
            "+callbacks.stop._target_=lightning.pytorch.callbacks.Timer"
            " +callbacks.stop.duration=00:01:00:00"
        ),
    )
    allow_targets: list[str] = setting(
        list,
        "Packages of yours whose classes a `_target_` may name; on the command line only.",
        allowed="a list of packages, modules or classes",
        example="[my_package]",
    )
    precision: Precision = setting(
        Precision.auto, "Of products; auto: bf16 where faster, or fp16 on a GPU, or fp32."
    )
    compile: Any = setting(
        None,
        "auto (null): torch compiles the layers of a flat encoder where that pays; true: it"
        " compiles the model; false.",
        allowed="auto, true, false",
        example="false",
    )
    tune: TuneConfig = setting(
        TuneConfig, "What a run measures before training; auto: all that settings leave open."
    )
    resume: str | None = setting(
        None,
        "auto: continue the last run of this command; a run folder: continue that run; null: a new"
        " run.",
        allowed="auto, the path of a run folder, null",
        example="auto",
    )
    resume_anyway: bool = setting(
        False, "Whether a run resumes although its data or settings have changed."
    )
    threads: int | None = setting(
        None, "Threads on a CPU; null: one a core, shared by ranks.", least=1, example="4"
    )
    seed: int = setting(0, "Seed of all random numbers.", least=0, most=LARGEST_SEED)
    name: str = setting(
        "default",
        "Name of the run: its folder lies in OUTPUT/NAME/.",
        example="mine",
        allowed=_NAMES,
    )
    output: str = setting(
        "outputs", "Folder of all runs.", allowed="the path of a folder", example="/data/runs"
    )

    def __post_init__(self) -> None:
        check_settings(self)
        self.optim, self.monitor = (
            settings_of(OptimConfig, self.optim),
            settings_of(MonitorConfig, self.monitor),
        )
        self.checkpoint = settings_of(CheckpointConfig, self.checkpoint)
        self.compile = None if self.compile == "auto" else self.compile
        require(
            self.compile in (None, True, False),
            "compile",
            f"{self.compile}",
            allowed="auto, true, false",
        )
        if isinstance(self.tune, str):
            self.tune = tune_of(self.tune)
        hint = "Set tune=off, or name the model's settings."
        is_ours = not (self.tune.enabled and isinstance(self.model, nn.Module))
        require(
            is_ours,
            "tune",
            "the processes that measure cannot build a model of your own",
            hint=hint,
        )
        self.data = TextDataConfig() if self.data is None else self.data
        self.name, self.output = str(self.name), str(self.output)
        self._require_kinds()
        if not self.has_own_parts:
            self._complete_parts()
        require(
            bool(re.fullmatch(r"\w[\w.+-]*", self.name)), "name", f"{self.name!r}", allowed=_NAMES
        )
        self.logger = chosen_loggers(self.logger)
        for name, callback in self.callbacks.items():
            require(
                isinstance(callback, L.Callback),
                f"callbacks.{name}",
                f"{type(callback).__name__} is no callback of Lightning",
                hint="Name a subclass of lightning.Callback.",
            )
        self._require_trainer_settings()
        if self.has_own_parts:
            _require_own_parts(self.task, self.data)
            require(
                not self.is_sharded,
                _OF_FSDP,
                "does not serve modules of your own",
                hint="Set trainer.strategy=ddp.",
            )
            require(
                not self.tune.enabled,
                "tune",
                "measures no modules of your own",
                hint="Set tune=off.",
            )

    def _require_kinds(self) -> None:
        """Refuse what a Python user may pass in the place of something else."""
        if isinstance(self.model, str):
            self.model = model_class(self.model, "model")()
        for name, kind in _BASES.items():
            part = getattr(self, name)
            what = f"{type(getattr(self, name)).__name__} is no {kind.__name__}"
            is_part = (
                self.has_own_parts or part is None or is_dataclass(part) or isinstance(part, kind)
            )
            require(is_part, name, what, allowed="one of your own, or settings of flatout")
        for name in ("trainer", "callbacks"):
            require(
                isinstance(getattr(self, name), Mapping),
                name,
                f"{getattr(self, name)!r} is no mapping",
                hint=f"Write fit({name}={{…: …}}).",
            )

    @property
    def has_own_parts(self) -> bool:
        """Whether the user's own LightningModule or DataModule trains."""
        return isinstance(self.task, L.LightningModule) or isinstance(
            self.data, L.LightningDataModule
        )

    def _complete_parts(self) -> None:
        """Fill in what the data imply, and refuse parts that do not fit each other."""
        # every part of every kind: a run needs them
        from flatout.run.kinds import complete_parts, kind_of

        if self.checkpoint.metric is not None:
            self.checkpoint = replace(
                self.checkpoint, metric=self.checkpoint.metric.removeprefix("val/")
            )
        rows = self.data.effective_batch
        is_free = (
            self.tune.enabled and self.tune.effective_batch is StepRows.free and rows is not None
        )
        hint = "Leave one of them out."
        require(
            not is_free, "tune.effective_batch", f"free with data.effective_batch={rows}", hint=hint
        )
        self.data, self.model, self.task = complete_parts(self.data, self.model, self.task)
        if self.is_sharded:
            why = kind_of(self.data).why_whole
            require(not why, _OF_FSDP, why, hint="Leave it out.")
            require(
                not self.tune.enabled,
                _OF_FSDP,
                "needs tune=off, which measures whole models on one device",
                hint=hint,
            )
            require(
                self.precision is not Precision.fp16,
                _OF_FSDP,
                "does not work with precision=fp16: its scaler needs whole gradients",
                hint="Set precision=bf16 or fp32.",
            )
            require(
                not self.compile,
                _OF_FSDP,
                "does not work with compile=true in this version",
                hint=hint,
            )

    def _require_trainer_settings(self) -> None:
        for name in self.trainer:
            where = f"trainer.{name}"
            hint = did_you_mean(name, TRAINER_ARGUMENTS)
            require(
                name in TRAINER_ARGUMENTS, where, "no argument of Lightning's Trainer", hint=hint
            )
            is_free = name not in REPLACED or (self.has_own_parts and name in OWN_PARTS_MAY_SET)
            require(
                is_free,
                where,
                "has a setting of its own",
                hint=f"Set {REPLACED.get(name)} instead.",
            )
        strategy = self.trainer.get("strategy")
        is_known = not isinstance(strategy, str) or strategy in _STRATEGIES
        is_known = is_known or self.has_own_parts  # DDP may have to look for unused weights
        hint = did_you_mean(str(strategy), _STRATEGIES)
        require(
            is_known, "trainer.strategy", f"{strategy}", allowed=", ".join(_STRATEGIES), hint=hint
        )
        epochs = self.trainer.get("max_epochs")
        is_count = epochs is None or (isinstance(epochs, int) and epochs >= 1)
        require(is_count, "trainer.max_epochs", f"{epochs}", allowed="1 or more")

    @property
    def is_sharded(self) -> bool:
        """Whether each rank keeps a slice of each weight (FSDP)."""
        return self.trainer.get("strategy") == "fsdp"


def _require_own_parts(module: Any, data: Any) -> None:
    is_own_module, is_data = (
        isinstance(module, L.LightningModule),
        isinstance(data, L.LightningDataModule),
    )
    hint = "Set data._target_ to your LightningDataModule, or data=headlines for data of flatout."
    is_fit = is_data or not isinstance(data, L.LightningModule)
    require(is_fit, "data", f"{type(data).__name__} is no LightningDataModule", hint=hint)
    is_own_data = is_data and not isinstance(data, StoreData)
    reads_ours = not is_own_module or isinstance(module, Task)
    name = type(module).__name__.removesuffix("Config")
    require(
        not (reads_ours and is_own_data),
        "task",
        f"{name} reads the batches of flatout's DataModules, and {type(data).__name__} is your own",
        hint="Set task._target_ to your LightningModule.",
    )
    hooks: list[tuple[str, Any, str, str]] = []
    if is_own_module:
        hooks += [("task", module, "training_step", "the loss of a batch")]
        hooks += [("task", module, "configure_optimizers", "the optimizer")]
    if is_own_data:
        hooks += [("data", data, "train_dataloader", "a DataLoader of the training rows")]
    for where, part, hook, gives in hooks:
        is_defined = getattr(type(part), hook) is not getattr(_BASES[where], hook)
        require(
            is_defined,
            where,
            f"{type(part).__name__} has no {hook}",
            hint=f"Define it: it returns {gives}.",
        )
