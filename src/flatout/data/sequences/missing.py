"""What happens to rows of recordings with a missing value."""

from __future__ import annotations

from enum import StrEnum

Missing = StrEnum("Missing", "refuse fill drop")
