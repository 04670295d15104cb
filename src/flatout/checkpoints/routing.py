"""Checkpoint folders in any Trainer: exact checkpoints are folders, all other checkpoints stay what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import Strategy

from flatout.checkpoints.folder import FolderCheckpointIO
from flatout.errors import require


class RoutedCheckpointIO(CheckpointIO):
    """Folders below one folder are ours; the Trainer's own plugin reads and writes everything else."""

    def __init__(self, ordinary: CheckpointIO, folder: Path) -> None:
        self.ordinary, self.folder, self._folders = ordinary, folder.absolute(), FolderCheckpointIO()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self._io_of(path).save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        io = self._folders if Path(path).is_dir() else self._io_of(path)
        return io.load_checkpoint(path, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        self._io_of(path).remove_checkpoint(path)

    def teardown(self) -> None:
        self.ordinary.teardown()

    def _io_of(self, path: Any) -> CheckpointIO:
        return self._folders if Path(path).absolute().parent == self.folder else self.ordinary


def route_folders(trainer: L.Trainer, folder: Path) -> None:
    """Let a Trainer write checkpoint folders below `folder`, and read them from anywhere."""
    strategy, standing = trainer.strategy, trainer.strategy.checkpoint_io
    writes_itself = type(strategy).save_checkpoint is not Strategy.save_checkpoint
    what = f"{type(strategy).__name__} writes checkpoints in a format that only it can read"
    hint = "Use Lightning's ModelCheckpoint with this strategy."
    require(not writes_itself or hasattr(strategy, "share_out"), "ExactCheckpoint", what, hint=hint)
    if isinstance(standing, RoutedCheckpointIO):
        standing = standing.ordinary
    if not isinstance(standing, FolderCheckpointIO):
        strategy.checkpoint_io = RoutedCheckpointIO(standing, folder)
