"""A small store that tests build into a cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flatout.data.store.store import (
    Column,
    StoreWriter,
)

RECIPE = {"source": {"train": "abc"}, "max_length": 64, "vocabulary": {"size": 10}}


def build(writer: StoreWriter) -> None:
    split = writer.split(
        "train", {"tokens": Column("uint16", ragged=True), "targets": Column("int32")}
    )
    for start in (0, 5):
        split.append(tokens=(np.arange(15), np.full(5, 3)), targets=np.arange(start, start + 5))
    writer.write_text("labels.json", "[]")
    writer.facts["classes"] = ["a", "b"]


def refuse(given: object) -> None:
    raise AssertionError("must be neither built nor read again")


def left_in(folder: Path) -> list[str]:
    """What lies in a cache, without the files of locks, which stay."""
    return [path.name for path in folder.iterdir() if not path.name.startswith(".lock-")]
