"""The columns of a table that hold texts and labels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Roles:
    """The columns that hold the texts and the labels."""

    texts: tuple[str, ...]
    label: str
    """Empty where rows have no labels."""
    join: str = " "
    """What stands between the texts of several columns."""

    @property
    def columns(self) -> list[str]:
        """All of them, each once."""
        return list(dict.fromkeys((*self.texts, *([self.label] if self.label else []))))
