"""Classes of the user's that a run makes itself, later: an optimizer, once there are weights.

Hydra would call what a `_target_` names while it reads the settings. So such a name is checked as
any other `_target_`, and then replaced by one that only returns the class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from flatout.engine.optimizer import OWN
from flatout.errors import require

Find = Callable[[object, str], type]  # the class of an allowed name; refuses any other


def hold_optimizer(cfg: DictConfig, find_class: Find) -> None:
    """Let `optim.optimizer` be the class itself."""
    name = OmegaConf.select(cfg, "optim.optimizer")
    if name is None:
        return
    require(isinstance(name, str), OWN, f"{name} is no name of a class", allowed="package.Class")
    find_class(name, OWN)
    cfg.optim.optimizer = call_of("hydra.utils.get_class", path=name)


def call_of(function: str, **arguments: Any) -> dict[str, Any]:
    """What lets Hydra call a function."""
    return {"_target_": function, **arguments}
