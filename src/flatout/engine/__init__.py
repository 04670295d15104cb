"""The fast loop and what a training step is made of; a name is imported when it is first used."""

from __future__ import annotations

from flatout import importer

_PLACES = {"engine.fast_loop": "FastLoop", "engine.optimizer": "OptimConfig"}
__all__ = sorted(" ".join(_PLACES.values()).split())
__getattr__ = importer(__name__, _PLACES)
