"""What a sweep searches and how: its settings, the trial that some chosen values make, and its
folder.

The folder is for one process at a time. The command is written down in it, and compared when the
sweep is resumed.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import UserError, require
from flatout.files import write_atomically
from flatout.masking import mask_settings, mask_words
from flatout.report.summary import json_safe, read_json
from flatout.report.sweep_page import PAGE, ROWS
from flatout.sweep.many import LOCK, WORDS, alone_in
from flatout.sweep.settings import LauncherSettings, SweeperSettings
from flatout.sweep.space import SettingInterval, SettingValues, Space, words
from flatout.sweep.study import JOURNAL
from flatout.sweep.trial import Trial

if TYPE_CHECKING:
    from flatout.run.job import RunJob

Compose = Callable[[Sequence[str], int], "RunJob"]
"""The run of a trial, from what is typed for it; a user's mistake is a `UserError`."""
FILE = "sweep.json"
_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Searched:
    """What makes a trial of some settings, and the command that began the sweep."""

    settings: SweeperSettings
    space: Space
    fixed: list[str]  # words that are the same in all trials
    compose: Compose
    folder: Path
    launcher: LauncherSettings = field(default_factory=LauncherSettings)
    begun_by: Sequence[str] = ()  # the words of the command, to resume it by
    conf: str | None = None  # the folder behind `--config-dir`
    line: str = ""  # all of the command, to copy
    train: Sequence[str] = ()  # what `python -m train` needs before the words of a trial

    def typed(self, chosen: Mapping[str, str]) -> list[str]:
        metric = self.settings.metric
        return [*self.fixed, *([f"checkpoint.metric={metric}"] if metric else []), *words(chosen)]

    def command(self, chosen: Mapping[str, str]) -> str:
        """The line that trains these settings again."""
        return shlex.join(["python", "-m", "train", *self.train, *mask_words(self.typed(chosen))])

    def trial(self, number: int, chosen: Mapping[str, str], name: str = "", *more: str) -> Trial:
        typed = [*self.typed(chosen), *more]
        folder = self.folder / (name or str(number))
        changed = [*words(chosen), *more]
        return Trial(
            number, folder, self.compose(typed, number), typed, changed, is_again=True, name=name
        )

    def first_that_fits(self, key: str | None = None, text: str = "") -> Trial:
        """A trial that can be composed (others forbid a value: changed one at a time); else what is
        wrong with one.
        """
        plainest = {
            name: own.text(own.low) if isinstance(own, SettingInterval) else own.values[0]
            for name, own in self.space.items()
        }
        plainest |= {key: text} if key else {}
        listed = {
            name: part.values
            for name, part in self.space.items()
            if isinstance(part, SettingValues) and name != key
        }
        near = (
            plainest | {name: each}
            for name, values in listed.items()
            for each in values
            if each != plainest[name]
        )
        mistakes = []
        for chosen in (plainest, *near):
            try:
                return self.trial(0, chosen)
            except UserError as error:
                mistakes.append(error)
        raise mistakes[0]


@contextmanager
def held(searched: Searched) -> Iterator[None]:
    """The sweep's folder; what was asked for is written down, or compared with what was."""
    folder, settings = searched.folder, searched.settings
    asked = {
        "schema": _SCHEMA,
        "typed": mask_words(searched.begun_by),
        "conf": searched.conf,
        "place": str(Path.cwd()),
        "search": json_safe(settings.of_the_search()),
        "space": mask_settings({key: str(part) for key, part in searched.space.items()}),
        "fixed": mask_words(searched.fixed),
    }
    path = folder / FILE
    hint = f"Resume it by: python -m flatout sweep resume {folder}. Or leave hydra.sweep.dir out."
    if path.exists():
        with alone_in(folder):  # where the sweep is at work, that is what is said
            pass
    require(
        settings.resume or not path.exists(), "sweep", f"{folder} holds a sweep already", hint=hint
    )
    taken = next(
        (each for each in folder.glob("*") if re.fullmatch(rf"\d+|confirm-\d+|{WORDS}", each.name)),
        None,
    )
    require(
        settings.resume or taken is None,
        "hydra.sweep.dir",
        f"{taken} is there already",
        hint="Choose another hydra.sweep.dir.",
    )
    with alone_in(folder):
        if settings.resume:
            _require_same(read_asked(folder), asked, folder)
        write_atomically(path, json.dumps(asked, indent=1, ensure_ascii=False))
        yield


def forget(folder: Path, trials: int) -> None:
    """Take away what a sweep has left of which no trial is worth keeping; what else lies there
    stays.
    """
    for number in range(trials):
        shutil.rmtree(folder / str(number), ignore_errors=True)
    for name in (FILE, JOURNAL, PAGE, ROWS, LOCK):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def read_asked(folder: Path) -> dict[str, Any]:
    """What a sweep was begun with."""
    path = str(folder / FILE)
    again = "Start a new sweep."
    asked = read_json(folder, FILE, "Name the folder that a sweep printed when it began.", again)
    require("schema" in asked, path, "is not what a sweep writes there", hint=again)
    hint = "Resume it with the version that began it, or start a new sweep."
    what, known = f"schema {asked['schema']}", f"{_SCHEMA} in this version"
    require(asked["schema"] == _SCHEMA, path, what, allowed=known, hint=hint)
    kinds = {"typed": list, "fixed": list, "place": str, "search": dict, "space": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(asked.get(name), kind)]
    if wrong or not isinstance(asked.setdefault("conf", None), str | None):
        raise UserError(
            path, f"is not what a sweep writes there: {', '.join(wrong or ['conf'])}", hint=again
        )
    require(
        Path(asked["place"]).is_dir(),
        path,
        f"was begun in {asked['place']}, which is gone",
        hint="Create this folder again: the sweep's files may be named from there.",
    )
    return asked


def _require_same(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    for section in ("search", "space"):
        old, new = before[section], now[section]
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                raise UserError(
                    "sweep",
                    f"{folder} was begun with {key}: {old.get(key)}, and now it is {new.get(key)}",
                    hint="Change it back to resume, or start a new sweep.",
                )
    if before["fixed"] != now["fixed"]:
        raise UserError(
            "sweep",
            (
                f"{folder} was begun with other settings:"
                f" {', '.join(sorted({*before['fixed']} ^ {*now['fixed']}))}"
            ),
            hint="Type the words that began it to resume, or start a new sweep.",
        )
