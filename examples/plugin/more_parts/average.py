"""`model=average`: the mean of a text's word vectors, and a linear output."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from flatout.data.batches.flat_batch import FlatBatch
from flatout.models.words import WordsConfig


@dataclass(kw_only=True, slots=True)
class AverageConfig(WordsConfig):
    """Settings of the model: those that all models on words have."""

    def make(self, num_outputs: int, vocabulary_size: int, padding_id: int) -> Average:
        return Average(self.embedding, num_outputs, vocabulary_size)


class Average(nn.Module):
    """Reads a batch as one run of words with the offset of each text, without padding."""

    def __init__(self, width: int, num_outputs: int, vocabulary_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.output = nn.Linear(width, num_outputs)

    def forward(self, batch: FlatBatch) -> Tensor:
        words = batch.tokens.long()
        starts = batch.offsets[:-1].to(words.device)
        return self.output(nn.functional.embedding_bag(words, self.embedding.weight, starts))
