"""`python -m flatout settings [KEY]`: what each setting does, what it may be, its default, and an
example.

All of it is read off the fields of the Configs (`flatout.errors.setting`); Lightning's Trainer
describes its own. `python -m train --help` shows the keys that people set first, with the values
that the given words compose.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import lightning as L
from omegaconf import DictConfig, OmegaConf

from flatout.callbacks.loggers import LOGGERS
from flatout.cli.composing import COMPONENTS, OPTIONS, ours_of_trainer
from flatout.cli.words import HELP, in_short
from flatout.config import REPLACED, TRAINER_ARGUMENTS, RunConfig
from flatout.errors import About, UserError, about_settings
from flatout.sweep.settings import LauncherSettings, SweeperSettings

_KEY_WIDTH = 42
_HELP_WIDTH = 36
_TYPES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
}
_TYPES |= {list: "a list", dict: "a mapping", type(None): "null", Any: "any value"}
_BESIDE = {"tune.": "tune=auto", "monitor.profile.": "monitor=profile"}
_BESIDE |= {f"logger.{name}.": f"logger={name}" for name in LOGGERS}
"""What stands before the example of a setting that has no effect alone."""


@dataclass(frozen=True, slots=True)
class SettingPage:
    key: str
    option: str  # the words that choose it, such as `model=bilstm`; `run` for settings of every run
    does: str
    allowed: str
    default: str
    example: str  # one way to set it, as typed on the command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a key, a group such as data, or an option such as model=bilstm"
    parser.add_argument("key", metavar="KEY", nargs="?", default="", help=text)


def run(arguments: argparse.Namespace) -> None:
    key = arguments.key
    known = list(all_settings())
    chosen = [each for each in known if each.key == key]
    for each in chosen:
        print(f"{each.key}  ({each.option})")
        for name in ("does", "allowed", "default", "example"):
            print(
                textwrap.fill(
                    getattr(each, name),
                    width(),
                    initial_indent=f"  {name:9}",
                    subsequent_indent=" " * 11,
                )
            )
    if chosen:
        return
    group = [
        each for each in known if not key or each.option == key or each.key.startswith(f"{key}.")
    ]
    if not group:
        near = difflib.get_close_matches(key, {each.key for each in known}, n=5, cutoff=0.5)
        hint = (
            f"Did you mean {', '.join(near)}?" if near else "python -m flatout settings lists all."
        )
        raise UserError(f"settings {key}", "no such key", hint=hint)
    for place, (option, settings) in enumerate(
        itertools.groupby(group, key=lambda each: each.option)
    ):
        print(f"\n{option}" if place else option)
        for each in settings:
            head = f"  {each.key}={each.default}".ljust(_KEY_WIDTH) + " "
            print(
                textwrap.fill(
                    each.does,
                    width(),
                    initial_indent=head,
                    subsequent_indent=" " * (_KEY_WIDTH + 1),
                )
            )


def all_settings() -> Iterator[SettingPage]:
    """Every setting: of each run, of each option of each group, of Lightning's Trainer,
    of sweeps.
    """
    grouped = (*COMPONENTS, "trainer")
    ours = [
        each
        for each in _settings_of(RunConfig, "", "run")
        if each.key.partition(".")[0] not in grouped
    ]
    for group, name, settings in OPTIONS:
        ours += _settings_of(settings, f"{group}.", f"{group.partition('.')[0]}={name}")
    for name, settings in LOGGERS.items():
        ours += _settings_of(settings, f"logger.{name}.", f"logger={name}")
    yield from ours
    yield from _settings_of_trainer({each.key: each.example for each in ours})
    yield from _settings_of(LauncherSettings, "launcher.", "python -m train -m")
    for each in _settings_of(SweeperSettings, "hydra.sweeper.", "python -m flatout sweep"):
        yield replace(
            each, key=in_short(f"{each.key}=").rstrip("="), example=in_short(each.example)
        )


def _settings_of(kind: type, prefix: str, option: str) -> Iterator[SettingPage]:
    hints = typing.get_type_hints(kind)
    about = about_settings(kind)
    for field in fields(kind):
        key = f"{prefix}{field.name}"
        hint = hints[field.name]
        if isinstance(hint, type) and is_dataclass(hint):
            yield from _settings_of(hint, f"{key}.", option)
        elif said := about.get(field.name):
            shown = said.choices if hint is str and said.choices else hint
            allowed = said.allowed or ", ".join(filter(None, (describe_type(shown), said.range)))
            default = field.default if field.default_factory is MISSING else field.default_factory()
            yield SettingPage(
                key, option, said.does, allowed, as_word(default), _example(key, said, default)
            )


def _example(key: str, about: About, default: Any) -> str:
    """Words of a command line that set a setting: its own, else a switch turned, or
    another choice.
    """
    is_number = isinstance(default, int | float) and about.holds(2 * default)
    choices = (
        (not default,)
        if isinstance(default, bool)
        else about.choices or ((2 * default,) if is_number else ())
    )
    words = about.example or as_word(next((each for each in choices if each != default), default))
    if "=" not in words.partition(" ")[0]:
        words = f"{key}={words}"
    beside = next((f"{others} " for group, others in _BESIDE.items() if key.startswith(group)), "")
    return words if beside.startswith(words) else f"{beside}{words}"


def describe_type(hint: Any) -> str:
    """What a setting of this type may be: names of an Enum's members, or words for plain types."""
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = (typing.get_origin(part) or part for part in parts)
    return ", ".join(
        _TYPES.get(kind) or ", ".join(str(member.value) for member in kind) for kind in kinds
    )


