"""The usual way with bit strings, as published research code goes about it; the other side of
`bench bits`.

pandas `apply` for bits and labels, a data set of float32 tensors a row, a DataLoader of 64 rows,
one hidden layer of 4,096 SELU units with dropout 0.2253, RMSprop at 2e-4 (the best settings of a
published search: repository marcelmildenberger/dataset-extension-attack, optimal_model_config.py),
and `.item()` at every step.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from flatout.bits.grams import LABELS
from flatout.bits.info import BitInfo
from flatout.bits.people import FIELDS
from flatout.bits.scores import GramMetrics
from flatout.ladder.usual.bloom import join_fields, labels_by_apply, read_bits

BATCH = 64
HIDDEN = 4096
DROPOUT = 0.2253


def usual_tensors(frame: Any) -> tuple[Tensor, Tensor]:
    """Bits and labels as research code makes them: pandas `apply`, a list of characters, a look-up
    a label.
    """
    texts = join_fields(frame, FIELDS)
    return torch.tensor(read_bits(frame)), torch.tensor(labels_by_apply(texts))


class RowTensors(Dataset[tuple[Tensor, Tensor]]):
    """The usual data set: a float32 tensor a row."""

    def __init__(self, bits: NDArray[np.float32], labels: Tensor) -> None:
        self.bits, self.labels = bits, labels

    def __len__(self) -> int:
        return len(self.bits)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.bits[row], dtype=torch.float32), self.labels[row]


class UsualLoop:
    """The published network in the loop it was published with, a step's loss read by `.item()`."""

    def __init__(self, data: BitInfo, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.network = nn.Sequential(
            nn.Linear(data.num_inputs, HIDDEN),
            nn.SELU(),
            nn.Dropout(DROPOUT),
            nn.Linear(HIDDEN, len(LABELS)),
        )
        self.optimizer = torch.optim.RMSprop(self.network.parameters(), lr=2e-4)
        self.splits = {name: _dense(data, name) for name in data.store.splits}

    def epoch(self) -> float:
        """Seconds of one pass."""
        self.network.train()
        criterion = nn.BCEWithLogitsLoss()
        total = 0.0
        started = time.perf_counter()
        for bits, labels in DataLoader(
            RowTensors(*self.splits["train"]), batch_size=BATCH, shuffle=True
        ):
            self.optimizer.zero_grad()
            loss = criterion(self.network(bits), labels)
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        return time.perf_counter() - started

    @torch.inference_mode()
    def dice(self) -> float:
        """On the test records, with the threshold that is best on the validation records."""
        self.network.eval()
        metrics = GramMetrics()
        values: dict[str, float] = {}
        for split in ("validation", "test"):
            bits, labels = self.splits[split]
            metrics.reset()
            metrics.update(self.network(torch.from_numpy(bits)).sigmoid(), labels)
            values = metrics.compute()
            metrics.fixed_threshold = metrics.threshold
        return values["dice"]


def _dense(data: BitInfo, name: str) -> tuple[NDArray[np.float32], Tensor]:
    split = data.store.splits[name]
    bits = np.unpackbits(split.fixed("tokens"), axis=1).astype(np.float32)
    labels = torch.zeros(split.num_rows, len(LABELS))
    targets = split.ragged("targets")
    row = np.repeat(np.arange(split.num_rows), targets.lengths)
    chosen = targets.values < len(LABELS)
    labels[
        torch.from_numpy(row[chosen]), torch.from_numpy(targets.values[chosen].astype(np.int64))
    ] = 1.0
    return bits, labels
