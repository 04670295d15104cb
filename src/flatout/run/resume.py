"""Find the run that `resume` asks for: `auto` is the newest one that this command has begun, FOLDER names one.

Its checkpoint is found by `checkpoints/kept.py` and compared by `checkpoints/same_run.py`. A new start is reported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flatout.checkpoints.kept import CHECKPOINTS, newest_first
from flatout.checkpoints.same_run import have_same_settings, is_free
from flatout.errors import UserError
from flatout.report.summary import FILE as SUMMARY
from flatout.report.summary import plain, read_summary
from flatout.run.run_folder import OVERRIDES, SETTINGS

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What a command asks for, as the search for an earlier run compares it."""

    resume: str | None
    runs: Path
    """The folder of the runs of this name."""
    settings: dict[str, Any]
    """All settings as plain values."""
    overrides: Sequence[str]

    @property
    def length(self) -> dict[str, Any]:
        """How long it shall train."""
        return length_of(self.settings)


@dataclass(frozen=True, slots=True)
class Found:
    """A run to resume, or a new one."""

    folder: Path | None
    """None: a new run begins."""
    lines: list[str] = field(default_factory=list)
    """What the search has to report."""
    is_finished: bool = False
    """Whether everything it was asked for is done."""


def find_run(request: RunRequest) -> Found:
    """The run that `resume` asks for."""
    if request.resume is None:
        return Found(None)
    if request.resume != AUTO:
        folder = Path(request.resume).expanduser()
        read_summary(folder)  # refuses what is not the folder of a run
        return _found(request, folder.absolute())
    runs = sorted(request.runs.glob(f"*/{SUMMARY}"), key=lambda path: path.parent.name, reverse=True)
    same = [path.parent for path in runs if _is_same_command(path.parent, request)]
    if not same:
        count = f"none of the {len(runs)} runs" if runs else "no run"
        hint = "; resume=FOLDER resumes one of your choice" if runs else ""
        return Found(None, [f"resume: {count} in {request.runs} was begun by this command; a new one begins{hint}"])
    return _found(request, same[0].absolute())


def _found(request: RunRequest, folder: Path) -> Found:
    if read_summary(folder)["status"] == "finished" and _is_all_done(request, folder):
        return Found(folder, [f"resume: {folder} has finished; there is nothing left to train"], is_finished=True)
    return Found(folder)


def _is_same_command(folder: Path, request: RunRequest) -> bool:
    """Whether a run began with the same words, or from Python with the same settings; free ones may differ."""
    try:
        words = (folder / OVERRIDES).read_text(encoding="utf-8").splitlines()
        if words or request.overrides:
            return _deciding(words) == _deciding(request.overrides)
        return have_same_settings(_settings_in(folder), request.settings)
    except (OSError, ValueError, yaml.YAMLError):
        return False


def _settings_in(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load((folder / SETTINGS).read_text(encoding="utf-8"))
    return settings


def _deciding(words: Sequence[str]) -> list[str]:
    but = ("data.batch_size", "data.accumulate", "data.effective_batch", "precision")  # typed, it is another command
    return sorted(word for word in words if not is_free(word.lstrip("+~").partition("=")[0], but))


def _is_all_done(request: RunRequest, folder: Path) -> bool:
    """Whether a finished run did all that is asked for: the same settings, and no more epochs, steps or time."""
    try:
        then = _settings_in(folder)
        return have_same_settings(then, request.settings) and request.length == length_of(then)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return False


def length_of(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that decide how long a run trains."""
    trainer = settings["trainer"]
    lengths = {name: plain(trainer.get(name)) for name in ("max_epochs", "max_steps", "max_time")}
    return {**lengths, "patience": settings["checkpoint"]["patience"]}


def unfinished_before(request: RunRequest) -> str | None:
    """A line about an earlier run of this command that did not finish; None without one."""
    try:
        newest = max(request.runs.glob(f"*/{SUMMARY}"), key=lambda path: path.parent.name, default=None)
        if newest is None or not _is_same_command(newest.parent, request):
            return None
        status = read_summary(newest.parent)["status"]
        has_any = bool(newest_first(newest.parent / CHECKPOINTS))
    except (OSError, UserError):
        return None
    if status == "finished" or not has_any:
        return None
    return f"an earlier run of this command ended early ({os.path.relpath(newest.parent)}): resume=auto resumes it"
