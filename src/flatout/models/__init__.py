"""The models and the names by which `conf/model/` reaches them."""

from flatout.models.bilstm import BiLSTMConfig
from flatout.models.bitmlp import BitMLPConfig
from flatout.models.textcnn import TextCNNConfig

MODELS: dict[str, type] = {"bilstm": BiLSTMConfig, "textcnn": TextCNNConfig, "bitmlp": BitMLPConfig}
