"""A study over two settings, as tests want it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flatout.sweep.settings import Pruner, Sampler, SweeperSettings
from flatout.sweep.space import Part, SettingInterval, SettingValues
from flatout.sweep.study import Study

SPACE: dict[str, Part] = {
    "optim.lr": SettingInterval(1e-4, 1e-1, is_log=True),
    "model.hidden": SettingValues(("64", "128")),
    "model.layers": SettingInterval(1, 3, is_whole=True),
}


def study(folder: Path, space: dict[str, Part] = SPACE, **settings: Any) -> Study:
    most = settings.pop("validations", 9)
    given = SweeperSettings(
        **{
            "trials": 12,
            "sampler": Sampler.tpe,
            "pruner": Pruner.none,
            **settings,
        }
    )
    return Study(folder, space, given, mode="max", validations=most)


def worth(settings: dict[str, str]) -> float:
    """Best at a rate of 0.01 and 128 hidden values."""
    return 1 - abs(float(settings["optim.lr"]) - 0.01) + int(settings["model.hidden"]) / 1000
