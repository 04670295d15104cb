"""The folder of a training's checkpoints: which ones stay, which one is the newest whole one.

`best` and `last` are links to two of them. The one before the last stays too, in case the last is damaged.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flatout.checkpoints.folder import MAKE_ROOM, OWN_FOLDER, REMOVE_IT, require_whole
from flatout.errors import UserError, out_of_space
from flatout.files import put_back

CHECKPOINTS = "checkpoints"
"""Their folder in a run's folder."""
_NAME = re.compile(r"step-(\d+)")


def shelve(folder: Path, *, last: int, best: int | None, keep: int = 2) -> None:
    """Point the links at the last checkpoint and the best; keep both and the newest before the last, remove others.

    `keep` counts the last one and those before it.
    """
    if folder.is_symlink():
        raise UserError("checkpoint", f"{folder} is a link", hint=OWN_FOLDER)
    try:
        link(folder, "last", last)
        link(folder, "best", best)
        steps = [int(path.name.removeprefix("step-")) for path in newest_first(folder)]
        before = [step for step in steps if step < last][: keep - 1]
        for step in steps:
            if step not in (last, best, *before):  # one of more steps is from a training that was given up
                shutil.rmtree(folder / f"step-{step}")
        for path in folder.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        raise out_of_space(error, folder, None, "checkpoint", MAKE_ROOM) from None


def link(folder: Path, name: str, step: int | None) -> None:
    """Point a link at a checkpoint in one step, so that it never dangles."""
    if step is None or not (folder / f"step-{step}").exists():
        return
    new = folder / f".{name}-new"
    new.unlink(missing_ok=True)
    new.symlink_to(f"step-{step}")
    new.replace(folder / name)


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints of a folder, those of most steps first; links are none."""
    return sorted(_real_checkpoints(folder), key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def find_newest_whole(folder: Path) -> tuple[tuple[Path, dict[str, Any]] | None, list[str]]:
    """The newest whole checkpoint of a folder with what its manifest says, and a line for each damaged one."""
    lines = []
    put_back(folder)
    for path in newest_first(folder):
        try:
            about = require_whole(path)
            if not isinstance(about.get("position"), dict):
                raise UserError(
                    f"checkpoint {path}",
                    "has no position to resume from",
                    hint=REMOVE_IT,
                )
        except UserError as error:
            lines.append(f"resume: {error}; passed over")
            continue
        return (path, about), lines
    return None, lines


def _real_checkpoints(folder: Path) -> Iterator[Path]:
    if folder.is_dir() and not folder.is_symlink():
        yield from (path for path in folder.iterdir() if _NAME.fullmatch(path.name) and not path.is_symlink())
