"""Texts and sequences for a Lightning Trainer; a name is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "SequenceData": "flatout.data.datamodules",
    "SequenceDataConfig": "flatout.data.sequences.settings",
    "SequenceInfo": "flatout.data.sequences.info",
    "TextData": "flatout.data.datamodules",
    "TagData": "flatout.data.datamodules",
    "TextDataConfig": "flatout.data.text",
    "TextInfo": "flatout.data.info",
    "TagInfo": "flatout.data.info",
}
__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'flatout.data' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
