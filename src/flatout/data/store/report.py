"""How a store was opened: from the cache, or built, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheReport:
    """How a store was come by."""

    key: str
    hit: bool
    seconds: float
    reason: str
    """Why it was not there, in words; empty for a hit."""

    def line(self) -> str:
        if self.hit:
            return f"cache: {self.key} opened in {self.seconds * 1000:.0f} ms"
        return f"cache: {self.key} built in {self.seconds:.1f} s ({self.reason})"
