"""One of two CPU ranks of a plain Trainer, as torchrun starts it: writes what it trained, and its
weights.

After that each rank opens a table of its own, which is refused.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import lightning as L
from tests.data.tiny_module import TinyModule
from tests.trainers import quiet_trainer

from flatout.data import TextData
from flatout.errors import UserError


def main(folder: Path, source: str) -> None:
    warnings.simplefilter("ignore")
    data = TextData(source=source, batch_size=8, cache=str(folder / "cache"))
    trainer = quiet_trainer(
        strategy="ddp", devices=2, accumulate_grad_batches=2, num_sanity_val_steps=0
    )
    module = TinyModule(vocabulary=200, classes=2)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    seen = {
        "train": module.train_batches,
        "val": module.validation_rows[0],
        "test": module.test_rows,
    }
    seen["line"] = module.line.weight.tolist()
    seen["refused"] = refusal_of_other_rows(trainer, str(folder / f"{trainer.global_rank}.csv"))
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(seen))


def refusal_of_other_rows(trainer: L.Trainer, source: str) -> str:
    data = TextData(source=source)
    data.trainer = trainer
    try:
        data.setup()
    except UserError as error:
        return str(error)
    return ""
