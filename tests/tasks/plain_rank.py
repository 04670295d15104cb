"""One of two CPU ranks of a plain `L.Trainer`: trains one kind of task, and writes the loss of each
step.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy

from tests.tasks.test_plain_trainer import Losses, parts
from tests.trainers import quiet_trainer

ROWS = 4
ACCUMULATE = 4
CLIP = 0.5
EPOCHS = 2


class LossFile(Losses):
    """Writes the losses of this rank when training ends."""

    def __init__(self, folder: Path, kind: str) -> None:
        super().__init__()
        self.folder = folder
        self.kind = kind

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (self.folder / f"{self.kind}-{trainer.global_rank}.json").write_text(
            json.dumps(self.of_steps)
        )


def mean_losses(folder: Path, kind: str) -> list[float]:
    """The mean loss of both ranks in each step."""
    first, second = (json.loads((folder / f"{kind}-{rank}.json").read_text()) for rank in (0, 1))
    return [(a + b) / 2 for a, b in zip(first, second, strict=True)]


def main(folder: Path, kind: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    L.seed_everything(3, verbose=False)
    data, task = parts(kind)
    data.config.batch_size = ROWS
    settings = {
        "accumulate_grad_batches": ACCUMULATE,
        "gradient_clip_val": CLIP,
        "max_epochs": EPOCHS,
    }
    strategy = DDPStrategy(process_group_backend="gloo")
    trainer = quiet_trainer(
        folder, strategy=strategy, devices=2, callbacks=[LossFile(folder, kind)], **settings
    )
    trainer.fit(task, datamodule=data)
