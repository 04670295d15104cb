"""Learning rates as numbers on the device, which each replay of a captured step reads.

The groups of the optimizer keep plain numbers, for schedules, loggers and checkpoints. Only while
the optimizer steps, its groups name tensors of the same rates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer


class DeviceRates:
    """The rate of each group of a fused optimizer, on the device."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self._rates: list[Tensor] = []
        self._last: list[float] = []
        self.of_place: Sequence[Tensor] | None = None
        """In the capture of a step that reads a table: the rates of its row."""

    def update(self) -> None:
        """Copy the rates of the coming step to the device, where they have changed."""
        rates = [group["lr"] for group in self._optimizer.param_groups]
        if len(rates) != len(self._rates):
            self._rates = [torch.zeros((), device=self._device) for _ in rates]
            self._last = []
        if rates != self._last:
            for tensor, rate in zip(self._rates, rates, strict=True):
                tensor.fill_(rate)
            self._last = rates

    def now(self) -> list[Tensor]:
        """The rates of the coming step, on the device."""
        self.update()
        return self._rates

    @contextmanager
    def in_groups(self) -> Iterator[None]:
        """Let the optimizer read the rates on the device.

        Before a capture comes `update`: a captured copy of a number would be repeated.
        """
        self.update()
        rates = self._rates if self.of_place is None else self.of_place
        # torch refuses a capture without `capturable`, and warns of a plain step with it
        is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        groups = self._optimizer.param_groups
        before = [dict(group) for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
            # SGD counts no steps, and has no such setting
            if is_capturing and "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, earlier in zip(groups, before, strict=True):
                group.update(earlier)
