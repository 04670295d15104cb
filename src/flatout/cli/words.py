"""Words of the command line in the form that Hydra asks for; those that would run code are refused."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from flatout.errors import require

_ADDED = ("experiment", "sweep", "debug")
"""Groups outside the defaults list of train.yaml: Hydra asks for a plus sign, we take both forms."""
_LISTED = ("data", "model", "task", "optim", "checkpoint", "monitor", "trainer", "logger", "callbacks", "tune")
"""Groups in the defaults list: Hydra refuses a plus sign, we take both forms."""
GROUPS = (*_LISTED, *_ADDED)
OF_CLUSTER = {"on": "hydra.launcher.place", "workers": "hydra.launcher.workers"}
"""Where a run or a sweep computes, in short."""
_WITH_LETTERS = r"[^\[\]{}(),:=]*[^\x00-\x7f][^\[\]{}(),:=]*"
"""A value, or one item of a list, with a letter beyond ASCII."""


def for_hydra(words: Sequence[str]) -> list[str]:
    """All words of a command line, in Hydra's form and order."""
    return options_last(debug_last(map(in_hydras_form, with_own_parts(words))))


def in_hydras_form(word: str) -> str:
    word = quote_letters(word)
    if word.startswith("launcher."):
        return f"hydra.{word}"
    group, equals, option = word.removeprefix("+").partition("=")
    if equals and group in OF_CLUSTER:
        return f"{OF_CLUSTER[group]}={option}"
    if equals and group in _ADDED:
        return f"+{group}={option}"
    return f"{group}={option}" if equals and group in _LISTED else word


def quote_letters(word: str) -> str:
    """A word such as `data.text=Übersicht` or `data.read.delimiter=;` with the quotes that Hydra wants there."""
    key, equals, value = word.partition("=")
    if value in (";", "|", ","):
        return f"{key}='{value}'"
    if not equals or value.isascii() or re.search(r"['\"$\\]", value):
        return word
    value = re.sub(_WITH_LETTERS, lambda found: f'"{found[0].strip()}"', value)
    return f"{key}={value}"


def quoted(text: str) -> str:
    """A text as a value on Hydra's command line, whatever is in it."""
    if re.fullmatch(r"[\w./:+%@-]+", text, re.ASCII):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def with_own_parts(words: Sequence[str]) -> list[str]:
    """The words without the option of a group whose `_target_` is typed: a class of yours takes its place."""
    found = list(words)
    for group in ("data", "task"):
        if any(word.lstrip("+").startswith(f"{group}._target_=") for word in found):
            kept = (word for word in found if not word.startswith(f"{group}="))
            found = [f"~{group}", *(re.sub(rf"^\+*{group}\.", f"+{group}.", word) for word in kept)]
    return found


def debug_last(words: Iterable[str]) -> list[str]:
    """`+debug=` at the end: Hydra composes in order, and debug overrides all files."""
    return sorted(words, key=lambda word: word.startswith("+debug="))


def options_last(words: Sequence[str]) -> list[str]:
    """Settings first, then options: Hydra's parser takes settings in one piece only."""
    if "--" in words:
        return list(words)
    settings, options, waiting = [], [], list(words)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("-"):
            settings.append(word)
            continue
        options.append(word)
        if waiting and _takes_value(word, waiting[0]):
            options.append(waiting.pop(0))
    return [*settings, *options]


def _takes_value(option: str, following: str) -> bool:
    if option in ("-i", "--info"):
        return following in ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
    names = ("--package", "--config-path", "--config-name", "--config-dir", "--experimental-rerun", "--cfg")
    is_beginning = len(option) > len("--") and any(name.startswith(option) for name in names)  # argparse takes them too
    return is_beginning or option in ("-p", "-cp", "-cn", "-cd", "-c")


def refuse_pickles_and_packages(words: Sequence[str]) -> None:
    """Refuse two options of Hydra: one unpickles a file, one may import a package to read settings."""
    for number, word in enumerate(words):
        name, _, value = word.partition("=")
        is_rerun = len(name) > len("--e") and "--experimental-rerun".startswith(name)  # argparse takes beginnings too
        require(not is_rerun, "--experimental-rerun", "reads a pickle", hint="Type the run's overrides.txt again.")
        is_path = name == "-cp" or (len(name) > len("--config-") and "--config-path".startswith(name))
        if word.startswith("-cp") or is_path:
            require_folders("--config-path", " ".join([value or word, *words[number + 1 : number + 2]]))


def require_folders(where: str, places: str) -> None:
    """Refuse packages: Hydra imports a package to look for settings in it."""
    require("pkg:" not in places.lower(), where, f"{places} names a package", hint="Name a folder.")


SHORT = {word: f"hydra.sweeper.{word}" for word in ("trials", "sampler", "pruner", "metric", "confirm")}
SHORT |= {"for": "hydra.sweeper.time", "parallel": "hydra.launcher.parallel"}
SHORT |= {"on": OF_CLUSTER["on"], "trial_for": "hydra.launcher.limit"}
"""Words of `python -m flatout sweep`, and the settings they stand for."""
_LONG = {setting: word for word, setting in SHORT.items()}


def command_of_sweep(typed: Sequence[str], conf: str | None = None) -> str:
    """A line to copy that begins a sweep of these words; they may be Hydra's. `conf` is what `--config-dir` names."""
    shown = [word for word in typed if word != "hydra/sweeper=flatout"]
    shown.sort(key=lambda word: in_short(word) != word)  # Hydra hands on its own words first
    options = [] if conf is None else ["--config-dir", conf]
    return shlex.join(["python", "-m", "flatout", "sweep", *options, *map(in_short, shown)])


def in_short(word: str) -> str:
    """A word of Hydra's command line as the sweep command knows it; any other unchanged."""
    key, equals, value = word.partition("=")
    return f"{_LONG[key]}={value}" if equals and key in _LONG else word


def in_full(word: str) -> str:
    """A word of the sweep command as Hydra knows it."""
    key, equals, value = word.partition("=")
    return f"{SHORT[key]}={value}" if equals and key in SHORT else word
