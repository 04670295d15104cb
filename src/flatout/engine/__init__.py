"""The fast loop and what a training step is made of; a name is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "FastLoop": "flatout.engine.fast_loop",
    "OptimConfig": "flatout.engine.optimizer",
}
__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'flatout.engine' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
