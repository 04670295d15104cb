"""The distribution of step times in a histogram of fixed size, for percentiles.

Each bin is 4 % wider than the one before, from 1 µs to 10,000 s. So a percentile is right to about
2 %, and a training of any length needs 587 numbers. The first few steps are stored one by one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from flatout.callbacks.clock import FIRST_STEPS


class StepTimes:
    """Seconds of each of the first few steps, and the distribution of all others."""

    _BIN_RATIO = 1.04  # a bin's upper edge over its lower one
    _SHORTEST_S = 1e-6  # lower edge of the first bin
    _RANGE = 1e10  # upper edge of the last bin over the lower edge of the first

    def __init__(self) -> None:
        num_bins = round(math.log(self._RANGE) / math.log(self._BIN_RATIO))
        self.counts = np.zeros(num_bins, np.int64)
        """Number of steps in each bin."""
        self.first: list[float] = []

    def add(self, seconds: list[float]) -> None:
        """Add steps in the order in which they ran."""
        num_first = max(0, FIRST_STEPS - len(self.first))
        self.first += seconds[:num_first]
        rest = np.asarray(seconds[num_first:])
        if len(rest):
            ratios = np.maximum(rest, self._SHORTEST_S) / self._SHORTEST_S
            bins = np.log(ratios) / math.log(self._BIN_RATIO)
            bins = bins.astype(np.int64).clip(0, len(self.counts) - 1)
            self.counts += np.bincount(bins, minlength=len(self.counts))

    def percentile(self, fraction: float) -> float | None:
        """Seconds that this fraction of all steps after the first few took at most.

        The middle of a bin. None before there are any such steps.
        """
        total = int(self.counts.sum())
        if not total:
            return None
        bin_of_step = int(np.searchsorted(np.cumsum(self.counts), fraction * total))
        exponent = min(bin_of_step, len(self.counts) - 1) + 0.5
        return self._SHORTEST_S * self._BIN_RATIO**exponent

    def state_dict(self) -> dict[str, Any]:
        # Most bins are empty: only the others are saved, as pairs of bin and count.
        filled = np.nonzero(self.counts)[0]
        return {
            "first": self.first,
            "counts": [[int(number), int(self.counts[number])] for number in filled],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first = list(state["first"])
        self.counts[:] = 0
        for number, count in state["counts"]:
            self.counts[number] = count
