"""The fast loop and what a training step is made of; a name is imported when it is first used."""

from __future__ import annotations

from flatout import importer

_PLACES = {"FastLoop": "flatout.engine.fast_loop", "OptimConfig": "flatout.engine.optimizer"}
__all__ = sorted(_PLACES)
__getattr__ = importer(__name__, _PLACES)
