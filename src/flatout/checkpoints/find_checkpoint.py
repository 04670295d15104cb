"""Find the newest whole checkpoint of a run, and rename those that are damaged."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.checkpoints.kept import CHECKPOINTS, find_newest_whole, newest_first


@dataclass(frozen=True, slots=True)
class Start:
    """Where training continues."""

    checkpoint: Path
    about: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.about["position"]["step"])


def set_aside(start: Start, folder: Path) -> None:
    """Rename checkpoints that were passed over, so that they count for none."""
    for path in newest_first(folder / CHECKPOINTS):
        if path == start.checkpoint:
            return
        shutil.rmtree(path.with_name(f"damaged-{path.name}"), ignore_errors=True)
        path.rename(path.with_name(f"damaged-{path.name}"))


def find_checkpoint(folder: Path) -> tuple[Start | None, list[str]]:
    """The newest whole checkpoint of a run, and a warning about those that are not."""
    found, lines = find_newest_whole(folder / CHECKPOINTS)
    return None if found is None else Start(*found), lines
