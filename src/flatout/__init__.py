"""Train on texts, tags, bit strings and sequences as fast as the hardware allows, and see what
limited the run.

The names below are imported when they are first used, so `import flatout` costs nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

# modules below `flatout`, and the names that each offers
_OFFERED = {
    "run.launch": "fit",
    "perf.verdict.anywhere": "attach",
    "run.closing": "Result",
    "config": "RunConfig MonitorConfig",
    "data.texts.settings": "TextDataConfig",
    "bits.settings": "BitsDataConfig",
    "bits.encodings": "EncodingConfig",
    "bits.people": "PeopleConfig",
    "data.samples.headlines": "HeadlinesConfig",
    "data.sequences.settings": "SequenceDataConfig",
    "data.samples.cells": "CellsConfig",
    "data.tokens.vocabulary": "VocabularyConfig",
    "models.bilstm": "BiLSTMConfig",
    "models.textcnn": "TextCNNConfig",
    "models.bit_mlp": "BitMLPConfig",
    "models.rnn": "RNNConfig",
    "models.window_mlp": "WindowMLPConfig",
    "tasks.sequences": "SequenceRegressionConfig",
    "inference.sequences": "SequencePredictor",
    "tasks.classification": "ClassificationConfig",
    "bits.task": "GramsConfig",
    "engine.optimizer": "OptimConfig",
    "checkpoints.settings": "CheckpointConfig",
    "inference.masked_words": "MaskedWordPredictor",
    "inference.text": "Predictor",
    "inference.tags": "TagPredictor",
    "models.encoder.transformer": "TransformerConfig",
    "tasks.tagging": "TaggingConfig",
    "tasks.masked_language": "MaskedLanguageConfig",
    "data.samples.tagged_tweets": "TaggedTweetsConfig",
    "data.samples.tweets": "TweetsConfig",
    "bits.predictor": "GramPredictor",
    "run.kinds": "load_predictor",
    "perf.tune.settings": "TuneConfig",
    "errors": "UserError",
}
__all__ = sorted(" ".join(_OFFERED.values()).split())


def importer(package: str, offered: dict[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`, which imports a name from its module when it is first used.

    `offered`: modules below `flatout`, each with its names in one text.
    """
    module_of = {}
    for module, names in offered.items():
        for name in names.split():
            module_of[name] = module

    def import_name(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        attribute = getattr(importlib.import_module(f"flatout.{module_of[name]}"), name)
        if isinstance(attribute, type) and is_dataclass(attribute):
            # imported here: `import flatout` imports nothing
            from flatout.errors import explain_unknown_settings

            explain_unknown_settings(attribute)
        return attribute

    return import_name


__getattr__ = importer(__name__, _OFFERED)
