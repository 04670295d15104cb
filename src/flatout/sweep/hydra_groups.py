"""`hydra/launcher=flatout` and `hydra/sweeper=flatout`: their settings, as Hydra knows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore

_MODULE = "hydra_plugins.flatout_trials"


@dataclass
class LauncherSettings:
    """`hydra/launcher=flatout`: each trial is a process of its own."""

    _target_: str = f"{_MODULE}.TrialLauncher"
    parallel: int = 1
    """Trials at once; each gets an equal share of the GPUs, or of the cores."""
    limit: str | None = None
    """The longest a trial may take, such as 90s or 20m."""


@dataclass
class SweeperSettings:
    """`hydra/sweeper=flatout`: settings are suggested, poor trials pruned, and the sweep can be resumed."""

    _target_: str = f"{_MODULE}.TrialSweeper"
    space: dict[str, Any] = field(default_factory=dict)
    """What is searched: a setting, and its values in the words of Hydra's command line."""
    trials: int = 20
    """How many; a grid has as many as it has."""
    sampler: str = "tpe"
    """tpe, random or grid."""
    pruner: str = "asha"
    """asha, hyperband, median or none."""
    metric: str | None = None
    """Validation metric to compare by; null: the problem's usual one."""
    time: str | None = None
    """How long the sweep may take, such as 30m or 2h; what runs then is stopped."""
    confirm: int = 0
    """Runs of the best settings with other seeds, at the end."""
    seed: int = 0
    """Start of the sampler's random numbers."""
    resume: bool = False
    """Resume the sweep in the folder."""


def register() -> None:
    store = ConfigStore.instance()
    for group, settings in (("launcher", LauncherSettings), ("sweeper", SweeperSettings)):
        store.store(group=f"hydra/{group}", name="flatout", node=settings, provider="flatout")