def _settings_of_trainer(examples: Mapping[str, str]) -> Iterator[SettingPage]:
    """Arguments of Lightning's Trainer, in Lightning's words; `examples` are those of
    our settings.
    """
    ours = ours_of_trainer()
    described = L.Trainer.__init__.__doc__ or ""
    does = dict(
        re.findall(r"^ {12}(\w+): (.+?)(?=^ {12}\w+:|^ {8}Raises|\Z)", described, re.M | re.S)
    )
    for name, argument in TRAINER_ARGUMENTS.items():
        key = f"trainer.{name}"
        default = as_word(ours.get(name, argument.default))
        about = " ".join(does.get(name, "").split()).partition(". ")[0]
        if name in REPLACED:
            yield SettingPage(
                key,
                "trainer",
                about,
                f"set {REPLACED[name]} instead",
                default,
                examples[REPLACED[name]],
            )
            continue
        value = (
            "false"
            if argument.default is True
            else "true"
            if "bool" in str(argument.annotation)
            else "2"
        )
        example = HELP["trainer"].get(name, f"{'' if name in ours else '+'}{key}={value}")
        yield SettingPage(key, "trainer", about, "as in Lightning's Trainer", default, example)


def as_word(value: Any) -> str:
    """A value as typed on the command line."""
    value = value.value if isinstance(value, Enum) else value
    if value is None or isinstance(value, bool | str):
        return {None: "null", True: "true", False: "false", "": "''"}.get(value, str(value))
    return repr(value)


def width() -> int:
    """Characters in a line of the terminal, within bounds that read well."""
    return min(120, max(80, shutil.get_terminal_size().columns))


# `python -m train --help`.

_GROUPS = (
    "data",
    "model",
    "task",
    "trainer",
    "callbacks",
    "logger",
    "monitor",
    "tune",
    "experiment",
    "sweep",
    "debug",
)


def help_text(words: Sequence[str], conf: Path) -> str:
    """The help for some words of the command line; those that only ask for it are left out."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(conf), version_base="1.3"):
        cfg = compose("train", _settings_among(words), return_hydra_config=True)
    known = list(all_settings())
    choices = cfg.hydra.runtime.choices.items()
    # the sample without a source
    near = [*(f"{group}={option}" for group, option in choices), "data=headlines"]
    lines = [HELP["usage"], "Groups: choose with GROUP=OPTION"]
    shown = 0
    for group in _GROUPS:
        names = ", ".join(sorted(path.stem for path in (conf / group).glob("*.yaml")))
        lines.append(
            textwrap.fill(names, width(), initial_indent=f"  {group}: ", subsequent_indent=" " * 4)
        )
    lines.append("")
    for title, keys in map(dict.values, HELP["sections"]):
        if rows := [_row(cfg, key, known, near) for key in _expand(cfg, keys)]:
            lines += [title, *rows, ""]
            shown += len(rows)
    return "\n".join(
        [*lines, HELP["others"].format(count=len({each.key for each in known}) - shown)]
    )


def _settings_among(words: Sequence[str]) -> list[str]:
    """The settings among the words, and a folder of `--config-dir` as Hydra's search path."""
    settings = [word for word in words if "=" in word and not word.startswith("-")]
    for number, word in enumerate(words):
        name, _, value = word.partition("=")
        if name in ("--config-dir", "-cd"):
            folder = Path(value or "".join(words[number + 1 : number + 2])).absolute()
            settings.append(f"hydra.searchpath=[file://{folder}]")
    return settings


def _expand(cfg: DictConfig, keys: str) -> Iterator[str]:
    """The keys that these settings have; `group.*` becomes the plain values below a group."""
    for key in keys.split():
        parent, _, name = key.rpartition(".")
        section = OmegaConf.select(cfg, parent) if parent else cfg
        if not isinstance(section, DictConfig):
            continue
        for each in map(str, section):
            value = section._get_node(each)
            is_group = (
                isinstance(value, DictConfig)
                and not value._is_none()
                and len(value)
                and each != "logger"
            )
            if name in ("*", each) and not is_group:
                yield f"{parent}.{each}".lstrip(".")


def _row(cfg: DictConfig, key: str, known: list[SettingPage], near: list[str]) -> str:
    """`key=value` and what it does, of a near option or of any, in one line or more."""
    found = (setting for setting in known if setting.key == key)
    setting = min(
        found,
        key=lambda each: near.index(each.option) if each.option in near else len(near),
        default=None,
    )
    value: Any = OmegaConf.select(cfg, key)
    does = HELP["short"].get(key) or (
        _in_short(setting.does, is_null=value is None) if setting else ""
    )
    if setting and re.fullmatch(r"\w+(, \w+)+", setting.allowed):  # words to choose from
        does += f" ({setting.allowed})"
    shown = as_word(list(value) if key == "logger" and value else value)
    head = f"  {key}={shown}".replace("'", "").ljust(_HELP_WIDTH)
    return textwrap.fill(
        does, width(), initial_indent=f"{head} ", subsequent_indent=" " * (_HELP_WIDTH + 1)
    )


def _in_short(does: str, *, is_null: bool) -> str:
    """The first part of a text; of a setting that is null, what null means too."""
    first = re.split(r"(?<=[\w`)])[.;] ", does)[0].rstrip(".")
    null = re.search(r"null: ((?:[^.;]|\.\d)+)", does)
    return (
        f"{first}; null: {null[1].strip()}" if is_null and null and null[0] not in first else first
    )
