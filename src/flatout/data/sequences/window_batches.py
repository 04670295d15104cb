"""Windows by number, a batch of them in one gather, and the seeded order in which a torch DataLoader asks for them.

A usual loader makes a window a row: Python cuts each out, then stacks 64 of them. A DataLoader asks a dataset that has
`__getitems__` for all numbers of a batch at once, so each group of columns is copied by one index. Samplers,
distributed ones too, and workers are torch's own. Shapes: B windows, C columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, RandomSampler

from flatout.data.batches.gather import HostColumn, runs_of
from flatout.data.sequences.views import Places
from flatout.data.store.store import Array, Ragged

_NUMBERS_AT_ONCE = 65_536


class WindowBatches(Dataset[Any], ABC):
    """Windows by number: `[3]` is one, `__getitems__` a batch that needs no collating."""

    start: Places
    """The first row of each window."""

    @abstractmethod
    def batch(self, numbers: Places) -> Any:
        """The windows of these numbers, put together."""

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, number: int) -> Any:
        return first_of(self.__getitems__([range(len(self))[number]]))

    def __getitems__(self, numbers: Sequence[int]) -> Any:
        return self.batch(np.asarray(numbers, np.int64))


def gather_runs(values: Array, start_B: Places, length: int | NDArray[np.integer]) -> Tensor:
    """`[B, longest, C]`: the rows of `values` from each start; shorter runs end in zeros, others need no padding."""
    if not isinstance(length, int) and (length == length[0]).all():
        length = int(length[0])
    if isinstance(length, int):
        return torch.from_numpy(runs_of(values, length)[start_B])
    column, longest = HostColumn(Ragged(values, start_B, length.astype(np.int32))), int(length.max())
    flat, _ = column.gather(np.arange(len(start_B)), length.astype(np.int64))
    padded = flat.new_zeros((len(start_B), longest, *values.shape[1:]))
    padded[torch.from_numpy(np.arange(longest) < length[:, None])] = flat
    return padded


def first_of(batch: Any) -> Any:
    """The first row of a batch, of whatever it is made."""
    if isinstance(batch, dict):
        return {name: first_of(part) for name, part in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(map(first_of, batch))
    return None if batch is None else batch[0]


def take_whole(batch: Any) -> Any:
    """The `collate_fn` of a batch that is whole already."""
    return batch


class SeededOrder(RandomSampler):
    """Each window once an epoch, in an order of seed and epoch alone; counts the epochs where they are not set."""

    def __init__(self, windows: WindowBatches, seed: int) -> None:
        super().__init__(windows)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        random = np.random.Generator(np.random.Philox(key=[self.seed & (2**64 - 1), self.epoch]))
        self.epoch += 1
        order = np.arange(self.num_samples, dtype=np.int32 if self.num_samples < 2**31 else np.int64)
        random.shuffle(order)
        for first in range(0, len(order), _NUMBERS_AT_ONCE):  # a list of all would take 40 bytes a window
            yield from order[first : first + _NUMBERS_AT_ONCE].tolist()
