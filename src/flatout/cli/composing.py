"""Errors of composing the settings, as one sentence with the nearest right word; and messages for unknown keys.

Reads the words and attributes of the errors of Hydra and OmegaConf, without importing either.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import lightning as L
import yaml

from flatout.callbacks.loggers import LOGGERS
from flatout.checkpoints.settings import CheckpointConfig
from flatout.cli.conf_files import conf_folder
from flatout.cli.words import GROUPS
from flatout.config import OWN_PARTS_MAY_SET, REPLACED, MonitorConfig, RunConfig
from flatout.data.samples.cells import CellsConfig
from flatout.data.samples.headlines import HeadlinesConfig
from flatout.data.samples.tweets import TaggedTweetsConfig, TweetsConfig
from flatout.engine.optimizer import OptimConfig
from flatout.errors import RunBroke, UserError, did_you_mean, nearest
from flatout.models import MODELS
from flatout.perf.tune.settings import TuneConfig
from flatout.run.kinds import KINDS

COMPONENTS: dict[str, dict[str, type]] = {
    "data": {kind.data_option: kind.settings for kind in KINDS},
    "data.sample": {
        "headlines": HeadlinesConfig,
        "tweets": TweetsConfig,
        "tagged_tweets": TaggedTweetsConfig,
        "cells": CellsConfig,
    },
    "model": MODELS,
    "task": {kind.task_option: kind.task.settings for kind in KINDS},
    "optim": {"adamw": OptimConfig},
    "checkpoint": {"best": CheckpointConfig},
    "monitor": {"default": MonitorConfig},
    "tune": {"default": TuneConfig},
}
"""The settings class of each option of each group in `conf/`."""
_MOST_KEYS = 24
"""A longer list of keys is left out of a message."""
_ALMOST = 0.75
"""Least likeness of keys that stand in different groups."""


@dataclass(frozen=True, slots=True)
class ComposeError:
    """The parts of an error that name the mistake."""

    kind: str
    message: str
    key: str
    value: str
    missing: str
    options: list[str]
    beside: list[str]
    """Keys of the node that lacks the key."""
    override: str
    mistake: UserError | None

    @classmethod
    def of(cls, error: BaseException) -> ComposeError:
        chain = list(_causes(error))
        inner = chain[-1]
        found = {name: getattr(inner, name, None) for name in ("full_key", "value", "missing_cfg_file", "options")}
        override = getattr(inner, "override", None) or _first(
            r"override '?([^'\n]+?)'?(?:\.? No match.*|\.?)$", str(error)
        )
        return cls(
            kind=type(inner).__name__,
            message="\n".join(str(link) for link in chain),
            key=str(found["full_key"] or "") or _first(r"full_key: (\S+)", str(inner)),
            value=str(found["value"]),
            missing=str(found["missing_cfg_file"] or ""),
            options=list(found["options"] or []),
            beside=_keys_beside(error),
            override=override,
            mistake=next((link for link in chain if isinstance(link, UserError)), None),
        )


def explain(error: ComposeError) -> UserError | None:
    """The user's mistake behind an error; None for a defect of ours."""
    if error.mistake is not None:
        return error.mistake
    if error.kind in ("MissingConfigException",):
        return _missing_option(error)
    if error.kind in ("OverrideParseException", "LexerNoViableAltException"):
        return _unreadable(error)
    if error.kind in ("ValidationError", "UnsupportedValueType", "ReadonlyConfigError"):
        return _wrong_value(error)
    if error.kind == "MissingMandatoryValue":
        return UserError(error.key, "has no value", hint=f"Give it one: {error.key}=VALUE.")
    if several := _first(r"^Ambiguous value for argument '(.+)'$|^Sweep parameters '(.+)' requires", error.message):
        return _several_values(several)
    if error.kind in ("ConfigAttributeError", "ConfigKeyError", "ConfigCompositionException"):
        return _unknown_key(error)
    if error.kind in ("ScannerError", "ParserError", "ConstructorError", "ComposerError", "ReaderError"):
        return UserError("conf", error.message.replace("\n", " "), hint="The file is not valid YAML.")
    if error.kind == "RecursionError":
        return UserError("conf", "is nested too deeply", hint="Write the settings with fewer levels.")
    if error.kind == "AttributeError" and "full_key: hydra." in error.message:
        return UserError(error.key, "does not fit", hint="python -m flatout settings lists what each key may be.")
    if error.kind.startswith("Interpolation") or error.kind in ("UnsupportedInterpolationType", "GrammarParseError"):
        return UserError(error.key or "conf", error.message.splitlines()[0], hint="Write the value itself.")
    return None


