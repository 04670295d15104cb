"""The contract of the parts: a training with some of them is the training without them.

Small modules and settings of a Trainer, each trained plain and with observers, with the fast loop,
with exact checkpoints and with all of them, and resumed from a checkpoint. Compared are the hooks
in their order with the step, the counters and the gradients that each sees, logged values with
their steps, outputs, Lightning's own checkpoint, weights, random numbers, warnings and errors: all
to the bit, those of the fast loop to 1e-6. `docs/attached.md` lists what differs on purpose.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from flatout.callbacks import (
    ExactCheckpoint,
    HardwareMonitor,
    ProfileSteps,
    ProgressLine,
    StepTimer,
    Throughput,
    Verdict,
)
from flatout.engine import FastLoop
from tests.params import at_once
from tests.plain_trainer.test_fast_loop import (
    Adversarial,
    Clipping,
    Doubled,
    Halved,
    NoneNowAndThen,
    StepOfItsOwn,
    Twice,
    WithExtras,
)
from tests.same import same
from tests.trainers import QUIET

PARTS: dict[str, Callable[[Path], list[L.Callback]]] = {
    "observers": lambda folder: [
        StepTimer(1),
        Throughput(2),
        HardwareMonitor(1, every_s=0.005),
        Verdict(),
    ],
    "fast loop": lambda folder: [FastLoop()],
    "exact checkpoint": lambda folder: [
        ExactCheckpoint(folder / "kept", every_minutes=None, keep=99)
    ],
    "all": lambda folder: [each for name in TOGETHER for each in PARTS[name](folder)],
    "profile": lambda folder: [ProfileSteps(wait=1, warmup=1, active=1, folder=folder, say=str)],
}
TOGETHER = ("observers", "fast loop", "exact checkpoint")
PROFILED = ("plain", "accumulation", "a stream", "two optimizers")
"""Each start of torch's profiler takes long."""
PREFIX = f"contract-{os.getpid()}-"
OURS = ("time/", "speed/", "host/", "gpu/")
HOOKS = [
    name
    for name in vars(L.Callback)
    if (name.startswith("on_") and "checkpoint" not in name) or name in ("setup", "teardown")
]
ROWS = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
TABLE = TensorDataset(ROWS, (ROWS.sum(1) > 0).long())


class Module(L.LightningModule):
    """A layer with dropout, which logs its loss; cases override what they are about."""

    lr = 0.1
    batch_size = 4
    val_loaders = 1

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)
        self.drop = nn.Dropout(0.2)

    def loss_of(self, batch: Any) -> Tensor:
        numbers = batch[0].to(self.layer.weight.dtype)
        return nn.functional.cross_entropy(self.head(self.drop(self.layer(numbers))), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.log("loss", loss.detach(), on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss_of(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def train_dataloader(self) -> Any:
        return DataLoader(TABLE, self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return [DataLoader(TABLE, 10) for _ in range(self.val_loaders)]


def stepping(make: Callable[[Module], Any]) -> type[Module]:
    """A module with these optimizers and schedules."""
    return type("Stepping", (Module,), {"configure_optimizers": make})


def manual(step: Callable[[Any, Tensor, int], None], optimizers: int = 1) -> type[Module]:
    """A module that takes its own steps."""

    class Manual(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            step(self, super().training_step(batch, batch_idx), batch_idx)

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(each.parameters(), lr=0.1)
                for each in (self.layer, self.head)[:optimizers]
            ]

    return Manual


def step_each_batch(module: Any, loss: Tensor, batch_idx: int) -> None:
    optimizers = module.optimizers()
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    for optimizer in optimizers:
        optimizer.zero_grad()
    module.manual_backward(loss)
    for optimizer in optimizers:
        optimizer.step()


def step_every_third(module: Any, loss: Tensor, batch_idx: int) -> None:
    module.manual_backward(loss)
    if batch_idx % 3 == 2:
        module.optimizers().step()
        module.optimizers().zero_grad()


class Normed(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4))

    def loss_of(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layer(batch[0])), batch[1])


class OwnHooks(Module):
    """Overrides what Lightning calls in a step."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("zeroed", float(self.global_step))

    def on_after_backward(self) -> None:
        self.log_dict(
            {f"norm_{name}": weight.grad.norm() for name, weight in self.named_parameters()}
        )

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [
            {"scheduler": schedules.ExponentialLR(optimizer, 0.9), "interval": "step"}
        ]


class OwnZero(Module):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class OwnBackward(Module):
    def backward(self, loss: Tensor) -> None:
        (2 * loss).backward()


class Skips(Module):
    """Ends the second epoch at its third batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 1 and batch_idx == 2 else None


class OfIterator(Module):
    """Takes the loader's iterator, as Lightning allows."""

    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        return self.loss_of(batch)


class OfTwoLoaders(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_of(batch["one"]) + self.loss_of(batch["two"])

    def train_dataloader(self) -> Any:
        return {"one": DataLoader(TABLE, 4), "two": DataLoader(TABLE, 7, shuffle=True)}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(list(zip(*TABLE.tensors, strict=True)))


class OfStream(Module):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), 4)


class Shared(Module):
    """Two layers of one weight, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(3, 4)
        self.other.weight = self.layer.weight
        self.head.bias.requires_grad_(False)

    def loss_of(self, batch: Any) -> Tensor:
        return super().loss_of(batch) + self.other(batch[0]).square().mean()


class Keeping(Module):
    """Keeps a state and hyperparameters of its own in checkpoints, and brings a callback."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]

    def configure_callbacks(self) -> Any:
        return [LearningRateMonitor("step")]


class Thaws(BackboneFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layer)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layer, optimizer, lr=0.1)


