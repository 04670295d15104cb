"""Words of the command line in the form that Hydra asks for, and where files of settings are.

Users type `experiment=agnews data.text=Übersicht`; Hydra wants `+experiment=agnews
data.text="Übersicht"`.

To forbid an option of Hydra, add it to `_FORBIDDEN_OPTIONS`. To forbid a key in files, so that it
can only be typed, add it to `KEYS_ONLY_TYPED` in `cli/typed.py`.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import flatout
from flatout.errors import UserError, require
from flatout.masking import is_masked

if TYPE_CHECKING:  # Hydra is imported after the command line is read
    from hydra.conf import ConfigSourceInfo

HELP = tomllib.loads(Path(__file__).with_name("help.toml").read_text("utf-8"))
# not in train.yaml's list: Hydra asks for a plus sign, we take both forms
_ADDED = ("experiment", "sweep", "debug")
_LISTED = (
    "data",
    "model",
    "task",
    "optim",
    "checkpoint",
    "monitor",
    "trainer",
    "logger",
    "callbacks",
    "tune",
    "price",
)
"""Groups in the defaults list: Hydra refuses a plus sign, we take both forms."""
GROUPS = (*_LISTED, *_ADDED)
# short words for where a run computes
OF_CLUSTER = {"on": "hydra.launcher.place", "workers": "hydra.launcher.workers"}
# a value or an item with a letter beyond ASCII: in `[Übersicht,Text]` the first item
_WITH_LETTERS = r"[^\[\]{}(),:=]*[^\x00-\x7f][^\[\]{}(),:=]*"
_NOT_OF_TRAINING = ("output", "name", "resume", "resume_anyway", "allow_targets", "tune")
"""Keys dropped when the words of a run are used to train again."""
# options of Hydra that run code of others: why each is refused, and what to do instead
_FORBIDDEN_OPTIONS = {
    "--experimental-rerun": ("reads a pickle", "Type the run's overrides.txt again.")
}
# settings that follow the rows where they are null; `auto` says the same
_OPEN = ("data.batch_size", "trainer.max_epochs")


def translate_command(words: Sequence[str]) -> list[str]:
    """All words of a command line, in Hydra's form and order."""
    return options_last(debug_last(map(translate_word, replace_groups_by_classes(words))))


def translate_word(word: str) -> str:
    """A word as Hydra wants it.

    `experiment=a` → `+experiment=a`, `+model=b` → `model=b`, `on=ray` → `hydra.launcher.place=ray`.
    """
    word = quote_letters(word)
    if word.lstrip("+").startswith("optim._target_="):
        # Hydra would make the optimizer itself, before there are weights
        return f"optim.optimizer={word.partition('=')[2]}"
    if word.startswith("launcher."):
        return f"hydra.{word}"
    group, equals, option = word.removeprefix("+").partition("=")
    if option == "auto" and group in _OPEN:
        return f"{group}=null"
    if equals and group in OF_CLUSTER:
        return f"{OF_CLUSTER[group]}={option}"
    if equals and group in _ADDED:
        return f"+{group}={option}"
    return f"{group}={option}" if equals and group in _LISTED else word


def quote_letters(word: str) -> str:
    """The word with quotes where Hydra's grammar would not read the value.

    `data.text=Übersicht` → `data.text="Übersicht"`, `data.read.delimiter=;` →
    `data.read.delimiter=';'`.
    """
    key, equals, value = word.partition("=")
    if value in (";", "|", ","):
        return f"{key}='{value}'"
    if not equals or value.isascii() or re.search(r"['\"$\\]", value):
        return word
    return f"{key}=" + re.sub(_WITH_LETTERS, lambda found: f'"{found[0].strip()}"', value)


def quoted(text: str) -> str:
    """A text as a value on Hydra's command line, whatever is in it."""
    if re.fullmatch(r"[\w./:+%@-]+", text, re.ASCII):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def replace_groups_by_classes(words: Sequence[str]) -> list[str]:
    """The words with a class of yours in the place of a whole group of settings.

    `task=grams task._target_=mine.Task task.size=3` → `~task +task._target_=mine.Task
    +task.size=3`: the schema of the group would refuse the arguments of your class.
    """
    all_words = list(words)
    for group in ("data", "task"):
        if any(word.lstrip("+").startswith(f"{group}._target_=") for word in all_words):
            kept = (word for word in all_words if not word.startswith(f"{group}="))
            added = (re.sub(rf"^\+*{group}\.", f"+{group}.", word) for word in kept)
            all_words = [f"~{group}", *added]
    return all_words


def debug_last(words: Iterable[str]) -> list[str]:
    """`+debug=` at the end: Hydra composes in order, and debug overrides all files."""
    return sorted(words, key=lambda word: word.startswith("+debug="))


def options_last(words: Sequence[str]) -> list[str]:
    """Settings first, then options: `a=1 --cfg job b=2` → `a=1 b=2 --cfg job`.

    Hydra's parser takes settings in one piece only.
    """
    if "--" in words:
        return list(words)
    settings = []
    options = []
    waiting = list(words)
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
    names = (
        "--package",
        "--config-path",
        "--config-name",
        "--config-dir",
        "--experimental-rerun",
        "--cfg",
    )
    # argparse takes the beginning of an option for the whole: `--config-d` is `--config-dir`.
    is_beginning = len(option) > len("--") and any(name.startswith(option) for name in names)
    return is_beginning or option in ("-p", "-cp", "-cn", "-cd", "-c")


