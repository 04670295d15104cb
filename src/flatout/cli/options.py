"""Options of settings that come from other packages, such as `model=average`, `data=stars`.

Hydra asks for a file of settings by its group and name. Where there is none, the part of that name
is looked for among installed packages, and its settings class becomes the option.
"""

from __future__ import annotations

from hydra.core.config_store import ConfigStore

from flatout.errors import explain_unknown_settings
from flatout.plugins.installed import PartGroup, find_part

_GROUPS = {
    "data": PartGroup.kinds,
    "model": PartGroup.models,
    "task": PartGroup.kinds,
    "logger": PartGroup.loggers,
}


def store_part(path: str, store: ConfigStore) -> bool:
    """Store the part that an option names, such as `model/average`; false where there is none."""
    group, _, name = path.removeprefix("schema/").rpartition("/")
    part = find_part(_GROUPS[group], name) if group in _GROUPS else None
    if part is None:
        return False
    # A kind offers the settings of its data and of its task, both under its own name.
    if group == "task":
        part = part.task.settings
    elif group == "data":
        part = part.settings
    explain_unknown_settings(part)
    store.store(group=f"schema/{group}", name=name, node=part, provider="flatout")
    if not path.startswith("schema/"):
        # a logger lies below its own name: several may be chosen
        option = {name: part} if group == "logger" else part
        store.store(group=group, name=name, node=option, provider="flatout")
    return True
