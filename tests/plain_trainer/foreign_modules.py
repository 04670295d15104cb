"""Modules that know nothing of flatout, each with loaders: what captured steps have to serve or to
leave plain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

RANDOM = torch.Generator().manual_seed(1)
INPUTS = torch.randn(48, 6, generator=RANDOM)
LABELS = (INPUTS.sum(1) > 0).long()
ROWS = 8


def rows_as_dicts(rows: list[int]) -> dict[str, Any]:
    return {
        "inputs": INPUTS[rows],
        "labels": LABELS[rows],
        "scale": 0.5,
        "name": "train",
    }


def rows_as_pair(rows: list[int]) -> tuple[Tensor, Tensor]:
    return INPUTS[rows], LABELS[rows]


class Named(NamedTuple):
    inputs: Tensor
    labels: Tensor


@dataclass
class Typed:
    inputs: Tensor
    rest: list[Named]


class Foreign(L.LightningModule):
    """A small classifier that logs nothing; the cases override what they are about."""

    collate: Callable[[list[int]], Any] = staticmethod(rows_as_pair)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def loss_of(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(inputs), labels)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(*batch)

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=0.01, fused=True)

    def train_dataloader(self) -> Any:
        rows: Any = list(range(len(INPUTS)))
        return DataLoader(rows, ROWS, shuffle=True, collate_fn=type(self).collate)


# Served by replays.


class ResNet(Foreign):
    """Convolutions, batch norm, a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Conv1d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 2)

    def loss_of(self, inputs: Tensor, labels: Tensor) -> Tensor:
        hidden = self.first(inputs.unsqueeze(1))
        hidden = hidden + F.relu(self.second(F.relu(self.norm(hidden))))
        return F.cross_entropy(self.head(hidden.mean(2)), labels)


class Logs(Foreign):
    """Logs each step, two values in two ways, and returns more than a loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        outputs = self.net(inputs)
        loss = F.cross_entropy(outputs, labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        right = (outputs.argmax(1) == labels).float().mean()
        self.log_dict({"right": right}, on_step=True)
        return {"loss": loss, "outputs": outputs, "rows": len(labels)}


class Drops(Foreign):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 2))


class Schedules(Foreign):
    """The rate of each step is another; clipping has none."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9, fused=True)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}]


class Decays(Logs):
    """AdamW by a schedule, with dropout: its rates are rounded on a device that captures."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 2))

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=0.01, fused=True)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}]


class PlainSGD(Foreign):
    """An optimizer that keeps no state."""

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1, fused=True)


class Frozen(Foreign):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        trained = [weight for weight in self.parameters() if weight.requires_grad]
        return Adam(trained, lr=0.01, fused=True)


class Bags(Foreign):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(10, 4)
        self.head = nn.Linear(4, 2)

    def loss_of(self, inputs: Tensor, labels: Tensor) -> Tensor:
        words = (inputs.abs() * 4).long().clamp_max(9)
        return F.cross_entropy(self.head(self.bags(words)), labels)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: Tensor) -> Tensor:
        context.save_for_backward(inputs)
        return inputs * inputs

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (inputs,) = context.saved_tensors
        return 2 * inputs * gradient


class OwnFunction(Foreign):
    def loss_of(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(Square.apply(self.net(inputs)), labels)


class Recurrent(Foreign):
    """An LSTM lists its weights twice."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(1, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def loss_of(self, inputs: Tensor, labels: Tensor) -> Tensor:
        states, _ = self.rnn(inputs[:, :2].unsqueeze(2))
        return F.cross_entropy(self.head(states[:, -1]), labels)


class Follows(Foreign):
    """A second network follows the weights of the first, within the step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 2)
        self.second = nn.Linear(6, 2).requires_grad_(False)

    def loss_of(self, inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            self.second.weight.mul_(0.9).add_(self.first.weight, alpha=0.1)
        outputs = self.first(inputs)
        distance = (outputs - self.second(inputs)).square().mean()
        return F.cross_entropy(outputs, labels) + distance


class OfDicts(Foreign):
    collate = staticmethod(rows_as_dicts)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return batch["scale"] * self.loss_of(batch["inputs"], batch["labels"])


class OfDataclasses(Foreign):
    @staticmethod
    def collate(rows: list[int]) -> Typed:
        return Typed(INPUTS[rows], [Named(INPUTS[rows], LABELS[rows])])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(batch.inputs + batch.rest[0].inputs, batch.rest[0].labels)


class Losses(Foreign):
    """Several losses, weighted by a buffer, of two networks."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 6)
        self.register_buffer("weights", torch.tensor([0.3, 0.7]))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        losses = torch.stack(
            [
                self.loss_of(inputs, labels),
                self.other(inputs).square().mean(),
            ]
        )
        return (losses * self.weights).sum()


