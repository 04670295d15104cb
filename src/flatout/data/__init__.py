"""Texts and sequences for a Lightning Trainer; a name is imported when it is first used."""

from __future__ import annotations

from flatout import importer

_PLACES = {
    "data.text_data": "TextData",
    "data.tag_data": "TagData",
    "data.sequence_data": "SequenceData",
    "data.sequences.settings": "SequenceDataConfig",
    "data.sequences.info": "SequenceInfo",
    "data.text": "TextDataConfig",
    "data.info": "TextInfo TagInfo",
    "data.sequences.window_loader": "windows",
}
__all__ = sorted(" ".join(_PLACES.values()).split())
__getattr__ = importer(__name__, _PLACES)
