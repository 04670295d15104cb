"""The models by the rows that they read, and the names by which `conf/model/` reaches them."""

from __future__ import annotations

from typing import Any

from flatout.errors import explain_unknown_settings, require
from flatout.models.bilstm import BiLSTMConfig
from flatout.models.bit_mlp import BitMLPConfig
from flatout.models.encoder.transformer import TransformerConfig
from flatout.models.rnn import RNNConfig
from flatout.models.textcnn import TextCNNConfig
from flatout.models.window_mlp import WindowMLPConfig

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
    require(kind in MODELS, where, f"no model {kind!r}", allowed=", ".join(MODELS))
    return MODELS[kind]


def kind_of(config: object) -> str:
    """The name of a Config's class."""
    return next(name for name, each in MODELS.items() if type(config) is each)
