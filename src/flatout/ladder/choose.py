"""Rungs for the data and the model at hand: those of the ladder for the same program, on your rows and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flatout.errors import UserError
from flatout.ladder.describe import kind_of, program_of
from flatout.ladder.rungs import Ladder, Rung, find_ladder, read_ladder

CHOSEN = {"headlines": "headlines", "tweets": "tweets", "bloom": "bloom", "battery": "battery"}
"""The ladder whose rungs are taken, by the usual program of a model."""
_ROWS_OF_RUNG = {"batch", "accumulate"}


def choose_ladder(data: Any, model: Any, folders: Sequence[Path]) -> Ladder:
    """The rungs for these data and this model; promises of guides are about other rows, and are left out."""
    kind, program = kind_of(data), program_of(model)
    found = read_ladder(find_ladder(CHOSEN[program], folders))
    if found.kind != kind:
        raise UserError("ladder", f"{type(model).__name__} does not fit {kind}")
    title = f"{type(model).__name__.removesuffix('Config')} on your data"
    rungs = tuple(_without_promise(rung) for rung in found.rungs)
    reading = {name: value for name, value in found.reading.items() if name != "joined"}
    return replace(found, name=f"own_{program}", title=title, rungs=rungs, in_all="", settings=(), reading=reading)


def _without_promise(rung: Rung) -> Rung:
    return replace(rung, promised="", factor=None)
