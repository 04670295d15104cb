"""LightningModules: a loss, metrics and an optimizer over a plain network; each works in any Trainer."""

from __future__ import annotations

from flatout import importer

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
__getattr__ = importer(__name__, _PLACES)
