"""Settings of sweeps and their trials: `hydra.sweeper.…` and `hydra.launcher.…`.

They are composed by Hydra and passed on unchanged. A sweep that is resumed must have the settings
of `of_the_search`; others, such as its time, may change.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flatout.distributed.engine import Place
from flatout.errors import as_seconds, check_settings, require, setting

_MODULE = "hydra_plugins.flatout_trials"
Sampler = StrEnum("Sampler", "tpe random grid")
Pruner = StrEnum("Pruner", "asha hyperband median none")


@dataclass
class LauncherSettings:
    """`hydra/launcher=flatout`: each trial is a process of its own."""

    _target_: str = f"{_MODULE}.TrialLauncher"
    parallel: int = setting(
        1,
        "Trials at once; each gets an equal share of the GPUs, or of the cores.",
        least=1,
        allowed="a whole number, 1 to the number of GPUs or cores of this machine",
    )
    place: Place = setting(
        Place.here,
        "Where trials run: here, or as tasks of a Ray cluster whose machines see one disk."
        " `parallel` is then any number, and each trial gets a core, and a GPU where there is any."
        " A single run trains on `workers` there.",
        choices=Place,
        example="ray",
    )
    workers: int = setting(
        1, "Ranks of a single run with `place=ray`: a device each, on any machines.", least=1
    )
    limit: str | None = setting(
        None, "Longest trial.", allowed="a time such as 90s or 20m, or null", example="20m"
    )

    def __post_init__(self) -> None:
        require(
            self.workers == 1,
            "launcher.workers",
            f"{self.workers}, but a trial has one rank",
            hint="Leave it out.",
        )


@dataclass
class SweeperSettings:
    """`hydra/sweeper=flatout`: settings are suggested, poor trials pruned, and the sweep can be
    resumed.
    """

    _target_: str = f"{_MODULE}.TrialSweeper"
    space: dict[str, Any] = setting(
        dict,
        "What is searched: a setting, and its values in the words of Hydra's command line.",
        example="optim.lr=tag(log,interval(1e-4,1e-2))",
    )
    trials: int = setting(20, "How many; a grid has as many as it has.", least=1)
    sampler: str = setting("tpe", "tpe, random or grid.", choices=Sampler)
    pruner: str = setting(
        "asha", "asha, hyperband, median or none.", choices=Pruner, example="none"
    )
    metric: str | None = setting(
        None, "Metric to compare by; null: the problem's usual one.", example="macro_f1"
    )
    time: str | None = setting(
        None,
        "Longest sweep; what runs then is stopped.",
        allowed="a time such as 30m or 2h, or null",
        example="30m",
    )
    confirm: int = setting(0, "Runs of the best settings with other seeds, at the end.", least=0)
    seed: int = setting(0, "Start of the sampler's random numbers.")
    resume: bool = setting(False, "Resume the sweep in the folder.")

    def __post_init__(self) -> None:
        check_settings(self)
        as_seconds(self.time, "for")

    def of_the_search(self) -> dict[str, Any]:
        """Settings that must not change when a sweep is resumed, as they decide its suggestions."""
        values = {name: getattr(self, name) for name in ("sampler", "pruner", "metric", "seed")}
        values["metric"] = self.metric and self.metric.removeprefix("val/")
        if self.sampler == Sampler.grid:
            values["trials"] = None  # a grid has as many as it has, whatever was asked for
        return values
