"""Ridge regression on a window: the baseline beside a network, and what `residual=ridge` lets a network start from.

An estimate reads all inputs of the window. A forecast has one map for all series, from a series' own past to its next
steps, with the last value taken off.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flatout.models.series import windows_of

if TYPE_CHECKING:
    from flatout.data.batches.flat_batch import FlatBatch
    from flatout.data.sequences.shape import SequenceShape

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)
"""Of which the best one on the validation recordings is used."""


class Residual(StrEnum):
    """What the network's answer is added to."""

    none = "none"
    ridge = "ridge"


class WindowRidge(nn.Module):
    """A linear map that is solved, not trained; zero until `set`."""

    weight: Tensor
    bias: Tensor

    def __init__(self, shape: SequenceShape) -> None:
        super().__init__()
        self.shape = shape
        lookback = shape.lookback or 1
        inputs, outputs = (lookback, shape.horizon) if shape.horizon else (lookback * shape.inputs, shape.targets)
        self.register_buffer("weight", torch.zeros(inputs, outputs))
        self.register_buffer("bias", torch.zeros(outputs))

    def set(self, weight: Tensor, bias: Tensor) -> None:
        """Take a solution."""
        self.weight.copy_(weight)
        self.bias.copy_(bias)

    def forward(self, batch: FlatBatch) -> Tensor:
        """`[B, K]`, or `[B, H, K]` for forecasts."""
        return self.answer(windows_of(batch, self.shape))

    def answer(self, windows_BLF: Tensor) -> Tensor:
        """The same from windows."""
        if not self.shape.horizon:
            return windows_BLF.flatten(1) @ self.weight + self.bias
        series_BKL, last_BK1 = own_pasts(windows_BLF, self.shape)
        return (series_BKL @ self.weight + self.bias + last_BK1).transpose(1, 2)


def own_pasts(windows_BLF: Tensor, shape: SequenceShape) -> tuple[Tensor, Tensor]:
    """`[B, K, L]` the past of each target with its last value taken off, and `[B, K, 1]` those values."""
    series_BKL = windows_BLF[..., -shape.targets :].transpose(1, 2)
    last_BK1 = series_BKL[..., -1:]
    return series_BKL - last_BK1, last_BK1