class ThawedLater(Module):
    @property
    def backbone(self) -> nn.Module:
        return self.layer

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)


class Fails(L.Callback):
    """Raises in the third call of a hook, or in its only one."""

    def __init__(self, hook: str, after: int) -> None:
        self.left = after
        vars(self)[hook] = self.count

    def count(self, *_: Any, **__: Any) -> None:
        self.left -= 1
        if not self.left:
            raise RuntimeError("planted")


class Stops(L.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= 3


def on_plateau(module: Module, **settings: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    schedule = schedules.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
    return [optimizer], [{"scheduler": schedule, "monitor": "val_loss", **settings}]


def by_schedule(make: Callable[[Any, Module], Any], **settings: Any) -> type[Module]:
    def configure(module: Module) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": make(optimizer, module), **settings}]

    return stepping(configure)


def named(base: type, **members: Any) -> type[Module]:
    """A test's own module with this file's loaders."""
    return type(base.__name__, (base, Module), members)


def in_groups(module: Module) -> Any:
    groups = [
        {"params": module.layer.parameters(), "lr": 0.01},
        {"params": module.head.parameters()},
    ]
    return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """A module, and settings of the Trainer; callbacks are made anew for each training."""

    module: Callable[[], L.LightningModule] = Module
    callbacks: Callable[[], list[L.Callback]] = list
    settings: dict[str, Any] = field(default_factory=dict)
    resumes: bool = True
    """Whether a checkpoint lies at the end of the first epoch, and logged values follow it."""


def case(
    module: Callable[[], Any] = Module,
    callbacks: Any = list,
    *,
    resumes: bool = True,
    **settings: Any,
) -> Case:
    return Case(module, callbacks, settings, resumes)


def failing(hook: str, after: int = 3) -> Case:
    return case(callbacks=lambda: [Fails(hook, after)], resumes=False)


CASES = {
    "plain": case(),
    "Adam": case(stepping(lambda module: torch.optim.Adam(module.parameters(), lr=0.01))),
    "groups": case(stepping(in_groups)),
    "RMSprop": case(
        stepping(lambda module: torch.optim.RMSprop(module.parameters(), lr=0.01, momentum=0.5))
    ),
    "LBFGS": case(
        stepping(lambda module: torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3))
    ),
    "an optimizer that asks twice": case(
        stepping(lambda module: Twice(module.parameters(), lr=0.1))
    ),
    "no optimizer": case(stepping(lambda module: None)),
    "two optimizers": case(manual(step_each_batch, 2)),
    "manual": case(manual(step_each_batch)),
    "manual, every third batch": case(manual(step_every_third)),
    "plateau by epoch": case(stepping(on_plateau)),
    "plateau by step": case(
        stepping(lambda module: on_plateau(module, interval="step", frequency=5))
    ),
    "schedule by step": case(
        by_schedule(lambda optimizer, _: schedules.StepLR(optimizer, 2), interval="step")
    ),
    "schedule by epoch": case(
        by_schedule(lambda optimizer, _: schedules.ExponentialLR(optimizer, 0.5))
    ),
    "one cycle": case(
        by_schedule(
            lambda optimizer, module: schedules.OneCycleLR(
                optimizer, 0.1, total_steps=module.trainer.estimated_stepping_batches
            ),
            interval="step",
        )
    ),
    "dictionary": case(named(WithExtras)),
    "None": case(named(NoneNowAndThen)),
    "None, accumulating": case(named(NoneNowAndThen), accumulate_grad_batches=2),
    "batch norm": case(Normed),
    "own hooks": case(OwnHooks),
    "own clipping": case(named(Clipping)),
    "own optimizer_step": case(named(StepOfItsOwn)),
    "own zero_grad": case(OwnZero),
    "own backward": case(OwnBackward),
    "backward in a step": case(named(Adversarial), resumes=False),
    "an epoch cut short": case(Skips),
    "the loader's iterator": case(OfIterator),
    "two training loaders": case(OfTwoLoaders),
    "several validation loaders": case(type("Two", (Module,), {"val_loaders": 2})),
    "a stream": case(OfStream),
    "shared and frozen weights": case(Shared),
    "own state": case(Keeping),
    "no validation": case(
        type("None_", (Module,), {"validation_step": L.LightningModule.validation_step}),
        resumes=False,
    ),
    "accumulation": case(accumulate_grad_batches=2),
    "accumulation and clipping": case(accumulate_grad_batches=3, gradient_clip_val=0.1),
    "schedule of accumulation": case(
        callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 2})]
    ),
    "clipping by norm": case(gradient_clip_val=0.1),
    "clipping by value": case(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "validation each second batch": case(val_check_interval=2, resumes=False),
    "validation each half": case(val_check_interval=0.5, resumes=False),
    "validation each second epoch": case(check_val_every_n_epoch=2, resumes=False),
    "sanity checks": case(num_sanity_val_steps=2),
    "limits": case(limit_train_batches=3, limit_val_batches=1),
    "overfitting": case(overfit_batches=2),
    "loaders anew": case(reload_dataloaders_every_n_epochs=1),
    "steps": case(max_steps=7, max_epochs=-1),
    "a time": case(max_time="00:00:10:00"),
    "a quick look": case(fast_dev_run=3, resumes=False),
    "bf16": case(precision="bf16-mixed"),
    "float64": case(precision="64-true"),
    "own precision": case(plugins=Doubled),
    "own strategy": case(strategy=Halved),
    "anomalies": case(detect_anomaly=True),
    "no inference mode": case(inference_mode=False),
    "weight averaging": case(
        callbacks=lambda: [StochasticWeightAveraging(0.05, swa_epoch_start=1)]
    ),
    "running mean of weights": case(callbacks=lambda: [EMAWeightAveraging(decay=0.5)]),
    "thawing": case(ThawedLater, callbacks=lambda: [Thaws()]),
    "early end": case(
        callbacks=lambda: [EarlyStopping("val_loss", patience=1, min_delta=9.0)], max_epochs=4
    ),
    "a stop in a batch": case(callbacks=lambda: [Stops()], resumes=False),
    "a timer": case(callbacks=lambda: [Timer("00:00:10:00"), LearningRateMonitor()]),
    "a bar": case(callbacks=lambda: [TQDMProgressBar()], enable_progress_bar=True),
    "our line": case(callbacks=lambda: [ProgressLine(2, say=str)], enable_progress_bar=True),
    "a rich bar": case(callbacks=lambda: [RichProgressBar()], enable_progress_bar=True),
    "functions as hooks": case(
        callbacks=lambda: [
            LambdaCallback(on_before_zero_grad=lambda *_: None, on_before_backward=lambda *_: None)
        ]
    ),
    "Lightning's checkpoints": case(
        callbacks=lambda: [ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)]
    ),
    "a search for a rate": case(
        callbacks=lambda: [LearningRateFinder(num_training_steps=5)], resumes=False
    ),
    "a search for a size": case(
        callbacks=lambda: [BatchSizeFinder(init_val=2, steps_per_trial=1, max_trials=1)],
        resumes=False,
    ),
    "barebones": case(barebones=True, resumes=False),
    **{
        f"an error in {hook}": failing(hook) for hook in ("on_before_backward", "on_after_backward")
    },
    **{
        f"an error in {hook}": failing(hook)
        for hook in ("on_train_batch_start", "on_train_batch_end")
    },
    **{
        f"an error in {hook}": failing(hook)
        for hook in ("on_before_optimizer_step", "on_before_zero_grad")
    },
    **{
        f"an error in {hook}": failing(hook, 1)
        for hook in ("on_fit_start", "on_train_start", "on_validation_start")
    },
    **{
        f"an error in {hook}": failing(hook, 1)
        for hook in ("on_train_epoch_end", "on_train_end", "on_fit_end")
    },
    **{
        f"an error in {hook}": failing(hook, 1)
        for hook in ("setup", "teardown", "on_train_epoch_start")
    },
    **{
        f"an error in {hook}": failing(hook, 1)
        for hook in ("on_validation_epoch_start", "on_validation_epoch_end")
    },
    **{
        f"an error in {hook}": failing(hook)
        for hook in ("on_validation_batch_start", "on_validation_batch_end")
    },
    "an error in on_validation_end": failing("on_validation_end", 1),
}


