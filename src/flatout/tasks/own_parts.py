"""The user's own LightningModule and DataModule: what they must have so that a run can train them.

It stands apart from `task.py`, which knows no DataModule.
"""

from __future__ import annotations

from typing import Any

import lightning as L

from flatout.data.store_data import StoreData
from flatout.errors import require
from flatout.tasks.task import Task


def require_own_parts(module: Any, data: Any) -> None:
    """Refuse parts that a Trainer could not train, in one sentence each, before anything starts."""
    hint = "Set data._target_ to your LightningDataModule, or data=headlines for data of flatout."
    has_hooks = isinstance(data, L.LightningDataModule) or not isinstance(data, L.LightningModule)
    require(has_hooks, "data", f"{type(data).__name__} is no LightningDataModule", hint=hint)
    is_module = isinstance(module, L.LightningModule)
    reads_ours = not is_module or isinstance(module, Task)
    is_own_data = isinstance(data, L.LightningDataModule) and not isinstance(data, StoreData)
    name = type(module).__name__.removesuffix("Config")
    what = f"{name} reads the batches of flatout's DataModules, and {type(data).__name__} is your own"
    hint = "Set task._target_ to your LightningModule."
    require(not (reads_ours and is_own_data), "task", what, hint=hint)
    if is_module:
        _require_hooks(module, L.LightningModule, "task", _HOOKS_OF_A_MODULE)
    if is_own_data:
        _require_hooks(data, L.LightningDataModule, "data", _HOOKS_OF_DATA)


_HOOKS_OF_A_MODULE = {
    "training_step": "Define it: it returns the loss of a batch.",
    "configure_optimizers": "Define it: it returns the optimizer.",
}
_HOOKS_OF_DATA = {"train_dataloader": "Define it: it returns a DataLoader of the training rows."}


def _require_hooks(part: Any, base: type, where: str, hooks: dict[str, str]) -> None:
    for name, hint in hooks.items():
        is_there = getattr(type(part), name) is not getattr(base, name)
        require(is_there, where, f"{type(part).__name__} has no {name}", hint=hint)
