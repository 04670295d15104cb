"""`RunConfig`: all settings of one run, checked when it is built.

A field is one key of the command line, or one group of `conf/`. Settings that leave parts open are
completed by the kind of the data (`run/kinds.py`). Parts that do not fit each other are refused
here, before anything is read or built. Open this file to add a setting of a run as a whole.
"""

from __future__ import annotations

import inspect
import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from types import NoneType
from typing import Any

import lightning as L
from torch import nn

from flatout.callbacks.loggers import chosen_loggers
from flatout.callbacks.profile_steps import ProfileConfig
from flatout.checkpoints.settings import CheckpointConfig
from flatout.data.batches.store_data import StoreData
from flatout.data.texts.settings import TextDataConfig
from flatout.distributed.both_lightnings import either
from flatout.engine.captures import GraphUse
from flatout.engine.optimizer import OWN, OptimConfig
from flatout.engine.precision import Precision
from flatout.errors import LARGEST_SEED, check_settings, did_you_mean, require, setting, settings_of
from flatout.models import model_class
from flatout.models.bilstm import BiLSTMConfig
from flatout.perf.tune.settings import StepRows, TuneConfig, tune_of
from flatout.price.settings import Budget, PriceConfig, Target
from flatout.tasks.task import Task
from flatout.tasks.task_class import TaskClass

# arguments of Lightning's Trainer that a setting of ours replaces
REPLACED = {
    "precision": "precision",
    "gradient_clip_val": "optim.clip",
    "gradient_clip_algorithm": "optim.clip",
    "accumulate_grad_batches": "data.accumulate",
    "callbacks": "callbacks",
    "default_root_dir": "output",
}
# those of them that may be set where a module of the user's own trains
OWN_PARTS_MAY_SET = ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
TRAINER_ARGUMENTS = inspect.signature(L.Trainer).parameters
# settings of the optimizer that serve a module of the user's own
_SERVES_OWN_PARTS = ("clip", "not_finite")
# the strategies of Lightning that train flatout's parts, and ours
_STRATEGIES = ("auto", "ddp", "ddp_bf16", "ddp_find_unused_parameters_true", "fsdp")
_OF_FSDP = "trainer.strategy: fsdp"
# the class of a part of your own, which may stand in place of settings
_BASES: dict[str, type] = {
    "data": L.LightningDataModule,
    "model": nn.Module,
    "task": L.LightningModule,
}
ALWAYS = "always"  # of `monitor.rival`
NAMES = "letters, digits, '_', '-', '+' and '.'"


