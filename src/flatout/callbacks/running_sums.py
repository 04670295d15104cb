"""Sums since the last flush, over the whole training, and of the first few steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Generic, TypeVar

_NAMES = ("now", "total", "first")
Kind = TypeVar("Kind", bound="Sums")


@dataclass(slots=True)
class Sums:
    """Numbers, and mappings of numbers, that add up."""

    batches: int = 0  # of one rank

    def add(self, other: Sums, sign: int = 1) -> None:
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, dict):
                mine.update({name: mine[name] + sign * value for name, value in theirs.items()})
            else:
                setattr(self, each.name, mine + sign * theirs)


class RunningSums(Generic[Kind]):
    """`now` since the last flush, `total` up to it, `first` of the first few steps."""

    def __init__(self, make: Callable[..., Kind]) -> None:
        self._make = make
        self.now = make()
        self.total = make()
        self.first = make()

    def flush(self) -> Kind:
        """The counts since the last flush; they are part of the total from now on."""
        now, self.now = self.now, self._make()
        self.total.add(now)
        return now

    def mark_first(self) -> None:
        """The first few steps end here."""
        self.first = copy.deepcopy(self.total)
        self.first.add(self.now)

    def counted(self) -> Kind:
        """All counts so far, without the first few steps where there were more."""
        found = copy.deepcopy(self.total)
        found.add(self.now)
        if found.batches > self.first.batches:
            found.add(self.first, sign=-1)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {name: asdict(getattr(self, name)) for name in _NAMES}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _NAMES:
            setattr(self, name, self._make(**state[name]))
