"""LightningModules: a loss, metrics and an optimizer over a plain network; each works in any Trainer."""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "Classifier": "flatout.tasks.classification",
    "ClassificationConfig": "flatout.tasks.classification",
    "MaskedLanguageConfig": "flatout.tasks.masked_language",
    "MaskedLanguageModel": "flatout.tasks.masked_language",
    "SequenceLabeller": "flatout.tasks.sequences",
    "SequenceRegressor": "flatout.tasks.sequences",
    "SequenceRegressionConfig": "flatout.tasks.sequences",
    "Tagger": "flatout.tasks.tagging",
    "TaggingConfig": "flatout.tasks.tagging",
    "Task": "flatout.tasks.task",
}
__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'flatout.tasks' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
