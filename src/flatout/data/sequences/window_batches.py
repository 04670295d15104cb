"""Windows by number, a whole batch at once: what the loaders of `windows` share.

A usual loader cuts out each window in Python, then stacks 64 of them. A DataLoader asks a dataset
that has `__getitems__` for all numbers of a batch at once, so each group of columns is copied by
one index. Samplers, distributed ones too, and workers are torch's own. Open this file to change how
rows are copied into a batch, or the order of windows. `window_loader.py` and
`forecasting_windows.py` say which columns a batch has.

Shapes: B windows, C columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, RandomSampler

from flatout.data.batches.gather import HostColumn, runs_of
from flatout.data.batches.plan import generator_of
from flatout.data.sequences.views import Places
from flatout.data.store.store import Array, Ragged

_NUMBERS_AT_ONCE = 65_536  # window numbers that are a list of Python numbers at one time
Batch = TypeVar("Batch")
Nested = Tensor | None | dict[str, "Nested"] | tuple["Nested", ...] | list["Nested"]


def keep_batch(batch: Batch) -> Batch:
    """The `collate_fn` of a dataset whose `__getitems__` returns whole batches."""
    return batch


class SeededOrder(RandomSampler):
    """Each window once an epoch, in an order that depends on the seed and the epoch only.

    Lightning calls `set_epoch`; without it each iteration is the next epoch.
    """

    def __init__(self, windows: WindowBatches, seed: int) -> None:
        super().__init__(windows)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        random = generator_of(self.seed, self.epoch)
        self.epoch += 1
        kind = np.int32 if self.num_samples < 2**31 else np.int64
        order = np.arange(self.num_samples, dtype=kind)
        random.shuffle(order)
        # A list of all numbers would take 40 bytes a window.
        for first in range(0, len(order), _NUMBERS_AT_ONCE):
            yield from order[first : first + _NUMBERS_AT_ONCE].tolist()


class WindowBatches(Dataset[Any], ABC):
    """Windows by number: `[3]` is one window, `__getitems__([3, 7])` a whole batch."""

    start: Places  # the first row of each window

    @abstractmethod
    def batch(self, numbers: Places) -> Any:
        """A batch of the windows with these numbers."""

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, number: int) -> Any:
        return first_of(self.__getitems__([range(len(self))[number]]))

    def __getitems__(self, numbers: Sequence[int]) -> Any:
        return self.batch(np.asarray(numbers, np.int64))


def gather_runs(values: Array, start_B: Places, length: int | NDArray[np.integer]) -> Tensor:
    """`[B, longest, C]`: the rows of `values` from each start; shorter runs end in zeros.

    Values 10 to 19, starts [2, 5] and lengths [3, 1] give [[12, 13, 14], [15, 0, 0]].
    """
    # Runs of one length are rows of a view: one index copies them, without padding.
    if not isinstance(length, int) and (length == length[0]).all():
        length = int(length[0])
    if isinstance(length, int):
        return torch.from_numpy(runs_of(values, length)[start_B])
    column = HostColumn(Ragged(values, start_B, length.astype(np.int32)))
    longest = int(length.max())
    flat, _ = column.gather(np.arange(len(start_B)), length.astype(np.int64))
    padded = flat.new_zeros((len(start_B), longest, *values.shape[1:]))
    padded[torch.from_numpy(np.arange(longest) < length[:, None])] = flat
    return padded


def first_of(batch: Nested) -> Nested:
    """The first row of a batch, whatever containers its tensors are in."""
    if isinstance(batch, dict):
        return {name: first_of(part) for name, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(map(first_of, batch))
    if isinstance(batch, list):
        return list(map(first_of, batch))
    return None if batch is None else batch[0]


def join_arrays(parts: list[Any]) -> Any:
    """Arrays behind each other; without a copy where there is one, None where there are none."""
    return parts[0] if len(parts) == 1 or parts[0] is None else np.concatenate(parts)