@dataclass(kw_only=True, slots=True)
class MonitorConfig:
    """What a run prints and measures while it trains, and at its end."""

    flush_every: int = setting(
        50, "Steps between rows of metrics.csv; losses stay on the device until then.", least=1
    )
    progress: bool = setting(True, "Whether a terminal shows a progress line.")
    profile: ProfileConfig = setting(ProfileConfig, "The profiler, for a few steps.")
    verdict: bool = setting(
        True,
        "Whether a run's end measures what could be faster, in a tenth of its time (3 s of a short"
        " run), and prints what limited it.",
    )
    rival: bool | str = setting(
        True,
        "Whether a simple model stands beside the result; true: if it takes a tenth of the run's"
        " time and 20 s at most; always: however long it takes.",
        allowed="true, false, always",
        example="always",
    )

    def __post_init__(self) -> None:
        check_settings(self, "monitor")
        require(
            self.rival in (True, False, ALWAYS),
            "monitor.rival",
            f"{self.rival!r}",
            allowed="true, false, always",
        )


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """All settings of one run: a group of `conf/` each, or one key.

    >>> RunConfig(data=TextDataConfig(source="news.csv"), seed=3)  # doctest: +SKIP
    """

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
    graph: GraphUse = setting(
        GraphUse.auto,
        "Whether a step on one GPU is captured and replayed; auto: where the run proves that it is"
        " equal and faster; on: also where it is no faster.",
    )
    tune: TuneConfig = setting(
        TuneConfig, "What a run measures before training; auto: all that settings leave open."
    )
    price: PriceConfig = setting(PriceConfig, "What an hour and a kilowatt-hour cost.")
    budget: str | None = setting(
        None,
        "What the whole run may take; epochs and schedule are planned to end there.",
        allowed="a time, an energy or a sum, such as 20min, 0.5kWh, 2EUR",
        example="20min",
    )
    until: str | None = setting(
        None,
        "A validation metric and its value, at which training ends.",
        allowed="METRIC:VALUE",
        example="val/accuracy:0.90",
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
        allowed=NAMES,
    )
    output: str = setting(
        "outputs", "Folder of all runs.", allowed="the path of a folder", example="/data/runs"
    )

    def __post_init__(self) -> None:
        check_settings(self)
        # A Python user may write groups as mappings.
        self.optim = settings_of(OptimConfig, self.optim)
        self.monitor = settings_of(MonitorConfig, self.monitor)
        self.checkpoint = settings_of(CheckpointConfig, self.checkpoint)
        self.price = settings_of(PriceConfig, self.price)
        if self.budget is not None:
            Budget.of(str(self.budget), self.price)
        if self.until is not None:
            Target.of(self.until)
        if self.compile == "auto":
            self.compile = None
        require(
            self.compile in (None, True, False),
            "compile",
            f"{self.compile}",
            allowed="auto, true, false",
        )
        if isinstance(self.tune, str):
            self.tune = tune_of(self.tune)
        require(
            not (self.tune.enabled and isinstance(self.model, nn.Module)),
            "tune",
            "the processes that measure cannot build a model of your own",
            hint="Set tune=off, or name the model's settings.",
        )
        if self.data is None:
            self.data = TextDataConfig()
        # YAML reads `name=7` as a number
        self.name = str(self.name)
        self.output = str(self.output)
        self._name_classes()
        for name, part in {"data": self.data, "model": self.model, "task": self.task}.items():
            _require_lightning(name, part)
        # Parts of your own have no settings that could be completed.
        if self.has_own_parts:
            self._check_own_parts()
        else:
            self._complete_parts()
        require(
            bool(re.fullmatch(r"\w[\w.+-]*", self.name)), "name", f"{self.name!r}", allowed=NAMES
        )
        self.logger = chosen_loggers(self.logger)
        for name, callback in self.callbacks.items():
            _require_lightning(f"callbacks.{name}", callback)
            require(
                isinstance(callback, L.Callback),
                f"callbacks.{name}",
                f"{type(callback).__name__} is no callback of Lightning",
                hint="Name a subclass of lightning.Callback.",
            )

    def _name_classes(self) -> None:
        """Replace names and classes, which a Python user may pass, by settings."""
        if isinstance(self.model, str):
            self.model = model_class(self.model, "model")()
        if isinstance(self.task, type):
            self.task = TaskClass(self.task)
        mappings: dict[str, object] = {"trainer": self.trainer, "callbacks": self.callbacks}
        for name, value in mappings.items():
            require(
                isinstance(value, Mapping),
                name,
                f"{value!r} is no mapping",
                hint=f"Write fit({name}={{…: …}}).",
            )

    def _check_own_parts(self) -> None:
        """Refuse the user's own parts where they lack something, and settings that they ignore."""
        # With a module of your own Lightning clips and accumulates, as our step does not run. DDP
        # may have to look for unused weights.
        self._require_trainer_settings(OWN_PARTS_MAY_SET, (str(self.trainer.get("strategy")),))
        _require_own_parts(self.task, self.data)
        _require_no_optimizer(self.optim)
        require(
            # the settings of the command line choose a BiLSTM where nothing is typed
            self.model in (None, BiLSTMConfig()),
            "model",
            "a module of your own builds its network itself",
            hint="Leave it out, and pass its arguments as task.NAME=VALUE.",
        )
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
        require(
            self.budget is None and self.until is None,
            "budget" if self.until is None else "until",
            "does not serve modules of your own",
            hint="Set +trainer.max_time, or add EarlyStopping to callbacks.",
        )

    @property
    def has_own_parts(self) -> bool:
        """Whether the user's own LightningModule or DataModule trains."""
        is_own_data = isinstance(self.data, L.LightningDataModule)
        return is_own_data or isinstance(self.task, L.LightningModule)

    def require_ours(self, verb: str, message: str, hint: str) -> None:
        """Refuse parts of the user's own for a verb that cannot use them."""
        require(not self.has_own_parts, verb, message, hint=hint)

    def _complete_parts(self) -> None:
        """Fill in what the data imply, and refuse parts that do not fit each other."""
        # every part of every kind: a run needs them
        from flatout.run.kinds import complete_parts, kind_of

        parts = {"data": self.data, "model": self.model, "task": self.task}
        for name, part in parts.items():
            is_part = part is None or is_dataclass(part) or isinstance(part, _BASES[name])
            require(
                is_part,
                name,
                f"{type(part).__name__} is no {_BASES[name].__name__}",
                allowed="one of your own, or settings of flatout",
            )
        metric = self.checkpoint.metric
        if metric is not None:
            self.checkpoint = replace(self.checkpoint, metric=metric.removeprefix("val/"))
        # `free` chooses the rows of a step, and `effective_batch` fixes them.
        rows = self.data.effective_batch
        is_searched = self.tune.enabled and self.tune.effective_batch is StepRows.free
        require(
            not is_searched or rows is None,
            "tune.effective_batch",
            f"free with data.effective_batch={rows}",
            hint="Leave one of them out.",
        )
        self.data, self.model, self.task = complete_parts(self.data, self.model, self.task)
        self._require_trainer_settings()
        if self.is_sharded:
            why_whole = kind_of(self.data).why_whole
            require(not why_whole, _OF_FSDP, why_whole, hint="Leave it out.")
            self._require_shardable()

    def _require_shardable(self) -> None:
        """Refuse settings that need whole weights or gradients on a device."""
        require(
            not self.tune.enabled,
            _OF_FSDP,
            "needs tune=off, which measures whole models on one device",
            hint="Leave one of them out.",
        )
        require(
            self.precision is not Precision.fp16,
            _OF_FSDP,
            "does not work with precision=fp16: its scaler needs whole gradients",
            hint="Set precision=bf16 or fp32.",
        )
        keeps_whole_states = self.optim.shown_name in ("adamw", "muon", "sgd")
        require(
            keeps_whole_states,
            _OF_FSDP,
            f"does not work with {self.optim.shown_name}, whose states may have other shapes than"
            " their weights",
            hint="Set optim.name=adamw or sgd.",
        )
        require(
            not self.compile,
            _OF_FSDP,
            "does not work with compile=true in this version",
            hint="Leave one of them out.",
        )

    def _require_trainer_settings(
        self, free: Sequence[str] = (), strategies: Sequence[str] = _STRATEGIES
    ) -> None:
        """Refuse arguments that Lightning's Trainer lacks, or that a setting of ours replaces.

        `free`: those that may be set although one of ours replaces them.
        """
        for name in self.trainer:
            where = f"trainer.{name}"
            require(
                name in TRAINER_ARGUMENTS,
                where,
                "no argument of Lightning's Trainer",
                hint=did_you_mean(name, TRAINER_ARGUMENTS),
            )
            require(
                name not in REPLACED or name in free,
                where,
                "flatout passes this argument",
                hint=f"Set {REPLACED.get(name)} instead.",
            )
        epochs = self.trainer.get("max_epochs")
        is_count = epochs is None or (isinstance(epochs, int) and epochs >= 1)
        require(is_count, "trainer.max_epochs", f"{epochs}", allowed="a whole number, 1 or more")
        for name, value in self.trainer.items():
            _require_fitting(name, value)
        strategy = self.trainer.get("strategy")
        require(
            not isinstance(strategy, str) or strategy in strategies,
            "trainer.strategy",
            f"{strategy}",
            allowed=", ".join(strategies),
            hint=did_you_mean(str(strategy), strategies),
        )

    @property
    def is_sharded(self) -> bool:
        """Whether each rank keeps a slice of each weight (FSDP)."""
        return self.trainer.get("strategy") == "fsdp"