WITH_FAST_LOOP = ("fast loop", "all")
LEFT_TO_LIGHTNING = {
    *("LBFGS", "an optimizer that asks twice", "no optimizer", "own precision", "own strategy"),
    *(
        "two optimizers",
        "manual",
        "manual, every third batch",
        "own optimizer_step",
        "own zero_grad",
    ),
}
"""Whose steps Lightning's own loop takes although a fast loop is there."""
REFUSED = {("barebones", "exact checkpoint"), ("barebones", "all")}
"""Lightning itself refuses them."""
SAID_ONCE = re.compile("`training_step` returned `None`|Checkpoint directory")
"""Warnings that Lightning gives once in a process, or that name the folder."""


class InMemory(Logger):
    """What Lightning logs, with its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []
        self.hyperparameters = ""

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *arguments: Any, **more: Any) -> None:
        self.hyperparameters = str(arguments)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if kept := {name: value for name, value in metrics.items() if not name.startswith(OURS)}:
            self.rows.append((step, kept))


def copies_of_gradients(module: L.LightningModule) -> list[Tensor | None]:
    return [None if each.grad is None else each.grad.clone() for each in module.parameters()]


class Spy(L.Callback):
    """Notes each hook with the step, the counters and the gradients that it sees."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.outputs: list[Any] = []

    def note(self, name: str, trainer: Any, module: Any, *rest: Any) -> None:
        is_of_step = name.startswith(("on_before", "on_after", "on_train_batch"))
        gradients = copies_of_gradients(module) if is_of_step else []
        self.seen.append(
            (name, trainer.global_step, counts_of(trainer) if is_of_step else (), gradients)
        )
        if name == "on_train_batch_end":
            self.outputs.append(copy.deepcopy(rest[0]))


