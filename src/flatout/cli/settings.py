"""`python -m flatout settings [KEY]`: what a setting does, what it may be, its default, an example.

All of it is read off the fields of the Configs (`flatout.errors.setting`); Lightning's Trainer
describes its own. `python -m train --help` shows the keys that people set first, with the values
that the typed words give them.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
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
from flatout.cli.composing import (
    COMPONENTS,
    OPTIONS,
    WORDS_ELSEWHERE,
    find_key,
    ours_of_trainer,
)
from flatout.cli.words import HELP, shorten_sweep_word
from flatout.config import REPLACED, TRAINER_ARGUMENTS, RunConfig
from flatout.errors import About, UserError, about_settings
from flatout.sweep.settings import LauncherSettings, SweeperSettings

# characters of the left column, `key=value`
_KEY_WIDTH = 42
_HELP_WIDTH = 36
_TYPES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "a mapping",
    type(None): "null",
    Any: "any value",
}
# the words that settings of a group need beside them to have an effect
_BESIDE = {"tune.": "tune=auto", "monitor.profile.": "monitor=profile"}
_BESIDE |= {f"logger.{name}.": f"logger={name}" for name in LOGGERS}


@dataclass(frozen=True, slots=True)
class SettingPage:
    """Everything printed about one setting."""

    key: str
    option: str  # the words that choose it, such as `model=bilstm`; `run` for settings of every run
    does: str
    allowed: str
    default: str
    example: str  # one way to set it, as typed on the command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a key, a group such as data, an option such as model=bilstm, or words to look for"
    parser.add_argument("key", metavar="KEY", nargs="?", default="", help=text)


def run(arguments: argparse.Namespace) -> None:
    """Print the pages of a key; of a group or an option, a line for each of its settings.

    Any other text is looked for in the names and the sentences of all settings.
    """
    key = arguments.key
    pages = list(all_settings())
    chosen = [page for page in pages if page.key == key]
    for page in chosen:
        print(f"{page.key}  ({page.option})")
        for name in ("does", "allowed", "default", "example"):
            print(fill(getattr(page, name), f"  {name:9}", indent=11))
    if chosen:
        return
    group = [
        page for page in pages if not key or page.option == key or page.key.startswith(f"{key}.")
    ]
    if not group and "." not in key:
        group = [page for page in pages if _mentions(page, key)]
    if not group:
        meant = WORDS_ELSEWHERE.get(key) or ("" if "." in key else find_key(key))
        keys = {page.key for page in pages}
        near = [meant] if meant else difflib.get_close_matches(key, keys, n=5, cutoff=0.5)
        hint = "python -m flatout settings lists all."
        if near:
            hint = f"Did you mean {', '.join(near)}?"
        raise UserError(f"settings {key}", "no such key", hint=hint)
    option = group[0].option
    print(option)
    for page in group:
        if page.option != option:
            option = page.option
            print(f"\n{option}")
        head = f"  {page.key}={page.default}".ljust(_KEY_WIDTH)
        print(fill(page.does, f"{head} ", indent=_KEY_WIDTH + 1))


def _mentions(page: SettingPage, text: str) -> bool:
    """Whether a text is part of a setting's name, or begins a word of its sentence.

    `lr` is part of `optim.lr`, and `flush` of `monitor.flush_every`; `rate` begins a word of "The
    learning rate.", and is not looked for inside of `separate`.
    """
    begins_word = re.search(rf"\b{re.escape(text)}", page.does, re.IGNORECASE)
    return text.lower() in page.key or begins_word is not None


def fill(text: str, head: str, *, indent: int) -> str:
    """A text behind a head, broken to the terminal's width; later lines begin with blanks."""
    return textwrap.fill(text, width(), initial_indent=head, subsequent_indent=" " * indent)


def all_settings() -> Iterator[SettingPage]:
    """Every setting: of a run, of each option of each group, of Lightning's Trainer, of sweeps."""
    grouped = (*COMPONENTS, "trainer")
    of_run = _settings_of(RunConfig, "", "run")
    ours = [page for page in of_run if page.key.partition(".")[0] not in grouped]
    for group, name, settings in OPTIONS:
        ours += _settings_of(settings, f"{group}.", f"{group.partition('.')[0]}={name}")
    for name, settings in LOGGERS.items():
        ours += _settings_of(settings, f"logger.{name}.", f"logger={name}")
    yield from ours
    yield from _settings_of_trainer({page.key: page.example for page in ours})
    yield from _settings_of(LauncherSettings, "launcher.", "python -m train -m")
    for page in _settings_of(SweeperSettings, "hydra.sweeper.", "python -m flatout sweep"):
        key = shorten_sweep_word(f"{page.key}=").rstrip("=")
        yield replace(page, key=key, example=shorten_sweep_word(page.example))


def _settings_of(kind: type, prefix: str, option: str) -> Iterator[SettingPage]:
    hints = typing.get_type_hints(kind)
    about = about_settings(kind)
    for field in fields(kind):
        key = f"{prefix}{field.name}"
        hint = hints[field.name]
        if isinstance(hint, type) and is_dataclass(hint):
            yield from _settings_of(hint, f"{key}.", option)
        elif field.name in about:
            described = about[field.name]
            shown = described.choices if hint is str and described.choices else hint
            default = field.default if field.default_factory is MISSING else field.default_factory()
            yield SettingPage(
                key=key,
                option=option,
                does=described.does,
                allowed=described.allowed or _describe_allowed(shown, described.range),
                default=as_word(default),
                example=_example(key, described, default),
            )


