"""The models and the names by which `conf/model/` reaches them."""

from flatout.models.bilstm import BiLSTMConfig
from flatout.models.bitmlp import BitMLPConfig
from flatout.models.textcnn import TextCNNConfig
from flatout.models.transformer import TransformerConfig

MODELS: dict[str, type] = {
    "bilstm": BiLSTMConfig,
    "textcnn": TextCNNConfig,
    "bitmlp": BitMLPConfig,
    "transformer": TransformerConfig,
}
