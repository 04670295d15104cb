"""A task of the user's own in the settings of a run: a subclass of ours, and the settings of its
loss.

The run makes the task itself, from network, settings and optimizer, as it makes ours.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, is_dataclass
from typing import Any

from flatout.errors import class_name, require, settings_of

_FIRST = ["model", "config", "optim"]
_FURTHER = ("labels", "total_steps")


@dataclass(frozen=True, slots=True)
class TaskClass:
    """A subclass of a task, and the settings of its loss; None or a mapping becomes its Config."""

    task: type[Any]
    config: Any = None

    def __post_init__(self) -> None:
        name = class_name(self.task)
        require(
            takes_settings(self.task),
            "task",
            f"{name} is no task that takes ({', '.join(_FIRST)})",
            hint="Subclass one of flatout.tasks, and put arguments into a Config: its `settings`.",
        )
        kind = self.task.settings
        require(
            isinstance(kind, type) and is_dataclass(kind),
            "task",
            f"{name}.settings is no dataclass",
            hint="Subclass the Config of its base.",
        )
        object.__setattr__(self, "config", settings_of(kind, self.config))


def takes_settings(part: object) -> bool:
    """Whether a class is made as tasks of flatout are, from a network and settings."""
    if not (isinstance(part, type) and hasattr(part, "settings") and hasattr(part, "judge")):
        return False
    parameters = inspect.signature(part).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    # of `*args, **kwargs` too, which such a class hands on; an argument of its own would be lost
    names = [name for name in parameters if name not in ("args", "kwargs")]
    are_first = names[: len(_FIRST)] == _FIRST or inspect.Parameter.VAR_POSITIONAL in kinds
    return are_first and set(names) <= {*_FIRST, *_FURTHER}
