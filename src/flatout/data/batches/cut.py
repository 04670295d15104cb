"""A batch in smaller pieces: its real rows one run after another, each run with about as many tokens.

What is added up over the rows of a step (losses, gradients, counts) is the same over the pieces as over the whole:
each still says how many rows the step has. Nothing is copied but offsets and the ids of several labels a row, and
nothing waits for the device.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.data.batches.flat_batch import FlatBatch

_NO_CLASS = torch.iinfo(torch.int32).max
"""An id beyond all classes: it belongs to another piece."""


def cut_batch(batch: FlatBatch, count: int, *, labels_are_of_tokens: bool = False) -> list[FlatBatch]:
    """At most `count` pieces, each with a row at least; rows that do not count are in none, unless all are such."""
    if count <= 1 or batch.num_real <= 1:
        return [batch]
    lengths = batch.lengths[: batch.num_real].numpy()
    ends = np.append(0, np.cumsum(lengths))
    edges = piece_edges(lengths, min(count, batch.num_real))
    return [
        _piece(batch, start, stop, int(ends[start]), int(ends[stop]), labels_are_of_tokens)
        for start, stop in itertools.pairwise(edges)
    ]


def piece_edges(lengths: NDArray[np.integer], count: int) -> list[int]:
    """Where to cut rows into `count` runs of about as many tokens, each with one row at least."""
    ends, number = np.cumsum(lengths), np.arange(1, count)
    inner = np.searchsorted(ends, ends[-1] * number / count) + 1 - number
    inner = np.clip(np.maximum.accumulate(inner), 0, len(lengths) - count) + number
    return [0, *inner.tolist(), len(lengths)]


def _piece(batch: FlatBatch, start: int, stop: int, first: int, last: int, labels_are_of_tokens: bool) -> FlatBatch:
    """Rows `start` to `stop` of a batch, which are its tokens `first` to `last`."""
    targets, target_offsets = batch.targets, batch.target_offsets
    if targets is not None and labels_are_of_tokens:
        targets = targets[first:last]
        target_offsets = None if target_offsets is None else target_offsets[start : stop + 1] - first
    elif targets is not None and target_offsets is not None:
        targets, target_offsets = _labels(targets, target_offsets[start : stop + 1])
    elif targets is not None:
        targets = targets[start:stop]
    return FlatBatch(
        tokens=batch.tokens[first:last],
        offsets=batch.offsets[start : stop + 1] - first,
        lengths=batch.lengths[start:stop],
        rows=batch.rows[start:stop],
        targets=targets,
        target_offsets=target_offsets,
        num_real=stop - start,
        step_rows=batch.step_rows,
        ends_step=batch.ends_step and stop == batch.num_real,
        cut_from=(start, batch.num_real),
    )


def _labels(ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Ragged labels of a piece: only the device knows where they begin, so those of other pieces get no class."""
    places = torch.arange(len(ids), device=ids.device)
    is_other = (places < offsets[0]) | (places >= offsets[-1])
    offsets = offsets.clone()
    offsets[:1].zero_()
    offsets[-1:].fill_(len(ids))
    return ids.masked_fill(is_other, _NO_CLASS), offsets
