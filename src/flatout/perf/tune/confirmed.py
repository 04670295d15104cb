"""What `doctor --confirm` has found, as `tune` uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Confirmed:
    """What `doctor --confirm` has found for these settings: it is not measured again."""

    values: dict[str, Any] = field(default_factory=dict)
    """Settings that made the run faster."""
    why: dict[str, str] = field(default_factory=dict)
    """Of each of them, by its key."""
    slower: frozenset[str] = frozenset()
    """Overrides that slowed it."""


def is_typed(key: str, overrides: Sequence[str]) -> bool:
    """Whether the command line names a setting."""
    return any(word.lstrip("+~").partition("=")[0] == key for word in overrides)
