"""Windows of long texts: cut from a batch, and their answers joined to one answer for each text.

A row may hold the windows of a text one after the other. `cut_windows` makes them the rows of a
batch, shortest first, each with positions that begin at 0. `join_answers` makes one answer a text:
the mean of its windows' logits, the largest of each class, or a mean weighted by a learned
attention.

    texts of 5 and 2 tokens, windows of 3    windows of 3, 2 and 2 tokens, of texts 0, 0 and 1
    as rows, shortest first                  lengths [2, 2, 3], texts [0, 1, 0]

Shapes: W windows, T tokens, B texts, C outputs.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.kept_tensors import on_device
from flatout.data.tokens.long_texts import CUT

Windows = StrEnum("Windows", "mean max attention")  # how answers are joined


def window_lengths(
    lengths_B: NDArray[np.integer], size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`[W]` tokens of each window of rows of these lengths, in order, and `[W]` the row of each."""
    _, lengths_W, rows_W = CUT.cut_windows(lengths_B.astype(np.int64), size)
    return lengths_W, rows_W


def cut_windows(batch: FlatBatch, size: int) -> tuple[FlatBatch, Tensor, Tensor]:
    """A batch whose rows are the windows of this batch, shortest first.

    Also returns `[W]` the text of each window, and `[T]` where each of its tokens stood before.
    """
    lengths, texts = window_lengths(batch.lengths.numpy(), size)
    begins = np.cumsum(lengths) - lengths  # windows stand without gaps, and none overlaps another
    order = np.argsort(lengths, kind="stable")
    lengths = lengths[order]
    texts = texts[order]
    offsets = np.append(0, np.cumsum(lengths))
    # The token at place p of the new batch stood at p + (old begin of its window - new begin).
    shift_T = np.repeat(begins[order] - offsets[:-1], lengths)
    device = batch.tokens.device
    places_T = on_device(shift_T + np.arange(offsets[-1]), device)
    windows = replace(
        batch,
        lengths=torch.from_numpy(lengths),
        rows=torch.from_numpy(texts),
        num_real=len(texts),
        tokens=batch.tokens.index_select(0, places_T),
        offsets=on_device(offsets, device),
        targets=None,
        target_offsets=None,
    )
    return windows, on_device(texts, device), places_T


def join_answers(answers_WC: Tensor, texts_W: Tensor, num_texts: int, how: Windows) -> Tensor:
    """`[B, C]` the answers of texts from those of their windows.

    `Windows.attention` takes the last column of `answers_WC` as each window's score.
    """
    answers_WC = answers_WC.float()
    weights_W1 = torch.ones_like(answers_WC[:, :1])
    if how is not Windows.mean:
        index_WC = texts_W.unsqueeze(1).expand_as(answers_WC)
        largest_BC = answers_WC.new_zeros(num_texts, answers_WC.shape[1])
        largest_BC = largest_BC.scatter_reduce(0, index_WC, answers_WC, "amax", include_self=False)
        if how is Windows.max:
            return largest_BC
        # A softmax over the windows of each text; the largest score is taken off before exp.
        largest_W1 = largest_BC[:, -1:].detach()[texts_W]
        weights_W1 = (answers_WC[:, -1:] - largest_W1).exp()
        answers_WC = answers_WC[:, :-1]
    zeros_BC = answers_WC.new_zeros(num_texts, answers_WC.shape[1])
    sums_BC = zeros_BC.index_add(0, texts_W, answers_WC * weights_W1)
    return sums_BC / answers_WC.new_zeros(num_texts, 1).index_add(0, texts_W, weights_W1)
