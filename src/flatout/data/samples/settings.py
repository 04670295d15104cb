"""What the settings of all built-in samples have in common: their ranges are checked at once."""

from __future__ import annotations

from dataclasses import dataclass

from flatout.errors import check_settings


@dataclass(kw_only=True, slots=True)
class SampleConfig:
    """Settings of a built-in sample; a value out of range is refused when it is made."""

    def __post_init__(self) -> None:
        check_settings(self, "data.sample")
