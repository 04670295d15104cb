"""Texts and sequences for a Lightning Trainer; a name is imported when it is first used."""

from __future__ import annotations

from flatout import importer

_PLACES = {
    "SequenceData": "flatout.data.datamodules",
    "SequenceDataConfig": "flatout.data.sequences.settings",
    "SequenceInfo": "flatout.data.sequences.info",
    "TextData": "flatout.data.datamodules",
    "TagData": "flatout.data.datamodules",
    "TextDataConfig": "flatout.data.text",
    "TextInfo": "flatout.data.info",
    "TagInfo": "flatout.data.info",
    "windows": "flatout.data.sequences.window_loader",
}
__all__ = sorted(_PLACES)
__getattr__ = importer(__name__, _PLACES)
