"""Messages for keys that do not exist: the nearest key, and where the list is; or the words that replace an old key."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass

import lightning as L
import yaml

from flatout.callbacks.loggers import LOGGERS
from flatout.cli.conf_files import conf_folder
from flatout.cli.words import GROUPS
from flatout.config import COMPONENTS, OWN_PARTS_MAY_SET, REPLACED, RunConfig
from flatout.errors import UserError, nearest

_MOST_KEYS = 24
"""A longer list of keys is left out of a message."""
_ALMOST = 0.75
"""Least likeness of keys that stand in different groups."""


def unknown_key(key: str, beside: Sequence[str] = (), *, typed: str = "", file: str = "") -> UserError:
    """The mistake of a key that does not exist.

    `beside` are the keys of its group, `typed` is the whole key where Hydra names only its first part, and `file` is
    where the key stands.
    """
    parent = key.rpartition(".")[0]
    if parent == "trainer":
        return _unknown_argument(key)
    if _takes_any_key(parent):
        return UserError(key, "no such key", hint=f"Keys of {parent} are added with a plus sign: +{key}=VALUE.")
    near = _nearest_key(key, beside, typed or key)
    hint = f"Did you mean {as_typed(near)!r}? {where_listed(parent)}" if near else where_listed(parent)
    if options := _options_with(key):
        hint = f"It is a setting of {', '.join(options)}. {where_listed(parent)}"
    where = f"{file}.yaml: {key}" if file else as_typed(key)
    return UserError(where, "no such key", allowed=", ".join(beside) if len(beside) <= _MOST_KEYS else "", hint=hint)


def _options_with(key: str) -> list[str]:
    """The options of groups that have a key, which the chosen option lacks."""
    return [
        f"{group.partition('.')[0]}={name}"
        for group, classes in COMPONENTS.items()
        for name, settings in classes.items()
        if key in (f"{group}.{field}" for field in _field_names(settings))
    ]


def where_listed(group: str) -> str:
    """A sentence that names the command which lists the keys of a group."""
    first = group.partition(".")[0]
    if first == "hydra":
        return ""
    is_listed = any(key.startswith(f"{first}.") for key in known_keys())
    return f"python -m flatout settings {first if is_listed else ''}".rstrip() + " lists all."


def as_typed(key: str) -> str:
    """A key as users type it: settings of the launcher without `hydra.`."""
    return key.removeprefix("hydra.") if key.startswith("hydra.launcher.") else key


def find_key(word: str) -> str | None:
    """The setting that a word without its group stands for: `batch_size`, `bach_size` and `epochs` have one."""
    names = [*GROUPS, *(field.name for field in fields(RunConfig))]
    by_name = {key.rpartition(".")[2]: key for key in sorted(known_keys(), key=_rank, reverse=True)}
    by_name |= {name: name for name in names}
    near = nearest(word, by_name, least=_ALMOST)
    return by_name[near] if near else None


def _rank(key: str) -> tuple[int, int]:
    """The place of a key among those of its name: less deep first, then in the order of the groups."""
    group = key.partition(".")[0]
    return key.count("."), GROUPS.index(group) if group in GROUPS else len(GROUPS)


def _nearest_key(key: str, beside: Sequence[str], typed: str) -> str | None:
    """The key that was meant: in its group, in another, or with its group."""
    parent, _, name = key.rpartition(".")
    if typed != key and (whole := nearest(typed, known_keys(), least=_ALMOST)):
        return whole
    if not parent:
        return find_key(name) or nearest(name, beside)
    if near := nearest(name, beside):
        return f"{parent}.{near}"
    elsewhere = [each for each in known_keys() if each.rpartition(".")[2] == name]
    return elsewhere[0] if elsewhere else nearest(key, known_keys(), least=_ALMOST)


def _unknown_argument(key: str) -> UserError:
    """The mistake of a key of Lightning's Trainer: most of its arguments need a plus sign."""
    name = key.rpartition(".")[2]
    if name in REPLACED and name not in OWN_PARTS_MAY_SET:
        return UserError(key, "has a setting of its own", hint=f"Set {REPLACED[name]} instead.")
    if name in _trainer_arguments():
        hint = f"Arguments of Lightning's Trainer are added with a plus sign: +{key}=VALUE."
        return UserError(key, "no such key", hint=hint)
    near = nearest(name, _trainer_arguments())
    plus = "" if near in _ours_of_trainer() else "+"
    hint = f"Did you mean '{plus}trainer.{near}'? {where_listed('trainer')}" if near else where_listed("trainer")
    return UserError(key, "no such key", hint=hint)


def known_keys() -> list[str]:
    """Dotted names of all settings."""
    names = [field.name for field in fields(RunConfig)]
    for group, classes in COMPONENTS.items():
        for settings in classes.values():
            names += [f"{group}.{name}" for name in _field_names(settings)]
    for logger, settings in LOGGERS.items():
        names += [f"logger.{logger}.{name}" for name in _field_names(settings)]
    names += [f"trainer.{name}" for name in _ours_of_trainer()]
    return sorted(set(names))


def _field_names(settings: type, prefix: str = "") -> Iterator[str]:
    for field in fields(settings):
        yield f"{prefix}{field.name}"
        default = field.default_factory if callable(field.default_factory) else None
        if isinstance(default, type) and is_dataclass(default):
            yield from _field_names(default, f"{prefix}{field.name}.")


def _takes_any_key(key: str) -> bool:
    """Whether a setting is a mapping whose keys are the user's, such as `data.noise`."""
    group, _, name = key.partition(".")
    classes = COMPONENTS.get(group, {}).values()
    return any(field.name == name and field.default_factory is dict for kind in classes for field in fields(kind))


def takes_list(key: str) -> bool:
    """Whether a setting may be a list."""
    group, _, name = key.partition(".")
    kinds = [field.type for kind in COMPONENTS.get(group, {}).values() for field in fields(kind) if field.name == name]
    return any(re.search(r"\b(list|Any)\b", str(kind)) for kind in kinds)


def _ours_of_trainer() -> list[str]:
    """Arguments of Lightning's Trainer that are set without a plus sign."""
    return list(yaml.safe_load((conf_folder() / "trainer" / "default.yaml").read_text(encoding="utf-8")))


def _trainer_arguments() -> list[str]:
    return list(inspect.signature(L.Trainer.__init__).parameters)[1:]


_MOVED = {
    "experiment": "name={value}",
    "data.builtin": "data={value}",
    "data.tweets": "data=tweets data.sample{rest}={value}",
    "data.tagged_tweets": "data=tagged_tweets data.sample{rest}={value}",
}
"""Old key: new words. `{rest}` is what follows the old key."""


def find_moved(key: str, value: str) -> UserError | None:
    """The mistake of a key that moved; None for any other key. `value` may be empty."""
    for old, new in _MOVED.items():
        if key == old or key.startswith(f"{old}."):
            words = new.format(rest=key.removeprefix(old), value=value or "VALUE")
            where = f"{key}={value}" if value else key
            return UserError(where, "has moved", hint=f"Use {words}.")
    return None
