"""Noise, offsets and smoothing of training samples: drawn for each batch, on the device, by the run's random numbers.

Sizes are in the unit of each feature. Targets stay as they are; of a forecast only the window is changed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.sequences.info import SequenceInfo
from flatout.data.sequences.settings import SequenceDataConfig
from flatout.data.sequences.shape import SequenceShape
from flatout.models.rnn import smooth
from flatout.models.series import flatten, rectangle


class Augment:
    """Changes the inputs of a batch at random."""

    def __init__(
        self, config: SequenceDataConfig, columns: list[str], factor: list[float], shape: SequenceShape
    ) -> None:
        self.shape = shape
        self._noise = _sizes(config.noise, columns, factor)
        self._offset = _sizes(config.offset, columns, factor)
        self._low_pass = _sizes(config.low_pass, columns, [1.0] * len(columns))
        self._device = torch.device("cpu")

    @classmethod
    def of(cls, info: SequenceInfo) -> Augment | None:
        """None where the settings ask for nothing."""
        config = info.config
        if not (config.noise or config.offset or config.low_pass):
            return None
        return cls(config, info.columns, info.scaler.factor, info.shape)

    def __call__(self, batch: FlatBatch) -> FlatBatch:
        values_BLC = rectangle(batch)
        if values_BLC.device != self._device:
            self._move(values_BLC.device)
        lookback = self.shape.lookback if self.shape.horizon else values_BLC.shape[1]
        inputs_BLC, rest_BLC = values_BLC[:, :lookback], values_BLC[:, lookback:]
        if self._low_pass is not None:
            inputs_BLC = _smoothed(inputs_BLC, self._low_pass)
        if self._offset is not None:
            inputs_BLC = inputs_BLC + torch.randn_like(inputs_BLC[:, :1]) * self._offset
        if self._noise is not None:
            inputs_BLC = inputs_BLC + torch.randn_like(inputs_BLC) * self._noise
        return replace(batch, tokens=flatten(torch.cat([inputs_BLC, rest_BLC], 1), batch))

    def _move(self, device: torch.device) -> None:
        """Put the sizes on a device, once."""
        self._device, sizes = device, (self._noise, self._offset, self._low_pass)
        self._noise, self._offset, self._low_pass = (None if each is None else each.to(device) for each in sizes)


def _smoothed(values_BLC: Tensor, most_C: Tensor) -> Tensor:
    """Each row with an exponential mean whose memory is drawn up to the most."""
    memory_B1C = torch.rand_like(values_BLC[:, :1]) * most_C
    before = values_BLC.new_zeros(1, len(values_BLC), values_BLC.shape[2] + 1)
    return torch.where(most_C > 0, smooth(values_BLC, memory_B1C, before)[0], values_BLC)


def _sizes(given: dict[str, float], columns: list[str], factor: list[float]) -> Tensor | None:
    """`[C]` scaled sizes, zero for columns that are not named."""
    if not given:
        return None
    return torch.tensor([given.get(name, 0.0) / each for name, each in zip(columns, factor, strict=True)])