def _require_lightning(key: str, part: object) -> None:
    """Refuse a part of `pytorch_lightning`: runs are trained by `lightning`."""
    for kind in (L.LightningModule, L.LightningDataModule, L.Callback):
        require(
            isinstance(part, kind) or not isinstance(part, either(kind)),
            key,
            f"{type(part).__name__} is a {kind.__name__} of pytorch_lightning, not of lightning",
            hint="Write import lightning as L in its file, or use flatout's parts in your Trainer.",
        )


def _require_own_parts(module: object, data: object) -> None:
    """Refuse a module and a DataModule that do not fit, or that lack a hook they need."""
    is_own_module = isinstance(module, L.LightningModule)
    is_data = isinstance(data, L.LightningDataModule)
    require(
        is_data or not isinstance(data, L.LightningModule),
        "data",
        f"{type(data).__name__} is no LightningDataModule",
        hint=(
            "Set data._target_ to your LightningDataModule, or data=headlines for data of flatout."
        ),
    )
    # A task of flatout reads batches of flatout's data only; your own module may read them, too.
    is_own_data = is_data and not isinstance(data, StoreData)
    reads_our_batches = not is_own_module or isinstance(module, Task)
    kind = module.task if isinstance(module, TaskClass) else type(module)
    name = kind.__name__.removesuffix("Config")
    require(
        not (reads_our_batches and is_own_data),
        "task",
        f"{name} reads the batches of flatout's DataModules, and {type(data).__name__} is your own",
        hint="Set task._target_ to your LightningModule.",
    )
    if is_own_module:
        _require_hook("task", module, "training_step", "the loss of a batch")
        _require_hook("task", module, "configure_optimizers", "the optimizer")
    if is_own_data:
        _require_hook("data", data, "train_dataloader", "a DataLoader of the training rows")


