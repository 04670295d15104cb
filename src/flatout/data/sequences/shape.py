"""What a network of sequences reads and answers, and how numbers of the store become numbers of the user."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_ROWS_A_BLOCK = 1 << 16
_OTHER_UNIT, _MANY_SAMPLES = 10.0, 1000
"""From this ratio of root mean squares on another unit is suspected; fewer samples may lie where a column is small."""


@dataclass(frozen=True, slots=True)
class SequenceShape:
    """Sizes of a network's inputs and answers."""

    inputs: int
    """Columns that are read: the first of a batch."""
    targets: int
    """Columns that are answered: the last of a batch. A forecast reads them as well."""
    lookback: int | None = None
    """Samples of a window; None where rows are recordings or chunks."""
    horizon: int = 0
    """Samples that a forecast answers, which stand behind its window; 0: none."""
    labels: int = 0
    """Outputs for a whole recording; 0: answers belong to times."""
    is_stateful: bool = False
    """Whether a row continues the row of the batch before."""

    @property
    def is_each_step(self) -> bool:
        """Whether each sample has an answer."""
        return self.lookback is None and not self.labels

    @property
    def outputs(self) -> int:
        """Numbers of one answer."""
        return self.labels or self.targets * max(1, self.horizon)


@dataclass(frozen=True, slots=True)
class Scaler:
    """`(value - shift) / factor` for each column, fitted on the training rows."""

    shift: list[float]
    factor: list[float] = field(default_factory=list)

    @classmethod
    def fit(cls, kind: str, moments: dict[str, Floats]) -> Scaler:
        """From count, sum, squares, least and most of each column."""
        count = moments["count"]
        if kind == "none":
            return cls([0.0] * len(count), [1.0] * len(count))
        shift, factor = moments["mean"], np.sqrt(moments["squares"] / count)
        if kind == "minmax":
            shift, factor = moments["least"], moments["most"] - moments["least"]
        return cls(shift.tolist(), np.where(factor > 0, factor, 1.0).tolist())

    def scale(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """Columns in their units as the store keeps them; block by block, so that little is copied."""
        shift, factor = np.array(self.shift), np.array(self.factor)
        scaled = np.empty(values.shape, np.float32)
        for at in range(0, len(values), _ROWS_A_BLOCK):
            block = slice(at, at + _ROWS_A_BLOCK)
            scaled[block] = (values[block] - shift) / factor
        return scaled

    def of_targets(self, targets: int) -> tuple[list[float], list[float]]:
        return self.shift[-targets:], self.factor[-targets:]


def describe_units(names: list[str], ratios: NDArray[np.float64], samples: float) -> list[str]:
    """A line for each column that is many times as large, or as small, as in the training recordings.

    A few samples may lie where a column is small, as at the beginning of a discharge: they prove no other unit.
    """
    least = 1 / _OTHER_UNIT if samples >= _MANY_SAMPLES else 0.0
    return [
        f"{name} is {ratio:.3g} times as large as in the training recordings; is it in another unit?"
        for name, ratio in zip(names, ratios.tolist(), strict=True)
        if ratio > _OTHER_UNIT or 0 < ratio < least
    ]
