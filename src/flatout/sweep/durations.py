"""Durations as people write them: 90s, 30m, 2h."""

from __future__ import annotations

import re

from flatout.errors import UserError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(text: str | None, where: str) -> float | None:
    """A duration in seconds; None where there is no limit."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(text).strip())
    if found is None or float(found[1]) == 0:
        raise UserError(where, f"{str(text)!r} is no duration", allowed="such as 90s, 30m, 2h")
    return float(found[1]) * _UNITS[found[2] or "s"]
