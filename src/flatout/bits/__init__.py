"""Bit strings for a Lightning Trainer; a name is imported when it is first used."""

from __future__ import annotations

from flatout import importer

_PLACES = {
    "bits.data": "BitData",
    "bits.settings": "BitsDataConfig",
    "bits.info": "BitInfo",
    "bits.task": "GramDecoder GramsConfig",
}
__all__ = sorted(" ".join(_PLACES.values()).split())
__getattr__ = importer(__name__, _PLACES)
