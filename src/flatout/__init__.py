"""Train on texts, tags, bit strings and sequences as fast as the hardware allows, and see what limited the run.

The names below are imported when they are first used, so `import flatout` costs nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

_PLACES = {
    "fit": "flatout.run.launch",
    "attach": "flatout.perf.verdict.anywhere",
    "Result": "flatout.run.closing",
    "RunConfig": "flatout.config",
    "MonitorConfig": "flatout.config",
    "TextDataConfig": "flatout.data.text",
    "BitsDataConfig": "flatout.bits.settings",
    "EncodingConfig": "flatout.bits.encodings",
    "PeopleConfig": "flatout.bits.people",
    "HeadlinesConfig": "flatout.data.samples.headlines",
    "SequenceDataConfig": "flatout.data.sequences.settings",
    "CellsConfig": "flatout.data.samples.cells",
    "VocabularyConfig": "flatout.data.tokens.vocabulary",
    "BiLSTMConfig": "flatout.models.bilstm",
    "TextCNNConfig": "flatout.models.textcnn",
    "BitMLPConfig": "flatout.models.bit_mlp",
    "RNNConfig": "flatout.models.rnn",
    "WindowMLPConfig": "flatout.models.window_mlp",
    "SequenceRegressionConfig": "flatout.tasks.sequences",
    "SequencePredictor": "flatout.inference.sequences",
    "ClassificationConfig": "flatout.tasks.classification",
    "GramsConfig": "flatout.bits.task",
    "OptimConfig": "flatout.engine.optimizer",
    "CheckpointConfig": "flatout.checkpoints.settings",
    "Predictor": "flatout.inference.text",
    "TagPredictor": "flatout.inference.tags",
    "TransformerConfig": "flatout.models.encoder.transformer",
    "TaggingConfig": "flatout.tasks.tagging",
    "MaskedLanguageConfig": "flatout.tasks.masked_language",
    "MaskedWordPredictor": "flatout.inference.text",
    "TweetsConfig": "flatout.data.samples.tweets",
    "TaggedTweetsConfig": "flatout.data.samples.tweets",
    "GramPredictor": "flatout.bits.predictor",
    "load_predictor": "flatout.run.kinds",
    "TuneConfig": "flatout.perf.tune.settings",
    "UserError": "flatout.errors",
}
__all__ = sorted(_PLACES)


def importer(package: str, places: dict[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package that imports each of its names from its place when it is first used."""

    def import_name(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(places[name]), name)

    return import_name


__getattr__ = importer(__name__, _PLACES)
