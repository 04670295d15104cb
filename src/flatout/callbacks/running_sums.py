"""Sums since the last flush, over the whole training, and of the first few steps.

A curve takes what was counted since its last row: `flush`. The summary takes all steps but the
first few, which are slow (compiling, warm caches): `counted`. For example, with 3 batches in the
first steps, 40 flushed since and 7 not flushed yet, `total` has 43, `now` 7, `first` 3, and
`counted()` has 47.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

_SAVED = ("now", "total", "first")
Kind = TypeVar("Kind", bound="Sums")


@dataclass(slots=True)
class Sums:
    """Base of records whose fields are numbers, or mappings of numbers, that add up."""

    batches: int = 0  # batches of this rank

    def add(self, other: Sums, sign: int = 1) -> None:
        """Add each field of `other` to the same field here; subtract it with `sign=-1`."""
        for name in self.__dataclass_fields__:
            mine = getattr(self, name)
            theirs = getattr(other, name)
            if isinstance(mine, dict):
                for key, value in theirs.items():
                    mine[key] += sign * value
            else:
                setattr(self, name, mine + sign * theirs)


class RunningSums(Generic[Kind]):
    """Three records of sums: `now` since the last flush, `total` up to that flush, `first` of the
    first few steps.
    """

    def __init__(self, make: Callable[..., Kind]) -> None:
        self._make = make
        self.now = make()
        self.total = make()
        self.first = make()

    def flush(self) -> Kind:
        """Return the sums since the last flush, add them to the total, and start new ones."""
        flushed = self.now
        self.now = self._make()
        self.total.add(flushed)
        return flushed

    def mark_first(self) -> None:
        """Note that all sums until now are those of the first few steps."""
        self.first = copy.deepcopy(self.total)
        self.first.add(self.now)

    def counted(self) -> Kind:
        """All sums so far without the first few steps, or with them where there were no others."""
        sums = copy.deepcopy(self.total)
        sums.add(self.now)
        if sums.batches > self.first.batches:
            sums.add(self.first, sign=-1)
        return sums

    def state_dict(self) -> dict[str, Any]:
        return {name: asdict(getattr(self, name)) for name in _SAVED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _SAVED:
            setattr(self, name, self._make(**state[name]))
