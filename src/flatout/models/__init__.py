"""The models by the rows that they read, and the names by which `conf/model/` reaches them.

Models of other packages are found by their names (`plugins/installed.py`).
"""

from __future__ import annotations

from typing import Any

from flatout.errors import explain_unknown_settings, require
from flatout.models.bilstm import BiLSTMConfig
from flatout.models.bit_mlp import BitMLPConfig
from flatout.models.encoder.transformer import TransformerConfig
from flatout.models.rnn import RNNConfig
from flatout.models.textcnn import TextCNNConfig
from flatout.models.window_mlp import WindowMLPConfig
from flatout.plugins.installed import PartGroup, find_part, name_of_part, names_of_parts

OF_TEXTS: dict[str, type] = {
    "bilstm": BiLSTMConfig,
    "textcnn": TextCNNConfig,
    "transformer": TransformerConfig,
}
OF_BITS: dict[str, type] = {"bitmlp": BitMLPConfig}
OF_RECORDINGS: dict[str, type] = {"rnn": RNNConfig, "window_mlp": WindowMLPConfig}
MODELS = OF_TEXTS | OF_BITS | OF_RECORDINGS
for settings in MODELS.values():
    explain_unknown_settings(settings)


def model_class(kind: str, where: str) -> Any:
    """The Config class of a name that a file gives; `where`: the file."""
    if kind in MODELS:
        return MODELS[kind]
    config_class = find_part(PartGroup.models, kind)
    require(
        config_class is not None,
        where,
        f"no model {kind!r}",
        allowed=", ".join([*MODELS, *names_of_parts(PartGroup.models)]),
    )
    explain_unknown_settings(config_class)
    return config_class


def has_name(config: object) -> bool:
    """Whether the class of a Config has a name, so that a file can give it."""
    is_ours = type(config) in MODELS.values()
    return is_ours or name_of_part(PartGroup.models, type(config)) is not None


def kind_of(config: object) -> str:
    """The name of a Config's class."""
    ours = {each: name for name, each in MODELS.items()}
    name = ours.get(type(config)) or name_of_part(PartGroup.models, type(config))
    assert name is not None
    return name
