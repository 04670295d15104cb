"""The folder of a training's checkpoints: which is the best, which stay, which one to resume from.

    checkpoints/step-100  step-200  step-300    best -> step-100    last -> step-300

`best` and `last` are links. The checkpoint before the last stays too, in case the last is damaged;
older ones are deleted. Open this file to change which checkpoints stay.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L

from flatout.checkpoints.folder import MAKE_ROOM, OWN_FOLDER, REMOVE_IT, require_whole
from flatout.errors import UserError, out_of_space, require
from flatout.files import numbered, put_back

CHECKPOINTS = "checkpoints"  # their folder in a run's folder


@dataclass(slots=True)
class Best:
    """The best value of a metric so far, and the step it was found at."""

    # name the metric is logged under, such as `val/accuracy`; None: none is best
    monitor: str | None = None
    mode: str = "max"
    min_delta: float = 0.0
    value: float | None = None
    step: int | None = None
    # The loss of that validation, which decides where the metric ties; None: no loss is logged.
    loss: float | None = None
    # Its epoch, counted from 1. Checkpoints of earlier versions do not have it.
    epoch: int | None = None

    def __post_init__(self) -> None:
        require(
            self.mode in ("max", "min"),
            "ExactCheckpoint.mode",
            repr(self.mode),
            allowed="auto, max or min",
        )

    def judge(self, trainer: L.Trainer, step: int) -> None:
        """Compare the metric of a validation that has just ended; note it if it is better.

        Where the metric is the same as before, the lower loss is better: a metric that counts
        right answers stands still while a network still learns. `step`: optimizer steps so far.
        Raises `UserError` if the metric was not logged.
        """
        if self.monitor is None:
            return
        logged = trainer.callback_metrics
        names = ", ".join(logged) or "none"
        require(
            self.monitor in logged,
            "ExactCheckpoint.monitor",
            f"no metric {self.monitor!r} was logged",
            allowed=names,
            hint=f"Log it in validation_step by self.log({self.monitor!r}, value), or set monitor"
            " to a logged one.",
        )
        value = float(logged[self.monitor])
        loss = logged.get(f"{self.monitor.rpartition('/')[0]}/loss")
        if self._is_better(value, None if loss is None else float(loss)):
            self.value = value
            self.loss = None if loss is None else float(loss)
            self.step = step
            self.epoch = trainer.current_epoch + 1

    def _is_better(self, value: float, loss: float | None) -> bool:
        if self.value is None or math.isnan(self.value):
            return True
        # e.g. an accuracy of 0.875 three times running, with losses 0.41, 0.39 and 0.40: the second
        if value == self.value:
            return loss is not None and self.loss is not None and loss < self.loss
        sign = 1 if self.mode == "max" else -1
        return sign * (value - self.value) > self.min_delta

    def state_dict(self) -> dict[str, Any]:
        return {
            "monitor": self.monitor,
            "best_value": self.value,
            "best_loss": self.loss,
            "best_step": self.step,
            "best_epoch": self.epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["best_value"]
        self.loss = state.get("best_loss")
        self.step = state["best_step"]
        self.epoch = state.get("best_epoch")


def shelve(folder: Path, *, last: int, best: int | None, keep: int = 2) -> None:
    """Point `last` and `best` at the checkpoints of these steps, and delete older checkpoints.

    The newest `keep` up to the last stay, and the best.
    """
    require(not folder.is_symlink(), "checkpoint", f"{folder} is a link", hint=OWN_FOLDER)
    try:
        link(folder, "last", last)
        link(folder, "best", best)
        steps = [int(path.name.removeprefix("step-")) for path in newest_first(folder)]
        before = [step for step in steps if step < last][: keep - 1]
        # If the new best checkpoint could not be written, the link still has the one before.
        linked = Path(os.path.realpath(folder / "best")).name
        for step in steps:
            # Checkpoints of more steps than `last` are of a training that was given up.
            if step not in (last, best, *before) and f"step-{step}" != linked:
                shutil.rmtree(folder / f"step-{step}")
        # what a killed process was writing
        for path in folder.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        raise out_of_space(error, folder, None, "checkpoint", MAKE_ROOM) from None


def link(folder: Path, name: str, step: int | None) -> None:
    """Replace a link atomically, so that it always points at a checkpoint.

    Does nothing if `step` is None or has no checkpoint.
    """
    if step is None or not (folder / f"step-{step}").exists():
        return
    # made beside and renamed: at no moment is there no link
    new = folder / f".{name}-new"
    new.unlink(missing_ok=True)
    new.symlink_to(f"step-{step}")
    new.replace(folder / name)


def newest_first(folder: Path) -> list[Path]:
    """Folders of checkpoints, those of most steps first, without the links `best` and `last`."""
    paths = folder.iterdir() if folder.is_dir() and not folder.is_symlink() else []
    # a link `step-9` could lead out of the folder, and its target would be removed
    real = (
        path for path in paths if re.fullmatch(r"step-\d+", path.name) and not path.is_symlink()
    )
    return sorted(real, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


@dataclass(frozen=True, slots=True)
class Start:
    """The checkpoint that a training resumes from, and what its description says."""

    checkpoint: Path
    about: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.about["position"]["step"])


def find_checkpoint(folder: Path) -> tuple[Start | None, list[str]]:
    """The newest undamaged checkpoint, and a line to print for each newer, damaged one.

    None if the folder has no undamaged checkpoint.
    """
    lines: list[str] = []
    # a crash may have come while a checkpoint of the same step was replaced
    put_back(folder)
    for path in newest_first(folder):
        try:
            about = require_whole(path)
            has_position = isinstance(about.get("position"), dict)
            require(
                has_position, f"checkpoint {path}", "has no position to resume from", hint=REMOVE_IT
            )
            return Start(path, about), lines
        except UserError as error:
            lines.append(f"resume: {error}; passed over")
    return None, lines


def set_aside(start: Start | None, folder: Path, *, are_damaged: bool) -> None:
    """Rename checkpoints newer than `start` to `damaged-step-N` or `replaced-step-N`.

    All of them if `start` is None. flatout never reads or deletes them after that.
    """
    kind = "damaged" if are_damaged else "replaced"
    for path in newest_first(folder):
        if start is not None and path == start.checkpoint:
            return
        names = numbered(path.with_name(f"{kind}-{path.name}"))
        path.rename(next(name for name in names if not os.path.lexists(name)))
