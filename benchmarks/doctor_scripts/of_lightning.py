"""Classify made numbers with a small network and a plain Trainer of Lightning."""

import argparse
import time

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from stopwatch import now_s, report
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--disk-ms", type=float, default=0.0, help="that each row waits for a disk")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--check-every", type=int, default=0, help="steps between validations")
parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints")
parser.add_argument("--sleep-ms", type=float, default=0.0, help="of each training step")
parser.add_argument("--reads-norms", action="store_true")
options = parser.parse_args()


class Rows(Dataset):
    def __init__(self) -> None:
        self.numbers = torch.randn(options.steps * options.batch_size, 128)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int):
        if options.disk_ms:
            time.sleep(options.disk_ms / 1000)
        row = self.numbers[number]
        return row, int(row.sum() > 0)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        wide = options.width
        self.network = nn.Sequential(
            nn.Linear(128, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 2)
        )

    def training_step(self, batch, batch_idx):
        if options.sleep_ms:
            time.sleep(options.sleep_ms / 1000)
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.network(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class ReadsNorms(L.Callback):
    """Reads the norm of each row of each weight after each step."""

    largest = 0.0

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        for weight in pl_module.parameters():
            for row in weight.detach():
                self.largest = max(self.largest, row.norm().item())


L.seed_everything(0, verbose=False)
rows = Rows()
loader = DataLoader(
    rows, options.batch_size, num_workers=options.workers, persistent_workers=options.workers > 0
)
validation = DataLoader(Subset(rows, range(64)), 64)
callbacks = []
if options.save_every:
    callbacks.append(ModelCheckpoint("out", every_n_train_steps=options.save_every))
if options.reads_norms:
    callbacks.append(ReadsNorms())
trainer = L.Trainer(
    max_epochs=1,
    accelerator="cpu",
    callbacks=callbacks,
    val_check_interval=options.check_every or 1.0,
    enable_checkpointing=bool(options.save_every),
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
)
module = Module()
began_s = now_s()
trainer.fit(module, loader, validation)
report(module, len(rows), began_s)
