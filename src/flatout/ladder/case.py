"""What all rungs of a ladder train: the rows, the sizes of the model, and how it learns; plain values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training, as a usual program and a run of ours both get it."""

    kind: str
    """text, bits or sequence."""
    folder: Path
    """Where train.csv, validation.csv and test.csv are."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Sizes, by the names of our settings."""
    reading: Mapping[str, Any] = field(default_factory=dict)
    """How rows become numbers: longest row, vocabulary, columns, samples of a window."""
    batch: int = 32
    lr: float = 1e-3
    clip: float = 0.0
    """Longest gradient; 0: no clipping."""
    epochs: int = 1
    seed: int = 0

    def rows(self, split: str) -> Path:
        """The file of a split."""
        return self.folder / f"{split}.csv"
