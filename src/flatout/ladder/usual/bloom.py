"""Read 2-grams off bit strings, as research code is usually written.

pandas `apply` makes bits and labels, row by row. A row stays a list of Python floats until the data
set makes a tensor of it. Two workers feed batches of eight; each batch is a step, reads its loss
and logs it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase, digits
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flatout.bits.scores import GramMetrics
from flatout.ladder.usual.program import Case, Stopwatch, UsualProgram

log = logging.getLogger("usual.bloom")
GRAMS = [a + b for a in ascii_lowercase for b in ascii_lowercase]
GRAMS += [a + b for a in ascii_lowercase for b in digits]
GRAMS += [a + b for a in digits for b in digits]


@dataclass(frozen=True, slots=True, kw_only=True)
class BloomOptions:
    caching: bool = False  # whether prepared rows are kept in a file for the next run
    labels: str = "apply"  # apply (row by row) or vectorised (one table look-up for all rows)
    bits: str = "lists"  # lists of floats, or tensors
    workers: int = 2
    accumulate: int = 1  # batches whose gradients are added up before a step
    transfers: str = "blocking"  # blocking, or async
    compiled: bool = False


class RowLists(Dataset[tuple[Tensor, Tensor]]):
    """A list of floats a row, made a tensor when it is asked for."""

    def __init__(self, bits: list[list[float]], labels: list[list[float]]) -> None:
        self.bits, self.labels = bits, labels

    def __len__(self) -> int:
        return len(self.bits)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.bits[row]), torch.tensor(self.labels[row])


def join_fields(frame: pd.DataFrame, columns: Sequence[str]) -> pd.Series:
    texts = frame[list(columns)].apply(lambda row: "".join(row), axis=1)
    return texts.apply(
        lambda text: text.replace('"', "").replace(".", "").replace("/", "").strip().lower()
    )


def read_bits(frame: pd.DataFrame) -> list[list[float]]:
    return frame["bloomfilter"].apply(lambda text: [float(bit) for bit in text]).tolist()


def labels_by_apply(texts: pd.Series) -> list[list[float]]:
    """A look-up a gram, a list a row."""

    def row_labels(text: str) -> list[float]:
        row = [0.0] * len(GRAMS)
        for gram in map("".join, pairwise(text)):
            if gram in GRAMS:
                row[GRAMS.index(gram)] = 1.0
        return row

    return texts.apply(row_labels).tolist()


def labels_at_once(texts: pd.Series) -> list[list[float]]:
    """The labels of all texts by one table of numbers and one assignment."""
    numbers = {gram: number for number, gram in enumerate(GRAMS)}
    cells = list[tuple[int, int]]()  # row and number of each gram
    for row, text in enumerate(texts):
        grams = map("".join, pairwise(text))
        cells += [(row, numbers[gram]) for gram in grams if gram in numbers]
    labels = np.zeros((len(texts), len(GRAMS)), np.float32)
    labels[tuple(np.array(cells).T)] = 1.0
    return labels.tolist()


def prepare(
    case: Case, how: BloomOptions, split: str
) -> tuple[list[list[float]], list[list[float]]]:
    """Bits and labels of a split, from its rows or from the file of an earlier run."""
    path = Path(case.folder) / f"{split}-prepared.pt"
    if how.caching and path.exists():
        prepared = torch.load(path, weights_only=True)
        return prepared["bits"].float().tolist(), prepared["labels"].float().tolist()
    frame = case.read_texts(split)
    texts = join_fields(frame, case.reading["columns"])
    bits = read_bits(frame)
    labels = labels_by_apply(texts) if how.labels == "apply" else labels_at_once(texts)
    if how.caching:
        prepared = {
            "bits": torch.tensor(bits, dtype=torch.uint8),
            "labels": torch.tensor(labels, dtype=torch.uint8),
        }
        torch.save(prepared, path)
    return bits, labels


class BloomProgram(UsualProgram[BloomOptions]):
    def __init__(self, case: Case, how: BloomOptions) -> None:
        super().__init__(case, how)
        bits, labels = prepare(case, how, "train")
        data: Any = RowLists(bits, labels)
        if how.bits == "tensors":
            data = TensorDataset(torch.tensor(bits), torch.tensor(labels))
        layers: list[nn.Module] = []
        widths = [len(bits[0]), *case.model["widths"]]
        for width, wanted in pairwise(widths):
            layers += [nn.Linear(width, wanted), nn.ReLU(), nn.Dropout(case.model["dropout"])]
        self.network: Any = nn.Sequential(*layers, nn.Linear(widths[-1], len(GRAMS))).to(
            self.device
        )
        self.trained = torch.compile(self.network) if how.compiled else self.network
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=case.lr)
        self.loader = DataLoader(
            data,
            case.reading["usual_batch"],
            shuffle=True,
            pin_memory=how.transfers == "async" and torch.cuda.is_available(),
            num_workers=how.workers,
            multiprocessing_context="fork" if how.workers else None,
        )

    def train_epoch(self, watch: Stopwatch) -> None:
        self.network.train()
        how = self.how
        total = 0.0
        rows = 0
        number = 0
        criterion = nn.BCEWithLogitsLoss()
        for number, batch in enumerate(watch.batches(self.loader), 1):
            bits, labels = (
                part.to(self.device, non_blocking=how.transfers == "async") for part in batch
            )
            loss = criterion(self.trained(bits), labels) / how.accumulate
            loss.backward()
            total += loss.item() * how.accumulate
            log.info(
                "batch %d: loss %.5f, mean %.5f",
                number,
                loss.item() * how.accumulate,
                total / number,
            )
            rows += len(bits)
            if number % how.accumulate == 0:
                self.update(self.network)
                watch.step(rows)
                rows = 0
        if number % how.accumulate:
            self.update(self.network)

    @torch.no_grad()
    def test(self) -> dict[str, float]:
        """Dice at the threshold that is best on the validation rows."""
        self.network.eval()
        metrics = GramMetrics()
        values = {}
        for split in ("validation", "test"):
            bits, labels = (torch.tensor(part) for part in prepare(self.case, self.how, split))
            metrics.reset()
            for some, wanted in zip(bits.split(512), labels.split(512), strict=True):
                metrics.update(self.network(some.to(self.device)).sigmoid().cpu(), wanted)
            values = metrics.compute()
            metrics.fixed_threshold = metrics.threshold
        return {"dice": values["dice"]}


# The ladder finds both under these names in each usual program.
OPTIONS = BloomOptions
PROGRAM = BloomProgram
