"""What `Verdict()` costs in a plain Trainer of Lightning: the processor's time of a step.

Two trainings of a small network take turns in one process, one with `Verdict()` and one without.
Each step rests some milliseconds, so that code has left the caches, as in a step of a real network.
The training alone is timed, without what the Trainer prepares, and without the races at the end.
"""

from __future__ import annotations

import io
import logging
import statistics
import tempfile
import time
import warnings
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flatout.perf.measure.intervals import take_turns
from flatout.perf.verdict.anywhere import Verdict

_STEPS = 300
_ROUNDS = 15
_REST_S = 0.005


class _Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        time.sleep(_REST_S)
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class _ProcessorTime(L.Callback):
    """Seconds of the processor between the first batch of a training and the end of its epoch."""

    seconds = 0.0

    def on_train_epoch_start(self, *unused: Any) -> None:
        self._began_s = time.process_time()

    def on_train_epoch_end(self, *unused: Any) -> None:
        self.seconds = time.process_time() - self._began_s


def measure_in_lightning() -> dict[str, Any]:
    """Microseconds of the processor that a step takes without and with `Verdict()`: medians.

    `spread_us`: the quartiles of the differences of trainings that followed each other.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # of Lightning, on the number of workers
    _step_us(judges=True)  # imports, and what Lightning does once
    sides = [partial(_step_us, judges=judges) for judges in (False, True)]
    without_us, with_us = take_turns(sides, least=_ROUNDS)
    differences = [after - before for before, after in zip(without_us, with_us, strict=True)]
    first, _, third = statistics.quantiles(differences, n=4)
    return {
        "without_us": statistics.median(without_us),
        "with_us": statistics.median(with_us),
        "more_us": statistics.median(differences),
        "spread_us": [first, third],
    }


def _step_us(*, judges: bool) -> float:
    clock = _ProcessorTime()
    torch.manual_seed(0)
    rows = TensorDataset(torch.randn(2 * _STEPS, 128), torch.randint(0, 2, (2 * _STEPS,)))
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=1,
            accelerator="cpu",
            default_root_dir=folder,
            callbacks=[clock, *([Verdict(seconds=0)] if judges else [])],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with redirect_stdout(io.StringIO()):  # the verdict's lines
            trainer.fit(_Module(), DataLoader(rows, batch_size=2))
    return 1e6 * clock.seconds / _STEPS
