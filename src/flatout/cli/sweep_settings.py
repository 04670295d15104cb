"""Settings of sweeps and their trials: as Hydra knows them, and as the words of `python -m flatout sweep`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore

_MODULE = "hydra_plugins.flatout_trials"
SHORT = {
    "trials": "hydra.sweeper.trials",
    "for": "hydra.sweeper.time",
    "sampler": "hydra.sweeper.sampler",
    "pruner": "hydra.sweeper.pruner",
    "metric": "hydra.sweeper.metric",
    "confirm": "hydra.sweeper.confirm",
    "parallel": "hydra.launcher.parallel",
    "trial_for": "hydra.launcher.limit",
}
"""Words of `python -m flatout sweep`, and the settings they stand for."""
_LONG = {setting: word for word, setting in SHORT.items()}


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


def command_of_sweep(typed: Sequence[str], conf: str | None = None) -> str:
    """A line to copy that begins a sweep of these words; they may be Hydra's. `conf` is what `--config-dir` names."""
    shown = [word for word in typed if word != "hydra/sweeper=flatout"]
    short = [in_short(word) for word in shown if in_short(word) != word]  # Hydra hands on its own words first
    options = [] if conf is None else ["--config-dir", conf]
    settings = [word for word in shown if in_short(word) == word]
    return shlex.join(["python", "-m", "flatout", "sweep", *options, *settings, *short])


def in_short(word: str) -> str:
    """A word of Hydra's command line as the sweep command knows it; any other unchanged."""
    key, equals, value = word.partition("=")
    return f"{_LONG[key]}={value}" if equals and key in _LONG else word


def in_full(word: str) -> str:
    """A word of the sweep command as Hydra knows it."""
    key, equals, value = word.partition("=")
    return f"{SHORT[key]}={value}" if equals and key in SHORT else word
