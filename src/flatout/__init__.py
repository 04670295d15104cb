"""Train text classifiers as fast as the hardware allows, and be told what held them back.

The names below are imported when they are first used, so `import flatout` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "fit": "flatout.run",
    "Result": "flatout.run",
    "RunConfig": "flatout.config",
    "MonitorConfig": "flatout.config",
    "TextDataConfig": "flatout.data.text",
    "HeadlinesConfig": "flatout.data.samples",
    "VocabularyConfig": "flatout.data.vocabulary",
    "BiLSTMConfig": "flatout.models.bilstm",
    "TextCNNConfig": "flatout.models.textcnn",
    "ClassificationConfig": "flatout.tasks.classification",
    "OptimConfig": "flatout.optim",
    "CheckpointConfig": "flatout.checkpoints",
    "Predictor": "flatout.inference",
    "UserError": "flatout.errors",
}
__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'flatout' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
