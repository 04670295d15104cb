"""Steps of every task and model while whatever would let the host wait for the device
is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch

from benchmarks.card.every_model import CASES, FEW_ROWS, Case
from benchmarks.card.place import Place
from benchmarks.claim import Claim, bounded, quiet
from flatout.engine import FastLoop

_STEPS = 30
_TIMES = 8
"""Times the smallest data: all steps lie in one epoch."""
ROWS = 512
"""Rows of a batch of texts: CUDA has another way for the gradient of a table from which a batch
takes more than 3,072 rows, and the way for fewer never waits."""
_NEVER_WAIT = {name: case for name, case in CASES.items() if not case.waits}
STEP_ROWS = tuple(f"{_STEPS} steps that never wait: {name}" for name in _NEVER_WAIT)


def step_claims(place: Place) -> Iterator[Claim]:
    """A row a model: 0 where nothing waited."""
    for row, case in zip(STEP_ROWS, _NEVER_WAIT.values(), strict=True):
        why = what_waits(place, case)
        yield bounded(row, float(bool(why)), "", most=0, note=why)


def what_waits(place: Place, case: Case) -> str:
    """The first thing that waits, or fails otherwise; empty where nothing does."""
    steps = place.options.choose(_STEPS, _STEPS, 2)
    forbids = ForbidsWaits(place.device)
    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    names: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
    settings: dict[str, Any] = {
        "accelerator": place.accelerator,
        "devices": 1,
        "precision": names[case.precision],
    }
    settings |= {"max_steps": steps, "limit_val_batches": 0, "gradient_clip_val": 0.5, **off}
    try:
        times = place.options.choose(_TIMES, _TIMES, 1)
        data, task = case.make(times, place.options.choose(ROWS, ROWS, FEW_ROWS))
        trainer = L.Trainer(
            callbacks=[FastLoop(), forbids], default_root_dir=place.folder, **settings
        )
        with quiet():
            trainer.fit(task, datamodule=data)
    except Exception as error:
        # of any class: a card's minutes are rare, so the models after it have their rows, too
        return (
            f"{type(error).__name__}:"
            f" {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        )
    finally:
        forbids.allow()
    return (
        ""
        if trainer.global_step == steps
        else f"ended after {trainer.global_step} steps of {steps}"
    )


class ForbidsWaits(L.Callback):
    """From the end of the first batch on; that one may wait, as columns are copied then."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def on_train_batch_end(self, trainer: L.Trainer, *others: Any) -> None:
        if self.device.type == "cuda" and trainer.global_step < trainer.max_steps:
            torch.cuda.set_sync_debug_mode("error")
        else:
            self.allow()

    def on_train_epoch_end(self, *others: Any) -> None:
        self.allow()

    def allow(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
