"""The trainings of the contract: small modules and settings of a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
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
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from flatout.callbacks import (
    ProgressLine,
)
from tests.plain_trainer.fast_loop_cases import (
    Adversarial,
    Clipping,
    Doubled,
    Halved,
    NoneNowAndThen,
    StepOfItsOwn,
    Thaws,
    Twice,
    WithExtras,
)

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

    def loss_of(self, batch: list[Tensor]) -> Tensor:
        numbers = batch[0].to(self.layer.weight.dtype)
        return nn.functional.cross_entropy(self.head(self.drop(self.layer(numbers))), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.log("loss", loss.detach(), on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
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

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            step(self, super().training_step(batch, batch_idx), batch_idx)

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(each.parameters(), lr=0.1)
                for each in (self.layer, self.head)[:optimizers]
            ]

    return Manual


def step_each_batch(module: Module, loss: Tensor, batch_idx: int) -> None:
    optimizers = module.optimizers()
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    for optimizer in optimizers:
        optimizer.zero_grad()
    module.manual_backward(loss)
    for optimizer in optimizers:
        optimizer.step()


def step_every_third(module: Module, loss: Tensor, batch_idx: int) -> None:
    module.manual_backward(loss)
    if batch_idx % 3 == 2:
        module.optimizers().step()
        module.optimizers().zero_grad()


class Normed(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4))

    def loss_of(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layer(batch[0])), batch[1])


class OwnHooks(Module):
    """Overrides what Lightning calls in a step."""

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("zeroed", float(self.global_step))

    def on_after_backward(self) -> None:
        self.log_dict(
            {f"norm_{name}": weight.grad.norm() for name, weight in self.named_parameters()}
        )

    def lr_scheduler_step(self, scheduler: schedules.LRScheduler, metric: object) -> None:
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [
            {"scheduler": schedules.ExponentialLR(optimizer, 0.9), "interval": "step"}
        ]


class OwnZero(Module):
    def optimizer_zero_grad(
        self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer
    ) -> None:
        optimizer.zero_grad(set_to_none=False)


class OwnBackward(Module):
    def backward(self, loss: Tensor) -> None:
        (2 * loss).backward()


class Skips(Module):
    """Ends the second epoch at its third batch."""

    def on_train_batch_start(self, batch: object, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 1 and batch_idx == 2 else None


class OfIterator(Module):
    """Takes the loader's iterator, as Lightning allows."""

    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        return self.loss_of(batch)


class OfTwoLoaders(Module):
    def training_step(self, batch: dict[str, list[Tensor]], batch_idx: int) -> Tensor:
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

    def loss_of(self, batch: list[Tensor]) -> Tensor:
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
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
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
    callbacks: Callable[[], list[L.Callback]] = list,
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