class GoesOn(Foreign):
    """Hands the number of the batch on, and never uses it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.shared_step(batch, batch_idx, "train")

    def shared_step(self, batch: Any, batch_idx: int, name: str) -> Any:
        return self.loss_of(*batch)


class Shapes(Foreign):
    """The last batch of an epoch has fewer rows."""

    def train_dataloader(self) -> Any:
        rows: Any = list(range(44))
        return DataLoader(rows, ROWS, collate_fn=rows_as_pair)


class Changes(Foreign):
    """A number that is another in each epoch: the step is captured again."""

    beta = 0.1
    net: nn.Sequential

    def on_train_epoch_start(self) -> None:
        self.beta = 0.1 * (1 + self.current_epoch // 2)

    def loss_of(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return (
            super().loss_of(inputs, labels) + self.beta * next(self.net.parameters()).square().sum()
        )


class Groups(Logs):
    """Two groups of weights, and validations between the steps."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss_of(*batch))

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def configure_optimizers(self) -> Any:
        first, *rest = self.net.parameters()
        groups = [{"params": [first], "lr": 0.05}, {"params": rest, "weight_decay": 0.0}]
        return AdamW(groups, lr=0.01, fused=True)


class Accumulates(Foreign):
    """Steps have two batches each from the third epoch on."""

    def configure_callbacks(self) -> Any:
        return [GradientAccumulationScheduler({0: 1, 2: 2})]


class Thaw(BaseFinetuning):
    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Thaws)
        self.freeze(pl_module.net[0])

    def finetune_function(
        self, pl_module: L.LightningModule, epoch: int, optimizer: Optimizer
    ) -> None:
        assert isinstance(pl_module, Thaws)
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.01)


class Thaws(Frozen):
    """A callback of Lightning's thaws a layer, whose weights become another group."""

    def configure_callbacks(self) -> Any:
        return [Thaw()]


class ManyShapes(Foreign):
    """Six shapes, of which few come often enough."""

    @staticmethod
    def collate(rows: list[int]) -> Any:
        return INPUTS[rows], LABELS[rows], torch.ones(1 + rows[0] % 6)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(*batch[:2]) * batch[2].mean()


# Left plain, each with a reason.


class Adversaries(Foreign):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(*batch) + self.judge(batch[0]).mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [AdamW(part.parameters(), fused=True) for part in (self.net, self.judge)]


class NumberedBatches(Foreign):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        # in a batch that no plain step has watched
        return self.loss_of(*batch) * (2 if batch_idx == 4 else 1)


class ReadsLoss(Foreign):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(*batch)
        return loss * (2 if loss.item() > 0.7 else 1)


class LogsPlainNumber(Foreign):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("share", batch_idx / 10)
        return self.loss_of(*batch)


class Counts(Foreign):
    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return self.loss_of(*batch) / self.steps


class Keeps(Foreign):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(*batch)
        self.kept.append(loss.detach())
        return loss


class ReadsEpoch(Foreign):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(*batch) * (1 + self.current_epoch)


class DrawsOnHost(Foreign):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(*batch) * np.random.rand()


class Measures(Foreign):
    """A metric of torchmetrics, which counts on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.right = MulticlassAccuracy(2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.right(self.net(batch[0]), batch[1])
        return self.loss_of(*batch)


class OutsideTensor(Foreign):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not hasattr(self, "scale"):
            self.scale = [torch.ones_like(batch[0][0])]
        return self.loss_of(batch[0] * self.scale[0], batch[1])


class CopiesFromHost(Foreign):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(*batch) * torch.tensor(0.5, device=self.device)


COUNTED = [0]


class CountsElsewhere(Foreign):
    """A counter that the module does not hold."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        COUNTED[0] += 1
        return self.loss_of(*batch) * (1 / COUNTED[0])


