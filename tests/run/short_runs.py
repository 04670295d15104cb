"""Runs of two epochs of ten steps, and what lies in their folders."""

from __future__ import annotations

from pathlib import Path

from tests.faults.plants import RaiseAt
from tests.faults.runs import Spec

SMALL = Spec(trainer={"max_epochs": 2})
BROKEN = SMALL.planted(RaiseAt, place="on_train_batch_end", step=14)


def contents(folder: Path) -> dict[str, bytes]:
    """Everything that tells of a run, but what it says."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "log.txt")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
