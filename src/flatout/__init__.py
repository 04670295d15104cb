"""Train text classifiers, and readers of bit strings, as fast as the hardware allows, and be told what held them back.

The names below are imported when they are first used, so `import flatout` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "fit": "flatout.fitting",
    "Result": "flatout.run",
    "RunConfig": "flatout.config",
    "MonitorConfig": "flatout.config",
    "TextDataConfig": "flatout.data.text",
    "BitsDataConfig": "flatout.bits.data",
    "EncodingConfig": "flatout.bits.encodings",
    "PeopleConfig": "flatout.bits.people",
    "HeadlinesConfig": "flatout.data.samples",
    "VocabularyConfig": "flatout.data.vocabulary",
    "BiLSTMConfig": "flatout.models.bilstm",
    "TextCNNConfig": "flatout.models.textcnn",
    "BitMLPConfig": "flatout.models.bitmlp",
    "ClassificationConfig": "flatout.tasks.classification",
    "GramsConfig": "flatout.tasks.grams",
    "OptimConfig": "flatout.optim",
    "CheckpointConfig": "flatout.checkpoints",
    "Predictor": "flatout.inference",
    "TagPredictor": "flatout.inference",
    "TransformerConfig": "flatout.models.transformer",
    "TaggingConfig": "flatout.tasks.tagging",
    "TweetsConfig": "flatout.data.tweet_samples",
    "TaggedTweetsConfig": "flatout.data.tweet_samples",
    "GramPredictor": "flatout.inference",
    "load_predictor": "flatout.inference",
    "TuneConfig": "flatout.tune.settings",
    "UserError": "flatout.errors",
}
__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'flatout' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