def counts_of(trainer: Any) -> tuple[Any, ...]:
    """The counters that a step moves; all of them are compared at the end."""
    loop = trainer.fit_loop.epoch_loop
    steps = loop.automatic_optimization.optim_progress.optimizer
    counted = (
        loop.batch_progress,
        loop.manual_optimization.optim_step_progress,
        steps.step,
        steps.zero_grad,
    )
    return tuple(
        tuple(vars(part).values()) for each in counted for part in (each.current, each.total)
    )


def noting(name: str) -> Callable[..., None]:
    return lambda self, *arguments, **_: self.note(name, *arguments)


for _hook in HOOKS:
    setattr(Spy, _hook, noting(_hook))


@dataclass
class Training:
    """What there is to see of a training."""

    hooks: list[Any]
    outputs: list[Any]
    logged: list[Any]
    hyperparameters: str
    metrics: dict[str, Any]
    weights: dict[str, Tensor]
    counts: dict[str, Any]
    checkpoint: dict[str, Any] | None
    can_be_pickled: bool
    random: Tensor
    warned: list[str]
    error: str | None
    folder: Path


@pytest.fixture(scope="module", autouse=True)
def without_folders() -> Iterator[None]:
    yield
    for folder in Path(gettempdir()).glob(f"{PREFIX}*"):
        shutil.rmtree(folder)


@cache
def train(name: str, part: str | None, *more: L.Callback, resume: Path | None = None) -> Training:
    asked = CASES[name]
    folder = Path(mkdtemp(prefix=PREFIX))
    logger = InMemory()
    spy = Spy()
    L.seed_everything(3, verbose=False)
    module = asked.module()
    theirs = asked.callbacks()
    ours = [] if part is None else PARTS[part](folder)
    given: dict[str, Any] = QUIET | {
        "max_epochs": 2,
        "accelerator": "cpu",
        "log_every_n_steps": 1,
        "logger": logger,
        "num_sanity_val_steps": 0,
    }
    given["enable_checkpointing"] = any(
        isinstance(each, ModelCheckpoint | ExactCheckpoint) for each in [*theirs, *ours]
    )
    given |= {
        key: value() if isinstance(value, type) else value for key, value in asked.settings.items()
    }
    if given.get("barebones"):
        given = {"barebones": True, "max_epochs": 2, "accelerator": "cpu"}
    error = None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer = L.Trainer(
            **given, callbacks=[*ours, spy, *theirs, *more], default_root_dir=folder
        )
        try:
            trainer.fit(module, ckpt_path=resume)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    can_save = (
        error is None and not given.get("barebones") and trainer.strategy.optimizers is not None
    )
    return Training(
        hooks=spy.seen,
        outputs=spy.outputs,
        logged=logger.rows,
        hyperparameters=logger.hyperparameters,
        metrics=dict(trainer.callback_metrics),
        weights=copy.deepcopy(module.state_dict()),
        counts=copy.deepcopy(trainer.fit_loop.state_dict()),
        checkpoint=checkpoint_of(trainer, folder) if can_save else None,
        can_be_pickled=can_be_pickled(trainer),
        random=torch.get_rng_state(),
        warned=[words for each in warned if not SAID_ONCE.search(words := str(each.message))],
        error=error,
        folder=folder,
    )


