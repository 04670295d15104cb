"""Count the rows of a batch of any kind."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def rows_of(batch: object, depth: int = 3) -> int:
    """Rows of a batch of any kind: the length of the first tensor in it.

    Looks into lists, tuples, mappings and attributes of objects, `depth` levels deep; 0 if there is
    no tensor. For example 16 for `({"ids": <16 × 80>}, <16>)`.
    """
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    named = batch if isinstance(batch, Mapping) else getattr(batch, "__dict__", {})
    parts = batch if isinstance(batch, list | tuple) else named.values()
    if depth == 0:
        return 0
    for part in parts:
        rows = rows_of(part, depth - 1)
        if rows:
            return rows
    return 0
