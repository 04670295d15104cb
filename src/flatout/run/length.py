"""How many rows a step has and how many epochs a run takes, where the settings leave it open.

Large batches of few rows are few steps: 900 rows in batches of 128 are 56 steps in 8 epochs, and a
network is then still rising at its end. So few rows get small batches and more epochs. From 10,000
rows on both are what they always were. Open this file to change the rule; what a device can hold is
measured elsewhere (`tune=auto`).
"""

from __future__ import annotations

import math
from dataclasses import replace

import lightning as L

from flatout.config import RunConfig
from flatout.data.feeding import ROWS
from flatout.data.problem import Problem
from flatout.data.store_data import StoreData
from flatout.data.text import TextDataConfig
from flatout.distributed.ranks import Ranks
from flatout.engine.run_length import EPOCHS
from flatout.models.contract import is_pretrained
from flatout.run.run_folder import RunFolder

# From so many training rows on, that many rows a batch; below the last one, `_SMALLEST`.
_FROM_SCRATCH = {10_000: ROWS, 5_000: 64, 2_000: 32}
_PRETRAINED = {10_000: ROWS, 5_000: 32}
_SMALLEST = 16
SIZES = (_SMALLEST, *_FROM_SCRATCH.values())  # all that may be chosen
_STEPS = 500  # that a run should take at least
# Epochs between which a run reaches them: a pretrained encoder learns in few.
_LEAST_FROM_SCRATCH, _MOST_FROM_SCRATCH = EPOCHS, 20
_LEAST_PRETRAINED, _MOST_PRETRAINED = 4, 10


def settle_length(
    config: RunConfig, data: L.LightningDataModule, ranks: Ranks, folder: RunFolder
) -> RunConfig:
    """The settings with a batch size and a number of epochs; both are printed where chosen here."""
    epochs = config.trainer.get("max_epochs")
    if not _follows_rows(config, data):
        return _with_length(config, None, epochs or EPOCHS)
    assert isinstance(data, StoreData)
    rows = data.store.splits["train"].num_rows
    batch = config.data.batch_size
    is_open = batch is None and config.data.accumulate == 1
    is_open = is_open and config.data.tokens_per_batch is None
    is_open = is_open and config.data.effective_batch is None
    if is_open:
        batch = choose_batch(rows, pretrained=is_pretrained(config.model))
        batch = max(1, batch // ranks.world)
        if batch != ROWS:
            why = f"{rows:,} training rows; larger batches would be fewer steps"
            evidence = f"from {max(_FROM_SCRATCH):,} rows on it is {ROWS}"
            folder.decision("batch size", f"{batch} rows", why, evidence)
    if epochs is None:
        epochs = EPOCHS
        if is_open or batch is not None:
            step_rows = (batch or ROWS) * ranks.world * config.data.accumulate
            epochs = choose_epochs(rows, step_rows, pretrained=is_pretrained(config.model))
        if epochs != EPOCHS:
            steps = epochs * math.ceil(rows / step_rows)
            why = f"{steps:,} steps; a network of few rows wants some {_STEPS}"
            evidence = f"with many rows it is {EPOCHS}; the best epoch is kept"
            folder.decision("epochs", epochs, why, evidence)
    return _with_length(config, batch, epochs)


def choose_batch(rows: int, *, pretrained: bool) -> int:
    """Rows of a step, by the number of training rows."""
    sizes = _PRETRAINED if pretrained else _FROM_SCRATCH
    return next((size for least, size in sizes.items() if rows >= least), _SMALLEST)


def choose_epochs(rows: int, step_rows: int, *, pretrained: bool) -> int:
    """The epochs in which a run takes `_STEPS` steps, within the usual ones."""
    least, most = (_LEAST_FROM_SCRATCH, _MOST_FROM_SCRATCH)
    if pretrained:
        least, most = (_LEAST_PRETRAINED, _MOST_PRETRAINED)
    if rows >= max(_FROM_SCRATCH):
        return EPOCHS
    wanted = math.ceil(_STEPS * step_rows / max(1, rows))
    return min(max(wanted, least), most)


def _follows_rows(config: RunConfig, data: L.LightningDataModule) -> bool:
    """Whether the rule is for this run: texts or tagged words of the user's, with labels."""
    if not isinstance(config.data, TextDataConfig) or not isinstance(data, StoreData):
        return False
    if config.has_own_parts or config.data.is_sample or data.is_stream:
        return False
    return config.data.problem is not Problem.none


def _with_length(config: RunConfig, batch: int | None, epochs: int) -> RunConfig:
    trainer = {**config.trainer, "max_epochs": epochs}
    if batch is None:
        return replace(config, trainer=trainer)
    return replace(config, trainer=trainer, data=replace(config.data, batch_size=batch))