def _require_no_optimizer(optim: OptimConfig) -> None:
    """Refuse settings of an optimizer beside a module of the user's own: they would do nothing."""
    usual = OptimConfig()
    for part in fields(OptimConfig):
        key = OWN if part.name == "optimizer" else f"optim.{part.name}"
        is_usual = getattr(optim, part.name) == getattr(usual, part.name)
        require(
            is_usual or part.name in _SERVES_OWN_PARTS,
            key,
            "a module of your own makes its optimizer itself",
            hint="Leave it out, and set it in your configure_optimizers.",
        )


def _require_hook(key: str, part: object, hook: str, returns: str) -> None:
    """Refuse a part that does not override a method of its Lightning base."""
    is_defined = getattr(type(part), hook) is not getattr(_BASES[key], hook)
    require(
        is_defined,
        key,
        f"{type(part).__name__} has no {hook}",
        hint=f"Define it: it returns {returns}.",
    )


def _require_fitting(name: str, value: object) -> None:
    """Refuse a value that is no number, no switch or no list where the Trainer's argument is one.

    Lightning itself meets some of them in the middle of a run.
    """
    annotation = TRAINER_ARGUMENTS[name].annotation
    kinds = set(typing.get_args(annotation) or (annotation,)) - {NoneType}
    is_fitting = not isinstance(value, list) or "list[" in str(annotation)
    allowed = "a single value"
    if kinds == {bool}:
        is_fitting = isinstance(value, bool)
        allowed = "true or false"
    elif kinds <= {int, float, bool}:
        is_endless = isinstance(value, int) and abs(value) > LARGEST_SEED
        is_fitting = isinstance(value, int | float) and not is_endless and math.isfinite(value)
        allowed = "a number"
    require(value is None or is_fitting, f"trainer.{name}", repr(value), allowed=allowed)