class StepsBack(Foreign):
    """Adversarial training, whose own backward pass adds to gradients of the step before."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs = batch[0].clone().requires_grad_()
        self.loss_of(inputs, batch[1]).backward()
        return self.loss_of(inputs.detach() + 0.1 * inputs.grad.sign(), batch[1])


class Recomputes(Foreign):
    def loss_of(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(checkpoint(self.net, inputs, use_reentrant=False), labels)


class ChangesBatch(Foreign):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(2)
        return self.loss_of(*batch)


class OwnClipping(Foreign):
    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class NotFused(Foreign):
    def configure_optimizers(self) -> Any:
        return Adam(self.parameters(), lr=0.01)


class StepsByClosure(Foreign):
    def configure_optimizers(self) -> Any:
        return LBFGS(self.parameters(), lr=0.01)


class Cycles(Foreign):
    """A schedule that changes more than the rate."""

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=0.01, fused=True)
        return [optimizer], [
            {
                "scheduler": OneCycleLR(optimizer, 0.01, total_steps=100),
                "interval": "step",
            }
        ]


class OddBatches(Foreign):
    @staticmethod
    def collate(rows: list[int]) -> Any:
        return INPUTS[rows], LABELS[rows], {len(rows)}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(*batch[:2])


@dataclass(frozen=True)
class Case:
    """A module, settings of its Trainer, and why its steps are not replayed; empty: they are."""

    make: Callable[[], L.LightningModule]
    settings: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    least: int = 12  # replays of 18 steps, if any
    is_clipped: bool = False
    """Whether gradients are clipped by norm, which `FastLoop` rounds in its own way."""


SERVED = {
    "a small ResNet with batch norm": Case(ResNet),
    "values that are logged": Case(Logs),
    "dropout": Case(Drops),
    "a schedule by step": Case(Schedules),
    "SGD without momentum": Case(PlainSGD),
    "frozen parts": Case(Frozen),
    "an embedding bag": Case(Bags),
    "an autograd function": Case(OwnFunction),
    "an LSTM": Case(Recurrent),
    "a network that follows another": Case(Follows),
    "dictionaries": Case(OfDicts),
    "dataclasses": Case(OfDataclasses),
    "several losses": Case(Losses),
    "a batch number that is handed on": Case(GoesOn),
    "a smaller last batch": Case(Shapes),
    "a number of each epoch": Case(Changes),
    "groups and validations": Case(Groups),
    "accumulation that begins later": Case(Accumulates, least=9),
    "a layer that thaws": Case(Thaws, least=9),
    "many shapes": Case(ManyShapes, least=1),
    "mixed precision": Case(Foreign, {"precision": "bf16"}),
    "mixed precision with a scaler": Case(Foreign, {"precision": "fp16"}),
    "clipping": Case(Foreign, {"gradient_clip_val": 0.1}, is_clipped=True),
}
PLAIN = {
    "manual optimisation": Case(
        Adversaries,
        reason="graph: on, but Adversaries uses manual optimisation",
    ),
    "gradient accumulation": Case(
        Foreign,
        {"accumulate_grad_batches": 2},
        reason="on, but a step has several batches",
    ),
    "own clipping": Case(OwnClipping, reason="on, but gradients are clipped by the module"),
    "an optimizer that is not fused": Case(NotFused, reason="as it lacks fused=True"),
    "an optimizer with a closure": Case(
        StepsByClosure,
        reason="graph: on, but LBFGS may want the loss computed again while it steps",
    ),
    "the number of the batch": Case(
        NumberedBatches,
        reason="off, training_step uses the number of its batch",
    ),
    "item()": Case(
        ReadsLoss,
        reason="off, the host reads a number of the device at plain_trainer",
    ),
    "a plain number that is logged": Case(
        LogsPlainNumber,
        reason="self.log('share') gets a plain number at plain_trainer",
    ),
    "a counter": Case(Counts, reason="training_step changes self.steps"),
    "a list": Case(Keeps, reason="training_step changes self.kept"),
    "the epoch": Case(
        ReadsEpoch,
        reason="training_step reads current_epoch of the Trainer at",
    ),
    "numpy's random numbers": Case(
        DrawsOnHost,
        reason="training_step changes the random numbers of numpy",
    ),
    "a metric": Case(Measures, reason="training_step changes self.right."),
    "a tensor of its own": Case(
        OutsideTensor,
        reason="a tensor that is neither weight nor buffer is read at",
    ),
    "a number for the device": Case(
        CopiesFromHost,
        reason="numbers of the host are copied to the device at",
    ),
    "a counter elsewhere": Case(
        CountsElsewhere,
        reason="mul gets another plain number in each step at",
    ),
    "a backward pass of its own": Case(
        StepsBack,
        reason="neither weight nor buffer is read at a line of the backward pass",
    ),
    "activations that are computed again": Case(Recomputes, reason="its capture failed ("),
    "a changed batch": Case(ChangesBatch, reason="training_step changes its batch"),
    "a cycle of betas": Case(
        Cycles, reason="another value of optimizer.param_groups[0].betas in each step"
    ),
    "a batch with a set": Case(OddBatches, reason="no step, 18 that hold a set"),
}
CASES = {**SERVED, **PLAIN}
