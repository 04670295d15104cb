"""A hand-written LightningModule for tests of DataModules: mean of token vectors, a line, and a
note of each batch.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.data.batches.flat_batch import FlatBatch

Seen = tuple[int, int, bool, list[int]]
"""Real rows, rows of the step, whether the step ends, and the rows' numbers."""


class TinyModule(L.LightningModule):
    """Its loss is weighted so that accumulation and ranks give the loss of the full batch."""

    def __init__(self, vocabulary: int, classes: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.vectors = nn.Embedding(vocabulary, 4)
        self.line = nn.Linear(4, classes)
        self.train_batches: list[Seen] = []
        self.validation_rows: list[list[int]] = []
        self.test_rows: list[int] = []

    def outputs(self, batch: FlatBatch) -> Tensor:
        tokens_BL, lengths_B = batch.padded()
        kept_BL = torch.arange(tokens_BL.shape[1]) < lengths_B.unsqueeze(1)
        sums_BD = (self.vectors(tokens_BL.long()) * kept_BL.unsqueeze(-1)).sum(1)
        return self.line(sums_BD / lengths_B.unsqueeze(1).clamp(min=1))

    def training_step(self, batch: FlatBatch, number: int) -> Tensor:
        real = batch.num_real
        self.train_batches.append(
            (real, batch.step_rows, batch.ends_step, batch.rows[:real].tolist())
        )
        losses = F.cross_entropy(
            self.outputs(batch)[:real], batch.targets[:real].long(), reduction="sum"
        )
        parts = self.trainer.accumulate_grad_batches * self.trainer.world_size
        return losses * parts / batch.step_rows

    def on_validation_epoch_start(self) -> None:
        self.validation_rows.append([])

    def validation_step(self, batch: FlatBatch, number: int) -> None:
        self.validation_rows[-1] += batch.rows[: batch.num_real].tolist()

    def test_step(self, batch: FlatBatch, number: int) -> None:
        self.test_rows += batch.rows[: batch.num_real].tolist()

    def predict_step(self, batch: FlatBatch, number: int) -> tuple[Tensor, Tensor]:
        return batch.rows, self.outputs(batch).argmax(1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)
