"""What a sweep searches and how: its settings, the trial that chosen values make, its folder.

One process at a time works in the folder. `sweep.json` there holds the command, with secrets
masked; when a sweep is resumed, its settings must equal those in the file. Open this file to change
what may differ between a sweep and its resumption.
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
from flatout.sweep.space import SettingValues, Space, words
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
        """All words of a trial with these values."""
        metric = self.settings.metric
        of_metric = [f"checkpoint.metric={metric}"] if metric else []
        return [*self.fixed, *of_metric, *words(chosen)]

    def command(self, chosen: Mapping[str, str]) -> str:
        """The line that trains these settings again."""
        return shlex.join(["python", "-m", "train", *self.train, *mask_words(self.typed(chosen))])

    def trial(self, number: int, chosen: Mapping[str, str], name: str = "", *more: str) -> Trial:
        """The trial with these values; `name` is its folder's where that is not the number."""
        typed = [*self.typed(chosen), *more]
        return Trial(
            number,
            folder=self.folder / (name or str(number)),
            job=self.compose(typed, number),
            overrides=typed,
            changed=[*words(chosen), *more],
            is_again=True,
            name=name,
        )

    def first_that_fits(self, key: str | None = None, text: str = "") -> Trial:
        """A trial that can be composed, with `key=text` where these are given.

        If no candidate can be composed, the mistake of the first one is raised.
        """
        mistakes = []
        for chosen in self._candidates(key, text):
            try:
                return self.trial(0, chosen)
            except UserError as error:
                mistakes.append(error)
        raise mistakes[0]

    def _candidates(self, key: str | None, text: str) -> Iterator[dict[str, str]]:
        """Values to compose a trial with: each setting's plainest, then one listed value changed.

            model=bilstm,bert  model.hidden=64,128    →    bilstm 64; bert 64; bilstm 128

        A value may be allowed only beside another one: `bert` may refuse 64.
        """
        plainest = {name: part.plainest for name, part in self.space.items()}
        if key:
            plainest[key] = text
        yield plainest
        for name, part in self.space.items():
            if not isinstance(part, SettingValues) or name == key:
                continue
            for value in part.values:
                if value != plainest[name]:
                    yield plainest | {name: value}


@contextmanager
def hold_folder(searched: Searched) -> Iterator[None]:
    """Hold the sweep's folder for this process, and write `sweep.json` into it.

    A folder with another sweep is refused, or with other settings where the sweep is resumed.
    """
    folder = searched.folder
    settings = searched.settings
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
        # while that sweep is at work, this is the message, not that the folder has one already
        with alone_in(folder):
            pass
    require(
        settings.resume or not path.exists(), "sweep", f"{folder} holds a sweep already", hint=hint
    )
    of_trials = re.compile(rf"\d+|confirm-\d+|{WORDS}")
    taken = next((path for path in folder.glob("*") if of_trials.fullmatch(path.name)), None)
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


def remove_sweep(folder: Path, trials: int) -> None:
    """Remove the files of a sweep without any result, and its folder if nothing else is in it."""
    for number in range(trials):
        shutil.rmtree(folder / str(number), ignore_errors=True)
    for name in (FILE, JOURNAL, PAGE, ROWS, LOCK):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def read_asked(folder: Path) -> dict[str, Any]:
    """The `sweep.json` of a folder, refused unless a sweep can be resumed from it."""
    path = str(folder / FILE)
    again = "Start a new sweep."
    asked = read_json(folder, FILE, "Name the folder that a sweep printed when it began.", again)
    require("schema" in asked, path, "is not what a sweep writes there", hint=again)
    require(
        asked["schema"] == _SCHEMA,
        path,
        f"schema {asked['schema']}",
        allowed=f"{_SCHEMA} in this version",
        hint="Resume it with the version that began it, or start a new sweep.",
    )
    # others may have written the file: a wrong type would fail later, without its name
    kinds = {"typed": list, "fixed": list, "place": str, "search": dict, "space": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(asked.get(name), kind)]
    for name in ("typed", "fixed"):
        if name not in wrong and not all(isinstance(word, str) for word in asked[name]):
            wrong.append(name)
    if wrong or not isinstance(asked.setdefault("conf", None), str | None):
        raise UserError(
            path, f"is not what a sweep writes there: {', '.join(wrong or ['conf'])}", hint=again
        )
    require(
        _is_folder(Path(asked["place"])),
        path,
        f"was begun in {asked['place']}, which is gone",
        hint="Create this folder again: the sweep's files may be named from there.",
    )
    return asked


def _is_folder(path: Path) -> bool:
    """Whether a folder is there; a name that no disk can hold is none."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _require_same(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    for section in ("search", "space"):
        for key in sorted(before[section].keys() | now[section].keys()):
            old = before[section].get(key)
            new = now[section].get(key)
            require(
                old == new,
                "sweep",
                f"{folder} was begun with {key}: {old}, and now it is {new}",
                hint="Change it back to resume, or start a new sweep.",
            )
    differing = sorted({*before["fixed"]} ^ {*now["fixed"]})
    require(
        before["fixed"] == now["fixed"],
        "sweep",
        f"{folder} was begun with other settings: {', '.join(differing)}",
        hint="Type the words that began it to resume, or start a new sweep.",
    )
