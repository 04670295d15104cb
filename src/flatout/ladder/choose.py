"""Rungs for the data and the model at hand: those of the ladder for the same program, on your rows and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flatout.errors import require
from flatout.ladder.describe import program_of
from flatout.ladder.rows import way_of
from flatout.ladder.rungs import LEARNING, Ladder, Rung, find_ladder, read_ladder

_BY_BATCH = "tweets"
"""The program whose rungs change the batch size."""
_LARGER = "batch 64"
"""A rung of `tweets` that has no meaning where you have set the batch size."""


def choose_ladder(data: Any, model: Any, folders: Sequence[Path]) -> Ladder:
    """The rungs for these data and this model; promises of guides are about other rows, and are left out."""
    kind, program = way_of(data).kind, program_of(model)
    found = read_ladder(find_ladder(program, folders))  # a ladder has the name of its program
    require(found.kind == kind, "model", f"{type(model).__name__} does not fit {kind}")
    title = f"{type(model).__name__.removesuffix('Config')} on your data"
    rungs = [_without_promise(rung) for rung in found.rungs if not _is_for_guide(rung)]
    if program == _BY_BATCH:
        rungs = [_with_batch(rung, data.batch_size) for rung in rungs]
    return replace(found, name=f"own_{program}", title=title, rungs=tuple(rungs), in_all="", settings=())


def _is_for_guide(rung: Rung) -> bool:
    """Whether a rung belongs to the guide's batch sizes."""
    return rung.name == _LARGER or rung.measures == LEARNING


def _without_promise(rung: Rung) -> Rung:
    words = [word for word in rung.words if not word.startswith(("optim.scale_lr", "optim.base_batch"))]
    return replace(rung, promised="", factor=None, words=tuple(words))


def _with_batch(rung: Rung, batch: int) -> Rung:
    """A rung with your batch size, for which your learning rate was chosen."""
    if rung.keywords is None:
        return rung
    own = {"batch": batch} if "batch" in rung.keywords else {}
    return replace(rung, keywords={**rung.keywords, "base_rows": batch, "scale_lr": "sqrt", **own})
