"""What a step began with, so that one that ran out of memory can be taken again from there.

Gradients are dropped for that. Weights change in the update only, behind all passes. So random
state and the running statistics of batch norms are all that has to be kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatout.engine.random_state import random_state, restore_random_state


class StepStart:
    """Random state and running statistics where the latest step began."""

    def __init__(self, device: torch.device, statistics: list[Tensor]) -> None:
        """`statistics`: what forward passes change."""
        self._device = device
        self._statistics = statistics
        self._statistics_before: list[Tensor] = []
        self._random: dict[str, Any] = {}

    @property
    def has_statistics(self) -> bool:
        """Whether forward passes change running statistics."""
        return bool(self._statistics)

    def keep(self) -> None:
        """Copy what the step that begins now will change."""
        # `ExactCheckpoint` has copied the random state behind the step before. That copy cannot
        # serve: loaders, transforms and hooks may have drawn since. To compare the two states takes
        # 11 µs, to copy one 2 µs.
        self._random = random_state(self._device, with_others=False)
        self._statistics_before = [mean.clone() for mean in self._statistics]

    def restore(self) -> None:
        """Set all back to where the step began."""
        restore_random_state(self._random, self._device)
        for mean, before in zip(self._statistics, self._statistics_before, strict=True):
            mean.copy_(before)
