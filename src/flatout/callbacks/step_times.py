"""The distribution of step times in a histogram of fixed size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from flatout.callbacks.clock import FIRST_STEPS


class StepTimes:
    """Lengths of steps: their distribution in little memory, and the first few one by one."""

    _FINENESS = 1.04
    _SHORTEST_S = 1e-6

    def __init__(self) -> None:
        self.counts = np.zeros(round(math.log(1e10) / math.log(self._FINENESS)), np.int64)
        """Steps by length; each bin is 4 % longer than the one before."""
        self.first: list[float] = []

    def add(self, seconds: list[float]) -> None:
        apart = FIRST_STEPS - len(self.first)
        self.first += seconds[: max(0, apart)]
        rest = np.asarray(seconds[max(0, apart) :])
        if len(rest):
            places = np.log(np.maximum(rest, self._SHORTEST_S) / self._SHORTEST_S) / math.log(
                self._FINENESS
            )
            places = places.astype(np.int64).clip(0, len(self.counts) - 1)
            self.counts += np.bincount(places, minlength=len(self.counts))

    def percentile(self, share: float) -> float | None:
        """Seconds that this share of all steps after the first few stayed below; None before there
        are any.
        """
        total = int(self.counts.sum())
        if not total:
            return None
        place = int(np.searchsorted(np.cumsum(self.counts), share * total))
        return self._SHORTEST_S * self._FINENESS ** (min(place, len(self.counts) - 1) + 0.5)

    def state_dict(self) -> dict[str, Any]:
        places = np.nonzero(self.counts)[0]
        return {
            "first": self.first,
            "counts": [[int(place), int(self.counts[place])] for place in places],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first = list(state["first"])
        self.counts[:] = 0
        for place, count in state["counts"]:
            self.counts[place] = count
