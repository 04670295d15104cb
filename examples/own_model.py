"""A network of your own on flat batches: the mean of word vectors, without padding.

`python examples/own_model.py`.
"""

import sys

import torch
from torch import Tensor, nn

from flatout import HeadlinesConfig, TextDataConfig, VocabularyConfig, fit
from flatout.data.batches.flat_batch import FlatBatch

WORDS = 10_000
CLASSES = 12


class MeanOfWords(nn.Module):
    """A batch is one run of tokens plus offsets, which is what `EmbeddingBag` reads."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, width, mode="mean")
        self.classes = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES))

    def forward(self, batch: FlatBatch) -> Tensor:
        return self.classes(
            self.words(batch.tokens.long(), batch.offsets[:-1].to(batch.tokens.device))
        )

    def training_flops(self, lengths) -> int:
        """Operations of a training step, so that the run can print its MFU."""
        return (
            3
            * 2
            * len(lengths)
            * sum(layer.weight.numel() for layer in self.classes if isinstance(layer, nn.Linear))
        )


def main(rows: int = 20_000) -> float:
    torch.manual_seed(0)
    sample = HeadlinesConfig(rows=rows, eval_rows=rows // 10, classes=CLASSES)
    data = TextDataConfig(sample=sample, vocabulary=VocabularyConfig(size=WORDS))
    result = fit(data, MeanOfWords(), epochs=3, name="own_model")
    print(result.predict(["senate votes on the treaty"]))
    return result.metrics["test/accuracy"]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
