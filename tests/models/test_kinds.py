"""A model folder knows every kind of model by name."""

from __future__ import annotations

from flatout.inference.folder import KINDS
from flatout.models import MODELS


def test_a_model_folder_knows_the_kinds_of_all_models():
    assert {kind: config.__name__ for kind, config in MODELS.items()} == {kind: name for name, kind in KINDS.items()}
