"""The settings of a run that trains the user's own LightningModule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L

from flatout.callbacks.profile_steps import ProfileConfig
from flatout.checkpoints.settings import CheckpointConfig
from flatout.data.store_data import StoreData
from flatout.engine.step_losses import NotFinite


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSettings:
    """The parts, and what a run adds to them."""

    module: L.LightningModule
    data: L.LightningDataModule
    trainer: dict[str, Any]
    """Arguments of Lightning's Trainer."""
    checkpoint: CheckpointConfig
    callbacks: dict[str, Any]
    logger: Any
    name: str
    flush_every: int
    progress: bool
    profile: ProfileConfig
    not_finite: NotFinite

    @property
    def name_of_module(self) -> str:
        return type(self.module).__name__

    @property
    def has_own_data(self) -> bool:
        """Whether the rows come from the user's own DataModule, in the order of its loaders."""
        return not isinstance(self.data, StoreData)
