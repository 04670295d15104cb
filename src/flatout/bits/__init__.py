"""Bit strings for a Lightning Trainer; a name is imported when it is first used."""

from __future__ import annotations

from flatout import importer

_PLACES = {
    "BitData": "flatout.bits.data",
    "BitsDataConfig": "flatout.bits.settings",
    "BitInfo": "flatout.bits.info",
    "GramDecoder": "flatout.bits.task",
    "GramsConfig": "flatout.bits.task",
}
__all__ = sorted(_PLACES)
__getattr__ = importer(__name__, _PLACES)