@contextmanager
def explain_errors() -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf into a UserError; let any other error pass."""
    try:
        yield
    except RunBroke:
        raise
    except Exception as error:  # errors of Hydra, YAML, the parser and user classes share no class
        mistake = explain(ComposeError.of(error))
        if mistake is None:
            raise
        raise mistake from None


def _missing_option(error: ComposeError) -> UserError:
    group, _, option = error.missing.rpartition("/")
    hint = did_you_mean(option, error.options)
    if group == "experiment":
        hint = f"{hint} To name a run, set name={option}.".lstrip()
    return UserError(group, f"no option {option!r}", allowed=", ".join(error.options) or "no options", hint=hint)


def _unreadable(error: ComposeError) -> UserError:
    hint = "Write key=value; quote a value with blanks or brackets: 'key=\"a b\"'."
    is_word = re.fullmatch(r"[\w.]+", error.override)
    if is_word and (key := find_key(error.override)):
        hint = f"Write {key}=VALUE."
    elif "=" not in error.override and Path(error.override).exists():
        hint = f"To train on that file, write data.source={error.override}."
    return UserError("command line", f"cannot read {error.override!r}", hint=hint)


def _wrong_value(error: ComposeError) -> UserError:
    message = error.message.rsplit("\nValue", 1)[-1]
    wanted = _first(r"converted to (\w+)", error.message) or _first(r"expected one of \[(.*?)\]", error.message)
    names = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "String": "a text"}
    allowed = names.get(wanted, wanted)
    value = error.value if error.value != "None" else _first(r"[Vv]alue '([^']*)'", message)
    hint = did_you_mean(value, allowed.split(", ")) if "," in allowed else ""
    if "is not Optional" in error.message:
        return UserError(as_typed(error.key), "null does not fit", hint="Give it a value, or leave it out.")
    if "is not a ListConfig" in message:
        allowed, hint = "a list", f"Write {as_typed(error.key)}=[{value}]."
    return UserError(as_typed(error.key), f"{value!r} does not fit", allowed=allowed, hint=hint)


def _several_values(word: str) -> UserError:
    """The mistake of several values for one run."""
    key, _, values = word.lstrip("+").partition("=")
    as_list = f"write '{key}=[{values}]' for one run with all of them"
    if key == "logger":
        hint = f"{as_list.capitalize()}."
    else:
        hint = f"Add -m for a run with each{f', or {as_list}' if takes_list(key) else ''}."
    return UserError(key, f"several values ({values}) for one run", hint=hint)


def _unknown_key(error: ComposeError) -> UserError:
    file = _first(r"In '([^']+)'", error.message)
    words = _first(r"To append to your config use \+(\S+)", error.message) or error.override
    words = words or _first(r"Could not delete from config\. '(.+?)' does not exist", error.message)
    typed = words.lstrip("+~").partition("=")[0]
    if plain := _first(r"Either remove \+ prefix: '(.+)'$", error.message):
        return UserError(plain.partition("=")[0], "is there already", hint=f"Leave out the plus sign: {plain}.")
    key = error.key or typed
    whole = typed if typed.startswith(f"{key}.") else key  # Hydra names the first part that is not there
    return unknown_key(key, error.beside, typed=whole, file=file)


def _keys_beside(error: BaseException) -> list[str]:
    """Keys of the node that lacks a key, from OmegaConf's error."""
    for link in _links(error, lambda link: link.__cause__ or link.__context__):
        settings = getattr(link, "object_type", None)
        if isinstance(settings, type) and is_dataclass(settings):
            return [field.name for field in fields(settings) if not field.name.startswith("_")]
    return []


def _causes(error: BaseException) -> Iterator[BaseException]:
    return _links(error, lambda link: link.__cause__)


def _links(error: BaseException, follow: Callable[[BaseException], BaseException | None]) -> Iterator[BaseException]:
    """The error and what it follows from, each once: an error that is raised again may be a cause of itself."""
    link: BaseException | None = error
    seen = set[int]()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = follow(link)


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return next(filter(None, found.groups()), "") if found else ""


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
