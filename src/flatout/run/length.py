"""How many rows a step has and how many epochs a run takes, where the settings leave it open.

Large batches of few rows are few steps: 900 rows in batches of 128 are 64 steps in 8 epochs. A
network is then still rising at its end. So few rows get small batches and more epochs. From 10,000
rows on both are what they always were. Recordings have a rule of their own, and windows of
recordings have none. Open this file to change which runs follow the rule. The
rule itself is in `engine/run_length.py`; what a device can hold is measured (`tune=auto`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from flatout.config import RunConfig
from flatout.data.batches.store_data import StoreData
from flatout.data.feeding import FeedingConfig
from flatout.distributed.ranks import Ranks
from flatout.engine.run_length import (
    EPOCHS,
    MANY_RECORDINGS,
    MANY_ROWS,
    STEPS,
    choose_epochs,
    choose_epochs_of_recordings,
)
from flatout.models.contract import is_pretrained
from flatout.run.kinds import kind_of
from flatout.run.run_folder import RunFolder
from flatout.run.usual_rows import usual_rows


def settle_length(
    config: RunConfig, data: StoreData[Any, Any], ranks: Ranks, folder: RunFolder
) -> RunConfig:
    """The settings with a batch size and a number of epochs; both are printed where chosen here."""
    batch = None
    epochs = config.trainer.get("max_epochs")
    if follows_rows(config):
        rows = data.store.splits["train"].num_rows
        if _leaves_batch_open(config.data):
            batch = _choose_batch(config, rows, ranks.world, folder)
        if epochs is None and config.data.tokens_per_batch is None:
            per_device, parts = config.data.batches(ranks.world)
            step_rows = (batch or per_device) * parts * ranks.world
            epochs = _choose_epochs(config, data, step_rows, folder)
    settled = replace(config, trainer={**config.trainer, "max_epochs": epochs or EPOCHS})
    if batch is None:
        return settled
    return replace(settled, data=replace(config.data, batch_size=batch))


def follows_rows(config: RunConfig) -> bool:
    """Whether the rule is for such a run: texts, tagged words or recordings of the user's."""
    if config.data.is_sample or not kind_of(config.data).length_by_rows:
        return False
    return not config.data.has_windows


def _choose_batch(config: RunConfig, rows: int, world: int, folder: RunFolder) -> int:
    """Rows of a batch on each of `world` devices, printed where it is not the usual number."""
    batch = usual_rows(config, rows, world)
    if batch != config.data.usual_rows:
        why = f"{rows:,} training rows; larger batches would be fewer steps"
        many = MANY_RECORDINGS if config.data.are_recordings else MANY_ROWS
        evidence = f"from {many:,} rows on it is {config.data.usual_rows}"
        folder.decision("batch size", f"{batch} rows", why, evidence)
    return batch


def _choose_epochs(
    config: RunConfig, data: StoreData[Any, Any], step_rows: int, folder: RunFolder
) -> int:
    """Epochs of a run, printed where they are not the usual number."""
    rows = data.store.splits["train"].num_rows
    if config.data.are_recordings:
        epochs = choose_epochs_of_recordings(rows, step_rows)
    else:
        classes = len(data.info.classes)  # recordings have none
        epochs = choose_epochs(rows, step_rows, classes, pretrained=is_pretrained(config.model))
    if epochs != EPOCHS:
        steps = epochs * math.ceil(rows / step_rows)
        why = f"{steps:,} steps; a network of few rows wants some {STEPS}"
        evidence = f"with many rows it is {EPOCHS}; the best epoch is kept"
        folder.decision("epochs", epochs, why, evidence)
    return epochs


def _leaves_batch_open(data: FeedingConfig) -> bool:
    """Whether no setting says how many rows a batch or a step has."""
    is_open = data.batch_size is None and data.tokens_per_batch is None
    return is_open and data.effective_batch is None and data.accumulate == 1