def refuse_forbidden_options(words: Sequence[str]) -> None:
    """Refuse `_FORBIDDEN_OPTIONS`, and a `--config-path` that names a package to import."""
    for number, word in enumerate(words):
        name, _, value = word.partition("=")
        for option, (why, instead) in _FORBIDDEN_OPTIONS.items():
            # argparse takes beginnings too, so these are refused as well
            is_forbidden = len(name) > len("--e") and option.startswith(name)
            require(not is_forbidden, option, why, hint=instead)
        is_path = name == "-cp" or (
            len(name) > len("--config-") and "--config-path".startswith(name)
        )
        if word.startswith("-cp") or is_path:
            # `--config-path=X`, `--config-path X` and `-cpX`
            written = [value] if value else [word, *words[number + 1 : number + 2]]
            require_folders("--config-path", " ".join(written))


def refuse_two_sizes(words: Sequence[str]) -> None:
    """Refuse an automatic number of rows beside a number of tokens, which would decide alone."""
    caps = [word for word in words if word.lstrip("+").startswith("data.tokens_per_batch=")]
    require(
        "data.batch_size=auto" not in words or not caps or caps[-1].endswith("=null"),
        "data.batch_size",
        f"auto with {''.join(caps[-1:])}, which decides how many rows a batch has",
        hint="Leave one of them out.",
    )


def require_folders(where: str, places: str) -> None:
    """Refuse all but folders: Hydra imports the package or module behind another scheme."""
    schemes = re.findall(r"([^\s,'\"\[\]]*?)://", places.lower())
    is_folder = all(scheme == "file" for scheme in schemes) and "pkg:" not in places.lower()
    require(is_folder, where, f"{places} names a package", hint="Name a folder.")


def with_secrets_typed(words: Sequence[str], typed: Sequence[str], where: str) -> list[str]:
    """Words of a folder, with each masked one replaced by the word that is typed for its setting.

    A folder keeps no secrets, so the user types them again.
    """
    typed_word = {key_of(word): word for word in typed}
    masked = {word: typed_word.get(key_of(word), word) for word in words if is_masked(word)}
    complete = [masked.get(word, word) for word in words]
    missing = [key_of(word) for word in complete if is_masked(word)]
    again = " ".join(f"{key}=…" for key in missing)
    require(
        not missing,
        where,
        f"the folder holds no secrets, as of {', '.join(missing)}",
        hint=f"Type them again after it: {again}",
    )
    return complete


SHORT = {
    word: f"hydra.sweeper.{word}" for word in ("trials", "sampler", "pruner", "metric", "confirm")
}
SHORT |= {"for": "hydra.sweeper.time", "parallel": "hydra.launcher.parallel"}
SHORT |= {"on": OF_CLUSTER["on"], "trial_for": "hydra.launcher.limit"}
"""Words of `python -m flatout sweep`, and the settings they stand for."""
_LONG = {setting: word for word, setting in SHORT.items()}


def command_of_sweep(typed: Sequence[str], conf: str | None = None) -> str:
    """A line to copy that begins a sweep of these words; they may be Hydra's.

    `conf` is what `--config-dir` names.
    """
    shown = [word for word in typed if word != "hydra/sweeper=flatout"]
    shown.sort(
        key=lambda word: shorten_sweep_word(word) != word
    )  # Hydra hands on its own words first
    options = [] if conf is None else ["--config-dir", conf]
    return shlex.join(
        ["python", "-m", "flatout", "sweep", *options, *map(shorten_sweep_word, shown)]
    )


def shorten_sweep_word(word: str) -> str:
    """A word of Hydra's command line as the sweep command knows it; any other unchanged."""
    key, equals, value = word.partition("=")
    return f"{_LONG[key]}={value}" if equals and key in _LONG else word


def expand_sweep_word(word: str) -> str:
    """A word of the sweep command as Hydra knows it."""
    key, equals, value = word.partition("=")
    return f"{SHORT[key]}={value}" if equals and key in SHORT else word


def is_of_training(word: str) -> bool:
    """Whether a word of a run says how it is trained."""
    if word.startswith("--config-dir="):
        return True
    is_setting = "=" in word and not word.lstrip("+~").startswith(("hydra.", "hydra/", "-"))
    group = key_of(word).partition(".")[0]
    return (is_setting or word.startswith("~")) and group not in _NOT_OF_TRAINING


def key_of(word: str) -> str:
    """The key that a word sets: `++trainer.max_steps=5` → `trainer.max_steps`."""
    return word.partition("=")[0].lstrip("+~")


def conf_folder() -> Path:
    """The folder of settings files: `$FLATOUT_CONF`, `conf/` of a checkout, or our own copy."""
    given = os.environ.get("FLATOUT_CONF")
    package = Path(flatout.__file__).parent
    places = [Path(given)] if given else [package.parents[1] / "conf", package / "conf"]
    for place in places:
        if (place / "train.yaml").is_file():
            return place.resolve()
    raise UserError(
        "FLATOUT_CONF",
        f"no train.yaml in {', '.join(map(str, places))}",
        hint="Set FLATOUT_CONF to a folder with train.yaml, or leave it out.",
    )


def conf_options(folder: str | None) -> list[str]:
    """Hydra's option for the `--config-dir` of a command, with the full path of the folder."""
    return [] if folder is None else ["--config-dir", str(Path(folder).absolute())]


def conf_words(sources: Iterable[ConfigSourceInfo]) -> list[str]:
    """The typed `--config-dir` with its full path; `sources`: where Hydra found settings."""
    places = [
        source.path for source in sources if source.provider == "command-line" and source.path
    ]
    return [f"--config-dir={Path(place).absolute()}" for place in places[:1]]
