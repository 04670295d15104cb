"""The models and the names by which `conf/model/` reaches them."""

from flatout.models.bilstm import BiLSTMConfig
from flatout.models.bit_mlp import BitMLPConfig
from flatout.models.encoder.transformer import TransformerConfig
from flatout.models.rnn import RNNConfig
from flatout.models.textcnn import TextCNNConfig
from flatout.models.window_mlp import WindowMLPConfig

MODELS: dict[str, type] = {
    "bilstm": BiLSTMConfig,
    "textcnn": TextCNNConfig,
    "bitmlp": BitMLPConfig,
    "transformer": TransformerConfig,
    "rnn": RNNConfig,
    "window_mlp": WindowMLPConfig,
}
