"""Convolutions of several widths over words, each filter's highest answer, and a linear output (Kim
2014).

A row is seen as if zeros stood before and after it. Windows may reach over its ends, so short rows
work.

Shapes: B rows, L longest row, E embedding, F filters of one width, C outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatout.data.batches.flat_batch import FlatBatch
from flatout.errors import require, setting
from flatout.models.contract import Lengths, Network, Product, look_up, through
from flatout.models.lean import LeanDropout
from flatout.models.words import WordsConfig, padding_bias


@dataclass(kw_only=True, slots=True)
class TextCNNConfig(WordsConfig):
    """A convolutional classifier trained from scratch; quicker than a BiLSTM and blind to long
    distances.
    """

    filters: int = setting(128, "Filters of each width.", least=1)
    widths: list[int] = setting(
        lambda: [2, 3, 4],
        "Words that a filter sees at once.",
        least=1,
        allowed="a list of one or more widths of 1 or more",
        example="[3,4,5]",
    )
    dropout: float = setting(0.5, "Share of values dropped before the output.", least=0, below=1)
    embedding_dropout: float = setting(
        0.1, "Share of values dropped from the word vectors.", least=0, below=1
    )

    def __post_init__(self) -> None:
        WordsConfig.__post_init__(self)  # a class with slots has no working super()
        require(
            bool(self.widths),
            "model.widths",
            f"{self.widths}",
            allowed="one or more widths of 1 or more",
        )

    def make(self, num_outputs: int, vocabulary_size: int, padding_id: int) -> TextCNN:
        return TextCNN(self, num_outputs, vocabulary_size, padding_id)


class TextCNN(Network, nn.Module):
    """Embedding, one convolution a width, highest answers, and a linear output."""

    layout = "padded"

    def __init__(
        self, config: TextCNNConfig, num_outputs: int, vocabulary_size: int, padding_id: int = 0
    ) -> None:
        super().__init__()
        self.padding_id = padding_id
        self.embedding = nn.Embedding(vocabulary_size, config.embedding, padding_idx=padding_id)
        sizes = config.embedding, config.filters
        self.filters = nn.ModuleList(
            nn.Conv1d(*sizes, width, padding=width // 2) for width in config.widths
        )
        self.embedding_dropout = LeanDropout(config.embedding_dropout)
        self.dropout = LeanDropout(config.dropout)
        self.output = nn.Linear(config.filters * len(config.widths), num_outputs)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.embedding.weight.data[padding_id].zero_()

    def forward(self, batch: FlatBatch) -> Tensor:
        tokens_BL, lengths_B = batch.padded(fill=self.padding_id)
        longest = tokens_BL.shape[1]
        words_BLE = self.embedding_dropout(self.embedding(tokens_BL))
        # even widths have one window more
        places_L = torch.arange(longest + 1, device=tokens_BL.device)
        # sorted and on the host: no wait for the device
        is_even = bool(batch.lengths[0] == batch.lengths[-1])
        if not is_even:
            # The padding word's vector is zero, but a person's own vectors need not keep it so.
            words_BLE = words_BLE.masked_fill(
                (places_L[:longest] >= lengths_B.unsqueeze(1)).unsqueeze(-1), 0
            )
        words_BEL = words_BLE.transpose(1, 2)
        highest: list[Tensor] = []
        for conv in self.filters:
            answers_BFL = conv(words_BEL)
            if not is_even:  # the windows that a row alone would have
                windows = answers_BFL.shape[-1]
                mask_BL = places_L[:windows] < (lengths_B + windows - longest).unsqueeze(1)
                answers_BFL = answers_BFL + padding_bias(mask_BL, answers_BFL.dtype).unsqueeze(1)
            # as relu before the maximum, but on L times fewer numbers
            highest.append(answers_BFL.amax(-1).relu())
        return self.output(self.dropout(torch.cat(highest, -1)))

    def products(self, lengths: Lengths) -> list[Product]:
        """Each window meets width x E x F weights; a row has a window a token, for even widths one
        more.
        """
        tokens = float(lengths.sum())
        rows = len(lengths)
        weights = [conv.get_parameter("weight") for conv in self.filters]
        filters = [
            through(tokens + rows * (weight.shape[-1] % 2 == 0), weight) for weight in weights
        ]
        return [
            look_up(self.embedding.weight),
            sum(filters[1:], filters[0]),
            through(rows, self.output.weight),
        ]
