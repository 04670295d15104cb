"""Convolutions of several widths over words, each filter's highest answer, and a linear output (Kim
2014).

A row is seen as if zeros stood before and after it. Windows may reach over its ends, so short rows
work.

Shapes: B rows, L longest row, E embedding, F filters of one width, C outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.kept_tensors import count_up
from flatout.errors import require, setting
from flatout.models.casts import autocast_dtype, cast_weights, share_cast
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
        words_BLE = self.embedding_dropout(self.embedding(tokens_BL))
        # sorted and on the host: no wait for the device
        is_even = bool(batch.lengths[0] == batch.lengths[-1])
        paddings = () if is_even else find_padding(lengths_B, tokens_BL.shape[1])
        if paddings:
            # The padding word's vector is zero, but a person's own vectors need not keep it so.
            words_BLE = words_BLE.masked_fill(paddings[0].unsqueeze(-1), 0)
        highest = list[Tensor]()
        answers = self._filter(words_BLE.transpose(1, 2))
        for conv, answers_BFL in zip(self.filters, answers, strict=True):
            if paddings:  # the windows that a row alone would have
                is_even_width = conv.get_parameter("weight").shape[-1] % 2 == 0
                bias_BL = padding_bias(paddings[is_even_width], answers_BFL.dtype)
                answers_BFL = answers_BFL + bias_BL.unsqueeze(1)
            highest.append(answers_BFL.amax(-1))
        # as relu before the maximum, but on L times fewer numbers
        return self.output(self.dropout(torch.cat(highest, -1).relu()))

    def _filter(self, words_BEL: Tensor) -> Iterator[Tensor]:
        """`[B, F, L]`: what the filters of each width answer at each place."""
        inputs = (words_BEL,) * len(self.filters)
        weights = list[list[Tensor]]()
        for conv in self.filters:
            weights.append([conv.get_parameter("weight"), conv.get_parameter("bias")])
        dtype = autocast_dtype(words_BEL.device)
        if dtype is not None:
            inputs = share_cast(words_BEL, dtype, len(self.filters))
            weights = cast_weights(dtype, weights)
        for own_BEL, (weight, bias) in zip(inputs, weights, strict=True):
            yield functional.conv1d(own_BEL, weight, bias, padding=weight.shape[-1] // 2)

    def products(self, lengths: Lengths) -> list[Product]:
        """Each window meets width x E x F weights.

        A row has a window for each token; with an even width it has one more.
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


def find_padding(lengths_B: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Which windows a row alone would not have, for filters of odd and of even widths.

    `[B, L]` and `[B, L + 1]`: filters of odd widths have as many windows as the longest row has
    words; of even widths one more.
    """
    places_L = count_up(longest + 1, lengths_B.device)
    lengths_B1 = lengths_B.unsqueeze(1)
    return places_L[:longest] >= lengths_B1, places_L > lengths_B1