def checkpoint_of(trainer: L.Trainer, folder: Path) -> dict[str, Any]:
    """Lightning's own checkpoint, without the states of our parts in it."""
    file = folder / "end.ckpt"
    trainer.save_checkpoint(file)
    found: dict[str, Any] = torch.load(file, weights_only=False)
    ours = [type(each).__name__ for make in PARTS.values() for each in make(folder)]
    found["callbacks"] = {key for key in found["callbacks"] if not key.startswith(tuple(ours))}
    return found


def can_be_pickled(trainer: L.Trainer) -> bool:
    try:
        pickle.dump(trainer, io.BytesIO())
    except (AttributeError, TypeError, pickle.PicklingError):
        return False
    return True


def differences(one: Training, other: Training, tolerance: float = 0.0) -> list[str]:
    """The names of what differs between two trainings."""
    names = [name for name in vars(one) if name != "folder"]
    limits = {"rtol": tolerance, "atol": tolerance, "float_rtol": 10 * tolerance}
    return [name for name in names if not same(getattr(one, name), getattr(other, name), **limits)]


class Meddles(L.Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        torch.rand(1)


def test_the_suite_sees_what_differs():
    found = differences(train("plain", None, Meddles()), train("plain", None))
    assert found == ["hooks", "outputs", "logged", "metrics", "weights", "checkpoint", "random"]


EACH = [(name, part) for name in CASES for part in PARTS if part != "profile" or name in PROFILED]


@pytest.mark.parametrize(
    ("name", "part"),
    at_once(
        *[each for each in EACH if each[1] == "all"][::4],
        *(each for each in EACH if each[0] in PROFILED),
        of=EACH,
        seconds=1,
    ),
)
def test_a_part_changes_nothing(name, part, capsys):
    plain = train(name, None)
    capsys.readouterr()
    if (name, part) in REFUSED:
        with pytest.raises(
            MisconfigurationException, match="found `ModelCheckpoint` in callbacks list"
        ):
            train(name, part)
        return
    found = train(name, part)
    assert [each[:2] for each in found.hooks] == [each[:2] for each in plain.hooks]
    assert differences(found, plain, 1e-6 if part in WITH_FAST_LOOP else 0.0) == []
    assert bool(plain.error) == name.startswith("an error")
    is_left = "Lightning's own loop trains" in capsys.readouterr().out
    assert is_left == (part in WITH_FAST_LOOP and name in LEFT_TO_LIGHTNING)


RESUMED = [name for name, asked in CASES.items() if asked.resumes]


@pytest.mark.parametrize("name", at_once(*RESUMED[::4], of=RESUMED, seconds=1))
def test_a_training_resumed_after_an_epoch_ends_as_the_whole_one(name):
    whole = train(name, "exact checkpoint")
    kept = sorted(
        int(path.name.removeprefix("step-")) for path in (whole.folder / "kept").glob("step-*")
    )
    again = train(name, "exact checkpoint", resume=whole.folder / "kept" / f"step-{kept[0]}")
    assert again.error is None and len(kept) > 1
    for part in ("weights", "metrics", "random"):
        assert same(getattr(again, part), getattr(whole, part)), part
    kept_of = [
        {name: each for name, each in (found.checkpoint or {}).items() if name != "loops"}
        for found in (again, whole)
    ]
    # counts within an epoch are set to those of its end, which nothing reads
    assert same(*kept_of)
    for part in ("logged", "outputs"):
        found = getattr(again, part)
        wanted = getattr(whole, part)
        assert 0 < len(found) < len(wanted), part
        assert same(found, wanted[len(wanted) - len(found) :]), part
