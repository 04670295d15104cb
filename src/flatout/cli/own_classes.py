"""Classes of the user's that a run makes itself, later: a task, and an optimizer, which need data
and weights.

Hydra would call what a `_target_` names while it reads the settings. So such a name is checked as
any other `_target_`, and then replaced by one that only returns the class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from flatout.engine.optimizer import OWN
from flatout.errors import require
from flatout.tasks.task_class import TaskClass, takes_settings

Find = Callable[[object, str], type]  # the class of an allowed name; refuses any other


def hold_task(cfg: DictConfig, find_class: Find) -> None:
    """Let a task of flatout, or a subclass, be its class and the settings of its loss.

    Other modules are made from their arguments by Hydra.
    """
    name = OmegaConf.select(cfg, "task._target_")
    if name is None:
        return
    kind = find_class(name, "task")
    if not takes_settings(kind):
        return
    typed: Any = OmegaConf.to_container(cfg.task)
    # the Config of the class says which settings there are, and of which types
    cfg.task = TaskClass(kind).config
    for key, value in typed.items():
        if not str(key).startswith("_"):
            OmegaConf.update(cfg, f"task.{key}", value)
    cfg.task = call_of(
        f"{TaskClass.__module__}.{TaskClass.__name__}",
        task=call_of("hydra.utils.get_class", path=name),
        config=cfg.task,
    )


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
