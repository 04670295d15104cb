"""One of two CPU ranks whose DDP takes the branches of a GPU: arguments moved to a device, hooks of
communication.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader

from flatout.engine import FastLoop, lightning_internals
from tests.trainers import quiet_trainer

STEPS = 6
THAWS_AFTER = 3


class Thawing(L.LightningModule):
    """Two layers, of which the first is trained from a later step on."""

    def __init__(self, *, is_alike_always: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.net[0].requires_grad_(is_alike_always)
        self.is_alike_always = is_alike_always

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.after_optimizer_step()

    def after_optimizer_step(self) -> None:
        if self.trainer.global_step == THAWS_AFTER and not self.is_alike_always:
            self.net[0].requires_grad_(True)
            strategy: Any = self.trainer.strategy
            lightning_internals.rebuild_ddp(strategy, self)
            strategy.model.device_ids = self.device_ids

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class OnCard(L.Callback):
    """DDP refuses such numbers where weights are on a CPU, and otherwise does with them what it
    does on a GPU.
    """

    def __init__(self, device_ids: list[int] | None) -> None:
        self.device_ids = device_ids

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.strategy.model.device_ids = self.device_ids
        pl_module.device_ids = trainer.strategy.model.device_ids


class Compressing(DDPStrategy):
    """Lightning sets a hook on GPUs alone, though gloo knows it, too."""

    def _register_ddp_hooks(self) -> None:
        if self._ddp_comm_hook is not None:
            self.model.register_comm_hook(None, self._ddp_comm_hook)


def main(folder: Path, rank: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(rank)
    rows = torch.randn(STEPS, 4, generator=random)
    found: dict[str, Any] = {}
    for name, callbacks, hook, is_alike_always in (
        ("plain", [OnCard(None)], None, True),
        ("fast", [OnCard([0]), FastLoop()], None, True),
        ("compressed", [OnCard(None), FastLoop()], fp16_compress_hook, False),
    ):
        strategy = Compressing(process_group_backend="gloo", ddp_comm_hook=hook)
        module = Thawing(is_alike_always=is_alike_always)
        end = HookAtEnd()
        trainer = quiet_trainer(
            default_root_dir=folder,
            strategy=strategy,
            devices=2,
            use_distributed_sampler=False,
            callbacks=[*callbacks, end],
        )
        trainer.fit(module, DataLoader(rows, batch_size=1))
        weights = torch.cat([weight.detach().flatten() for weight in module.parameters()])
        found[name] = {
            "steps": trainer.global_step,
            "weights": weights.tolist(),
            "hook": end.hook,
        }
    (folder / f"{rank}.json").write_text(json.dumps(found))


class HookAtEnd(L.Callback):
    """What DDP exchanges gradients with when training ends."""

    hook = ""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.hook = trainer.strategy.model._get_ddp_logging_data().get("comm_hook", "")
