"""Bit strings for a Lightning Trainer; a name is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "BitData": "flatout.bits.bit_data",
    "BitsDataConfig": "flatout.bits.data",
    "BitInfo": "flatout.bits.info",
    "GramDecoder": "flatout.bits.task",
    "GramsConfig": "flatout.bits.task",
}
__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'flatout.bits' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
