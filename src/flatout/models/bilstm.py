"""A bidirectional LSTM over words, exact on rows of unequal length and without packing.

Packed sequences keep both oneDNN and cuDNN from their fast kernels. Here each layer is two plain
LSTMs. The backward one reads every row reversed by index, so padding stands at the end in both
directions, and no state of a real word depends on it. Rows are batched by length, so little is
computed for padding; a batch of one length needs no index. On a CPU two LSTMs cost as much as one
bidirectional one, to about 5 % in fp32 and bf16. A GPU runs both at once.

Shapes: B rows, L longest row, E embedding, H hidden, D = 2H, C outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.kept_tensors import count_up
from flatout.errors import setting
from flatout.models.contract import Lengths, Network, Product, look_up, through
from flatout.models.lean import LeanDropout
from flatout.models.recurrent import cast_layers, reversed_places, run_both, start_layer
from flatout.models.words import Pool, Pooling, WordsConfig


@dataclass(kw_only=True, slots=True)
class BiLSTMConfig(WordsConfig):
    """A bidirectional LSTM classifier trained from scratch."""

    recommended_clip: ClassVar[float] = 0.5  # recurrent gradients explode now and then

    hidden: int = setting(128, "State of each direction.", least=1)
    layers: int = setting(1, "LSTMs on top of each other.", least=1)
    dropout: float = setting(
        0.3, "Share of values dropped between layers and before the output.", least=0, below=1
    )
    embedding_dropout: float | None = setting(
        None,
        "Share dropped from the word vectors; null: as much as `dropout`.",
        least=0,
        below=1,
        example="0.2",
    )
    pooling: Pooling = setting(
        Pooling.max, "What a row's vector is: final states, maximum, mean or learned attention."
    )

    def make(self, num_outputs: int, vocabulary_size: int, padding_id: int) -> BiLSTM:
        return BiLSTM(self, num_outputs, vocabulary_size, padding_id)


class BiLSTM(Network, nn.Module):
    """Embedding, LSTM layers in both directions, pooling, and a linear output."""

    layout = "padded"

    def __init__(
        self, config: BiLSTMConfig, num_outputs: int, vocabulary_size: int, padding_id: int = 0
    ) -> None:
        super().__init__()
        self.padding_id = padding_id
        self.embedding = nn.Embedding(vocabulary_size, config.embedding, padding_idx=padding_id)
        widths = [config.embedding] + [2 * config.hidden] * (config.layers - 1)
        self.layers = nn.ModuleList()
        for width in widths:
            ahead = nn.LSTM(width, config.hidden)
            back = nn.LSTM(width, config.hidden)  # reads the rows reversed
            self.layers.append(nn.ModuleDict({"ahead": ahead, "back": back}))
        self.pool = Pool(config.pooling, 2 * config.hidden)
        share = config.dropout if config.embedding_dropout is None else config.embedding_dropout
        self.embedding_dropout = LeanDropout(share)
        self.dropout = LeanDropout(config.dropout)
        self.output = nn.Linear(2 * config.hidden, num_outputs)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.embedding.weight.data[padding_id].zero_()
        for layer in self.layers.modules():
            if isinstance(layer, nn.LSTM):
                start_layer(layer)

    def forward(self, batch: FlatBatch) -> Tensor:
        tokens_BL, lengths_B = batch.padded(fill=self.padding_id)
        # sorted and on the host: no wait for the device
        is_even = bool(batch.lengths[0] == batch.lengths[-1])
        turned = None if is_even else reversed_places(lengths_B, tokens_BL.shape[1])
        # time first: torch's LSTM then copies less
        states_LBD = self.embedding_dropout(self.embedding(tokens_BL.t()))
        sides = [side for layer in self.layers for side in layer.children()]
        *weights, output = cast_layers([*sides, self.output], tokens_BL.device)
        for depth in range(len(self.layers)):
            both = slice(2 * depth, 2 * depth + 2)
            ahead, back = sides[both]
            states_LBD = self.dropout(states_LBD) if depth else states_LBD
            states_LBD = torch.cat(run_both(ahead, back, states_LBD, turned, weights[both]), -1)
        padding_BL = None
        if not is_even:
            places_L = count_up(tokens_BL.shape[1], tokens_BL.device)
            padding_BL = places_L >= lengths_B.unsqueeze(1)
        pooled_BD = self.pool(states_LBD.transpose(0, 1), lengths_B, padding_BL)
        pooled_BD = self.dropout(pooled_BD)
        return self.output(pooled_BD) if output is None else linear(pooled_BD, *output)

    def products(self, lengths: Lengths) -> list[Product]:
        """A token meets 4H(E + H) weights in each direction of each layer; a row meets 2H x C."""
        tokens = float(lengths.sum())
        products = [look_up(self.embedding.weight)]
        for layer in self.layers:
            for name in ("weight_ih_l0", "weight_hh_l0"):
                weights = [side.get_parameter(name) for side in layer.children()]
                products.append(through(tokens, *weights))
        products += self.pool.products(tokens)
        products.append(through(len(lengths), self.output.weight))
        return products
