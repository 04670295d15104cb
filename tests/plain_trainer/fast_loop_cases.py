"""Modules and settings of a plain Trainer, under which the fast loop must change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from tests.callbacks.plain import Small


class Adversarial(Small):
    """A training step that calls `backward` on its own account, as FGSM does;
    validation does, too.
    """

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        nn.functional.cross_entropy(self.layer(inputs), batch[1]).backward()
        assert inputs.grad is not None
        return nn.functional.cross_entropy(
            self.layer(batch[0] + 0.3 * inputs.grad.sign()), batch[1]
        )

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        with torch.enable_grad():
            nn.functional.cross_entropy(self.layer(batch[0]), batch[1]).backward()


class WithExtras(Small):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return {
            "loss": super().training_step(batch, batch_idx),
            "rows": len(batch[0]),
            "first": batch[0][0],
        }


class NoneNowAndThen(Small):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else loss


class Clipping(Small):
    """Lightning's recipe that logs the norm of gradients, and clipping of its own."""

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        self.asked = gradient_clip_val, gradient_clip_algorithm
        assert self.layer.weight.grad is not None
        self.log("norm", self.layer.weight.grad.norm())
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log_dict(L.pytorch.utilities.grad_norm(self.layer, norm_type=2))


class Thaws(BackboneFinetuning):
    """Thaws a layer in the second epoch: its optimizer has another group then."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.layer)

    def finetune_function(
        self, pl_module: L.LightningModule, epoch: int, optimizer: torch.optim.Optimizer
    ) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layer, optimizer, lr=0.1)


class TwoLayers(Small):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.layer
        self.head = nn.Linear(2, 2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layer(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)


class StepOfItsOwn(Small):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        plain = self.optimizer_step

        def step(*arguments: Any, **more: Any) -> None:
            self.steps += 1
            plain(*arguments, **more)

        self.optimizer_step = step


class WithLBFGS(Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Twice(torch.optim.SGD):
    """An optimizer that wants the loss twice, as SAM does."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        super().step(closure)
        return super().step(closure)


class WithTwice(Small):
    def configure_optimizers(self) -> Any:
        return Twice(self.parameters(), lr=0.1)


class WithoutOptimizer(Small):
    def configure_optimizers(self) -> Any:
        return None


class Doubled(Precision):
    """Somebody's own precision."""

    def pre_backward(self, tensor: Tensor, module: L.LightningModule) -> Tensor:
        return super().pre_backward(2 * tensor, module)


class Halved(SingleDeviceStrategy):
    """Somebody's own strategy."""

    def backward(self, closure_loss: Tensor, *arguments: Any, **more: Any) -> Tensor:
        return super().backward(closure_loss / 2, *arguments, **more)


class StopsAtThree(L.Callback):
    """Asks the training to stop in its third batch."""

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        trainer.should_stop = trainer.global_step >= 3


def averaged() -> list[L.Callback]:
    return [StochasticWeightAveraging(0.05, swa_epoch_start=1)]


CASES: dict[str, tuple[Callable[[], L.LightningModule], dict[str, Any]]] = {
    "plain": (Small, {}),
    "accumulation and clipping": (Small, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}),
    "clipping by value": (Small, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "schedule of accumulation": (
        Small,
        {"callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 2})]},
    ),
    "validation within an epoch": (Small, {"val_check_interval": 4}),
    "backward in the steps": (Adversarial, {}),
    "extra keys": (WithExtras, {}),
    "None": (NoneNowAndThen, {}),
    "None within accumulation": (NoneNowAndThen, {"accumulate_grad_batches": 2}),
    "own clipping": (Clipping, {}),
    "thawing": (TwoLayers, {"callbacks": lambda: [Thaws()], "gradient_clip_val": 0.1}),
    "weight averaging": (Small, {"callbacks": averaged, "max_epochs": 4}),
    "stopped half way": (Small, {"callbacks": lambda: [StopsAtThree()]}),
    "own optimizer_step": (StepOfItsOwn, {}),
    "LBFGS": (WithLBFGS, {}),
    "two closures": (WithTwice, {}),
    "no optimizer": (WithoutOptimizer, {}),
    "own precision": (Small, {"plugins": Doubled}),
    "own strategy": (Small, {"strategy": Halved}),
    "bf16": (Small, {"precision": "bf16-mixed"}),
}


LEFT_TO_LIGHTNING = {
    "own optimizer_step",
    "LBFGS",
    "two closures",
    "no optimizer",
    "own precision",
    "own strategy",
}
