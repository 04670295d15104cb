"""Texts and sequences for a Lightning Trainer; a name is imported when it is first used."""

from __future__ import annotations

from flatout import importer

_PLACES = {
    "data.texts.data": "TextData",
    "data.tags.data": "TagData",
    "data.sequences.data": "SequenceData",
    "data.sequences.settings": "SequenceDataConfig",
    "data.sequences.info": "SequenceInfo",
    "data.texts.settings": "TextDataConfig",
    "data.info": "TextInfo TagInfo",
    "data.sequences.window_loader": "windows",
}
__all__ = sorted(" ".join(_PLACES.values()).split())
__getattr__ = importer(__name__, _PLACES)
