"""Settings of sweeps and their trials: as Hydra knows them, and as the words of `python -m flatout sweep`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore

from flatout.errors import setting

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
    parallel: int = setting(
        1,
        "Trials at once; each gets an equal share of the GPUs, or of the cores.",
        least=1,
        allowed="a whole number, 1 to the number of GPUs or cores",
    )
    limit: str | None = setting(
        None,
        "The longest a trial may take, such as 90s or 20m.",
        allowed="a time such as 90s or 20m, or null",
        example="20m",
    )


@dataclass
class SweeperSettings:
    """`hydra/sweeper=flatout`: settings are suggested, poor trials pruned, and the sweep can be resumed."""

    _target_: str = f"{_MODULE}.TrialSweeper"
    space: dict[str, Any] = setting(
        dict,
        "What is searched: a setting, and its values in the words of Hydra's command line.",
        example="optim.lr=tag(log,interval(1e-4,1e-2))",
    )
    trials: int = setting(20, "How many; a grid has as many as it has.", least=1)
    sampler: str = setting("tpe", "tpe, random or grid.", allowed="tpe, random, grid", example="random")
    pruner: str = setting(
        "asha", "asha, hyperband, median or none.", allowed="asha, hyperband, median, none", example="none"
    )
    metric: str | None = setting(
        None, "Validation metric to compare by; null: the problem's usual one.", example="macro_f1"
    )
    time: str | None = setting(
        None,
        "How long the sweep may take, such as 30m or 2h; what runs then is stopped.",
        allowed="a time such as 30m or 2h, or null",
        example="30m",
    )
    confirm: int = setting(0, "Runs of the best settings with other seeds, at the end.", least=0)
    seed: int = setting(0, "Start of the sampler's random numbers.")
    resume: bool = setting(False, "Resume the sweep in the folder.")


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