def _example(key: str, about: About, default: object) -> str:
    """Words that set a setting: its own example, else a value other than the default.

    A switch is turned, a number doubled, of choices the first other one is taken.
    """
    value = default
    if about.example:
        value = about.example
    elif isinstance(default, bool):
        value = not default
    elif about.choices:
        value = next(choice for choice in about.choices if choice != default)
    elif isinstance(default, int | float) and about.holds(2 * default):
        value = 2 * default
    words = as_word(value)
    if "=" not in words.partition(" ")[0]:
        words = f"{key}={words}"
    for group, others in _BESIDE.items():
        if key.startswith(group) and not others.startswith(words):
            words = f"{others} {words}"
    return words


def _describe_allowed(hint: object, bounds: str) -> str:
    """The type and the range of a setting: "a number, above 0, or null"."""
    kinds = describe_type(hint).split(", ")
    words = [kind for kind in kinds if kind != "null"]
    if bounds:
        words.append(bounds)
    if "null" in kinds:
        words.append("or null")
    return ", ".join(words)


def describe_type(hint: object) -> str:
    """What a setting of a type may be, in words: `int | None` is "a whole number, null".

    Of an Enum, the values of its members.
    """
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    words = []
    for part in parts:
        kind = typing.get_origin(part) or part
        if kind in _TYPES:
            words.append(_TYPES[kind])
        else:
            words += [str(member.value) for member in kind]
    return ", ".join(words)


def _settings_of_trainer(examples: Mapping[str, str]) -> Iterator[SettingPage]:
    """Arguments of Lightning's Trainer, in Lightning's words; `examples` are those of our keys."""
    ours = ours_of_trainer()
    # From Python 3.13 on a docstring has no indent; `getdoc` takes it off below.
    described = inspect.getdoc(L.Trainer.__init__) or ""
    # "    name: text", up to the next name or the list of errors
    does = dict(re.findall(r"^ {4}(\w+): (.+?)(?=^ {4}\w+:|^Raises|\Z)", described, re.M | re.S))
    for name, argument in TRAINER_ARGUMENTS.items():
        key = f"trainer.{name}"
        default = as_word(ours.get(name, argument.default))
        about = " ".join(does.get(name, "").split()).partition(". ")[0]
        if name in REPLACED:
            instead = REPLACED[name]
            allowed = f"set {instead} instead"
            yield SettingPage(key, "trainer", about, allowed, default, examples[instead])
            continue
        value = "true" if "bool" in str(argument.annotation) else "2"
        if argument.default is True:
            value = "false"
        plus = "" if name in ours else "+"
        example = HELP["trainer"].get(name, f"{plus}{key}={value}")
        yield SettingPage(key, "trainer", about, "as in Lightning's Trainer", default, example)


def as_word(value: object) -> str:
    """A value as typed on the command line: null, true, 0.5, `''` for an empty text."""
    if isinstance(value, Enum):
        value = value.value
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value or "''"
    return repr(value)


def width() -> int:
    """Characters in a line of the terminal, within bounds that read well."""
    return min(120, max(80, shutil.get_terminal_size().columns))


# groups that `python -m train --help` lists with their options
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
    """The help for a command line, with the values that its settings compose."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(conf), version_base="1.3"):
        cfg = compose("train", _settings_among(words), return_hydra_config=True)
    pages = list(all_settings())
    choices = cfg.hydra.runtime.choices.items()
    # without a source a run reads the headlines
    near = [*(f"{group}={option}" for group, option in choices), "data=headlines"]
    lines = [HELP["usage"], "Groups: choose with GROUP=OPTION"]
    shown = 0
    for group in _GROUPS:
        names = ", ".join(sorted(path.stem for path in (conf / group).glob("*.yaml")))
        lines.append(fill(names, f"  {group}: ", indent=4))
    lines.append("")
    for title, keys in map(dict.values, HELP["sections"]):
        if rows := [_row(cfg, key, pages, near) for key in _expand(cfg, keys)]:
            lines += [title, *rows, ""]
            shown += len(rows)
    others = len({page.key for page in pages}) - shown
    return "\n".join([*lines, HELP["others"].format(count=others)])


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
    """Those of some keys that these settings have; `group.*` is every plain value of a group."""
    for key in keys.split():
        parent, _, name = key.rpartition(".")
        section = OmegaConf.select(cfg, parent) if parent else cfg
        if not isinstance(section, DictConfig):
            continue
        for child in map(str, section):
            value = section._get_node(child)
            is_group = (
                isinstance(value, DictConfig)
                and not value._is_none()
                and len(value)
                and child != "logger"
            )
            if name in ("*", child) and not is_group:
                yield f"{parent}.{child}".lstrip(".")


def _row(cfg: DictConfig, key: str, pages: list[SettingPage], near: list[str]) -> str:
    """`key=value` and what it does, in one line or more.

    If several options have the key, the one that stands first in `near` describes it.
    """

    def rank(page: SettingPage) -> int:
        return near.index(page.option) if page.option in near else len(near)

    page = min((page for page in pages if page.key == key), key=rank, default=None)
    value: Any = OmegaConf.select(cfg, key)
    does = HELP["short"].get(key, "")
    if page and not does:
        does = _in_short(page.does, is_null=value is None)
    if page and re.fullmatch(r"\w+(, \w+)+", page.allowed):  # words to choose from
        does += f" ({page.allowed})"
    shown = as_word(list(value) if key == "logger" and value else value)
    head = f"  {key}={shown}".replace("'", "").ljust(_HELP_WIDTH)
    return fill(does, f"{head} ", indent=_HELP_WIDTH + 1)


def _in_short(does: str, *, is_null: bool) -> str:
    """The first part of a description; of a setting that is null, also what null means."""
    first = re.split(r"(?<=[\w`)])[.;] ", does)[0].rstrip(".")
    null = re.search(r"null: ((?:[^.;]|\.\d)+)", does)
    if is_null and null and null[0] not in first:
        return f"{first}; null: {null[1].strip()}"
    return first
