"""LightningModules: a loss, metrics and an optimizer over a plain network; each works in any
Trainer.
"""

from __future__ import annotations

from flatout import importer

_PLACES = {
    "tasks.classification": "Classifier ClassificationConfig",
    "tasks.masked_language": "MaskedLanguageConfig MaskedLanguageModel",
    "tasks.sequences": "SequenceLabeller SequenceRegressor SequenceRegressionConfig",
    "tasks.tagging": "Tagger TaggingConfig",
    "tasks.task": "Task",
}
__all__ = sorted(" ".join(_PLACES.values()).split())
__getattr__ = importer(__name__, _PLACES)
