"""The usual way, as it is taught: a Dataset of rows, a DataLoader that pads, a packed LSTM, and a
loop.

Written as a careful person would, not as a straw man: texts may be tokenised before training, rows
are padded to the longest of their batch, packing skips the padding. It is what the headlines bench
measures ours against.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

from flatout.ladder.usual.headlines import WordVocabulary


@dataclass(frozen=True, slots=True)
class Example:
    """One row: its text or its token ids, and its class."""

    words: str | list[int]
    target: int


Collate = Callable[[list[Example]], tuple[Tensor, Tensor, Tensor]]


class UsualBiLSTM(nn.Module):
    """Embedding, one packed bidirectional LSTM, maximum over time, linear output."""

    def __init__(
        self, vocabulary_size: int, classes: int, embedding: int, hidden: int, dropout: float
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding, padding_idx=0)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(2 * hidden, classes)

    def forward(self, tokens_BL: Tensor, lengths_B: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.dropout(self.embedding(tokens_BL)),
            lengths_B,
            batch_first=True,
            enforce_sorted=False,
        )
        states_BLD, _ = pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, padding_value=float("-inf")
        )
        return self.output(self.dropout(states_BLD.amax(1)))


def collate(examples: list[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Pad rows that were tokenised before."""
    rows = [torch.tensor(example.words) for example in examples]
    lengths_B = torch.tensor([len(row) for row in rows])
    return (
        pad_sequence(rows, batch_first=True),
        lengths_B,
        torch.tensor([example.target for example in examples]),
    )


def collate_texts(vocabulary: WordVocabulary) -> Collate:
    """Tokenise and pad: what makes a device wait."""

    def tokenise(examples: list[Example]) -> tuple[Tensor, Tensor, Tensor]:
        return collate(
            [Example(vocabulary.encode(str(example.words)), example.target) for example in examples]
        )

    return tokenise


@dataclass(slots=True)
class Timing:
    """What one epoch took."""

    rows: int = 0
    seconds: float = 0.0
    waiting: float = 0.0

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Example],
    *,
    clip: float,
    before_step: Callable[[], None] | None = None,
) -> Timing:
    """One epoch of the usual loop, `.item()` each step."""
    timing = Timing()
    model.train()
    asked = time.perf_counter()
    started = asked
    total = 0.0
    for tokens_BL, lengths_B, targets_B in loader:
        timing.waiting += time.perf_counter() - asked
        if before_step is not None:
            before_step()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens_BL, lengths_B), targets_B)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        total += loss.item()
        timing.rows += len(targets_B)
        asked = time.perf_counter()
    timing.seconds = time.perf_counter() - started
    return timing


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader[Example]) -> float:
    model.eval()
    correct = 0
    total = 0
    for tokens_BL, lengths_B, targets_B in loader:
        correct += int((model(tokens_BL, lengths_B).argmax(-1) == targets_B).sum())
        total += len(targets_B)
    return correct / total
