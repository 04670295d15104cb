"""A run's folder: made at the start, with a summary that is never missing and never half written."""

from __future__ import annotations

import dataclasses
import os
import shlex
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from flatout.errors import RunBroke, UserError, out_of_space
from flatout.files import REFUSALS, refused_folder
from flatout.report.page import read_curves, write_page
from flatout.report.summary import FILE as SUMMARY
from flatout.report.summary import Summary, write_atomically
from flatout.run_log import LogFile

OVERRIDES, SETTINGS = "overrides.txt", "config.yaml"
"""What was typed, a word a line; and all settings."""


@dataclasses.dataclass(slots=True)
class RunFolder:
    """Where one run puts everything, and the two things it always writes: its summary and its log."""

    path: Path
    summary: Summary
    log: LogFile
    is_first: bool = True
    """Whether this rank prints and writes; the others only read here."""
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    """What `begin` writes."""

    def begin(self) -> None:
        """Write down what this run is; a resumed run keeps its files until it proves to be the same."""
        if not self.is_first or self.has_begun:
            return
        for name, text in self.files.items():
            write_atomically(self.path / name, text)
        self.summary.path = self.path / SUMMARY
        self.summary.write()

    @property
    def has_begun(self) -> bool:
        return self.summary.path is not None

    def say(self, text: str) -> None:
        """Report one line."""
        self.log.say(text)

    def decision(self, name: str, value: object, why: str, evidence: str) -> None:
        """Report one automatic choice; one that was measured before stands."""
        self.choose(name, value, why, evidence)

    def choose(self, name: str, value: object, why: str, evidence: str, *, replaces: bool = False) -> None:
        """Keep and print one choice that the run made by itself; what was measured stands, a rule comes after it.

        `replaces`: it takes the place of an earlier choice, for what has happened since.
        """
        if not replaces and any(choice["name"] == name for choice in self.summary.values["choices"]):
            return
        self.summary.add_choice(name, value, why, evidence)
        self.log.say(f"{name}: {value} ({why}; {evidence})")


@dataclasses.dataclass(frozen=True, slots=True)
class RunTitle:
    """What a run folder writes down of its run at the beginning."""

    name: str
    seed: int
    settings: dict[str, Any]
    """All settings as plain values."""
    overrides: Sequence[str]


@contextmanager
def open_run_folder(path: Path, run: RunTitle, *, is_first: bool = True, is_again: bool = False) -> Iterator[RunFolder]:
    """The folder of a run that is about to begin or resume; closes its summary with how the run ended."""
    command = shlex.join(["python", "-m", "train", *run.overrides])
    if not is_first:
        with unwritten_run(path) as place:
            yield place
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused_folder(error, path) from None
    summary = Summary(None, experiment=run.name, command=command, seed=run.seed)
    files = {
        SETTINGS: yaml.safe_dump(run.settings, sort_keys=False, allow_unicode=True),
        OVERRIDES: "".join(f"{override}\n" for override in run.overrides),
    }
    try:
        with LogFile(path / "log.txt") as log:
            place = RunFolder(path, summary, log, files=files)
            if not is_again:
                place.begin()
            try:
                yield place
            except BaseException as error:
                _close_early(place, error)
                raise
            summary.finish("finished")
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        hint = "Make room, or set output=FOLDER on another disk. Checkpoints that are there are kept."
        raise out_of_space(error, path, None, "output", hint) from None


@contextmanager
def unwritten_run(path: Path = Path()) -> Iterator[RunFolder]:
    """A run that prints and writes nothing: of a rank that is not the first, or of parts that are only measured."""
    with LogFile(None) as silent:
        yield RunFolder(path, Summary(None, experiment="", command="", seed=0), silent, is_first=False)


def _close_early(place: RunFolder, error: BaseException) -> None:
    """Say how a run ended before its end; what cannot be written then is not worth another error."""
    place.log.keep(str(error) if isinstance(error, UserError | RunBroke) else traceback.format_exc())
    if not place.has_begun:
        return
    status = "interrupted" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed"
    with suppress(OSError):
        place.summary.finish(status)
        write_page(place.path, place.summary.values, read_curves(place.path), [])
    place.log.say(f"{status}: {place.path}")


def new_folder(parent: Path) -> Path:
    """A folder named after this moment; a number is added when another run took the same second."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    names = [stamp, *(f"{stamp}_{number}" for number in range(2, 100))]
    return next(parent / name for name in names if not os.path.lexists(parent / name))
