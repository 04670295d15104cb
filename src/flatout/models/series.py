"""What networks on recordings share: rows of samples as rectangles, windows of them, and ridge
regression on a window.

The ridge is the baseline beside a network, and what `residual=ridge` lets a network start from. An
estimate reads all inputs of the window. A forecast has one map for all series, from a series' own
past to its next steps.

Shapes: T samples of the batch, B rows, L samples of the longest row or the window, C columns, F
inputs, K targets.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flatout.data.batches.kept_tensors import count_up

if TYPE_CHECKING:
    from flatout.data.batches.flat_batch import FlatBatch
    from flatout.data.sequences.info import SequenceShape

Residual = StrEnum("Residual", "none ridge")


def is_even(batch: FlatBatch) -> bool:
    """Whether all rows have one length; rows are sorted and lengths lie on the host, so nothing
    waits.
    """
    return batch.num_rows * batch.longest() == batch.num_tokens


def rectangle(batch: FlatBatch) -> Tensor:
    """`[B, L, C]`: rows side by side, a plain view where all have one length.

    Behind a row stands its last sample.
    """
    # What stands there is never read: recurrent states are taken before it, and answers beyond a
    # row are left out.
    if is_even(batch):
        return batch.tokens.view(batch.num_rows, -1, batch.tokens.shape[1])
    places_L = count_up(batch.longest(), batch.tokens.device)
    index_BL = torch.minimum(
        batch.offsets[:-1].unsqueeze(1) + places_L, batch.offsets[1:].unsqueeze(1) - 1
    )
    return batch.tokens[index_BL]


def flatten(values_BLD: Tensor, batch: FlatBatch) -> Tensor:
    """`[T, D]`: the samples of a rectangle without what stands behind the rows' ends.

    In a buffer any values follow behind the last row.
    """
    if is_even(batch):
        return values_BLD.reshape(-1, values_BLD.shape[-1])
    starts_B = batch.offsets[:-1]
    lengths_B = batch.offsets[1:] - starts_B
    device = values_BLD.device
    values_PD = values_BLD.flatten(0, 1)
    shift_B = count_up(batch.num_rows, device) * values_BLD.shape[1] - starts_B
    if batch.is_buffer:
        lengths_B[-1:] += batch.num_tokens - batch.offsets[-1:]
    # How many samples there are is known, so nothing waits for the device to count them.
    shift_T = torch.repeat_interleave(shift_B, lengths_B, output_size=batch.num_tokens)
    places_T = count_up(batch.num_tokens, device) + shift_T
    if batch.is_buffer:
        places_T.clamp_max_(len(values_PD) - 1)
    return values_PD.index_select(0, places_T)


def last_of(values_BLD: Tensor, batch: FlatBatch) -> Tensor:
    """`[B, D]`: the values at each row's last sample."""
    if is_even(batch):
        return values_BLD[:, -1]
    lengths_B = batch.offsets[1:] - batch.offsets[:-1]
    return values_BLD[count_up(len(lengths_B), values_BLD.device), lengths_B - 1]


def windows_of(batch: FlatBatch, shape: SequenceShape) -> Tensor:
    """`[B, L, F]` inputs of exactly `lookback` samples; before a recording's first sample stands
    that sample.
    """
    assert shape.lookback is not None
    if is_even(batch) and int(batch.lengths[0]) == shape.lookback + shape.horizon:
        return rectangle(batch)[:, : shape.lookback, : shape.inputs]
    places_L = torch.arange(-shape.lookback, 0, device=batch.tokens.device)
    index_BL = torch.maximum(
        batch.offsets[1:].unsqueeze(1) + places_L, batch.offsets[:-1].unsqueeze(1)
    )
    return batch.tokens[index_BL][..., : shape.inputs]


def answers_of(batch: FlatBatch, shape: SequenceShape) -> Tensor:
    """What a network should answer: `[T, K]` for each sample, `[B, K]` for windows, `[B, H, K]` for
    forecasts.
    """
    if shape.is_each_step:
        return batch.tokens[:, -shape.targets :]
    if shape.horizon:
        return rectangle(batch)[:, shape.lookback :, -shape.targets :]
    if is_even(batch):
        return rectangle(batch)[:, -1, -shape.targets :]
    return batch.tokens[batch.offsets[1:] - 1, -shape.targets :]


class WindowRidge(nn.Module):
    """A linear map that is solved, not trained; zero until `set`."""

    def __init__(self, shape: SequenceShape) -> None:
        super().__init__()
        self.shape = shape
        lookback = shape.lookback or 1
        inputs = lookback if shape.horizon else lookback * shape.inputs
        outputs = shape.horizon or shape.targets
        self.weight = nn.Buffer(torch.zeros(inputs, outputs))
        self.bias = nn.Buffer(torch.zeros(outputs))

    def set(self, weight: Tensor, bias: Tensor) -> None:
        self.weight.copy_(weight)
        self.bias.copy_(bias)

    def forward(self, batch: FlatBatch) -> Tensor:
        """`[B, K]`, or `[B, H, K]` for forecasts."""
        return self.answer(windows_of(batch, self.shape))

    def answer(self, windows_BLF: Tensor) -> Tensor:
        """The answers of `forward` to windows that are cut out already."""
        if not self.shape.horizon:
            return windows_BLF.flatten(1) @ self.weight + self.bias
        series_BKL, last_BK1 = own_pasts(windows_BLF, self.shape)
        return (series_BKL @ self.weight + self.bias + last_BK1).transpose(1, 2)


def own_pasts(windows_BLF: Tensor, shape: SequenceShape) -> tuple[Tensor, Tensor]:
    """`[B, K, L]` the past of each target with its last value taken off, and `[B, K, 1]` those
    values.
    """
    series_BKL = windows_BLF[..., -shape.targets :].transpose(1, 2)
    last_BK1 = series_BKL[..., -1:]
    return series_BKL - last_BK1, last_BK1
