"""Windows of long texts: cut from a batch, and their answers joined to one answer for each text."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.data.batches.flat_batch import FlatBatch, on_device
from flatout.data.tokens.long_texts import CUT

Windows = StrEnum("Windows", "mean max attention")


def window_lengths(
    lengths_B: NDArray[np.integer], size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`[W]` tokens of each window of such rows, in the order in which they stand, and the row of
    each.
    """
    # of which none overlaps the one before it
    return CUT.windows(lengths_B.astype(np.int64), size)[1:]


def cut_windows(batch: FlatBatch, size: int) -> tuple[FlatBatch, Tensor, Tensor]:
    """The windows of a batch as its rows, shortest first; `[W]` their texts and `[T]` their tokens'
    places.
    """
    lengths, text = window_lengths(batch.lengths.numpy(), size)
    begins = np.cumsum(lengths) - lengths  # windows stand without gaps
    order = np.argsort(lengths, kind="stable")
    lengths, text = lengths[order], text[order]
    offsets = np.append(0, np.cumsum(lengths))
    index = np.repeat(begins[order] - offsets[:-1], lengths) + np.arange(offsets[-1])
    device = batch.tokens.device
    windows = replace(
        batch, lengths=torch.from_numpy(lengths), rows=torch.from_numpy(text), num_real=len(text)
    )
    places_T = on_device(index, device)
    tokens = batch.tokens.index_select(0, places_T)
    windows = replace(
        windows,
        tokens=tokens,
        offsets=on_device(offsets, device),
        targets=None,
        target_offsets=None,
    )
    return windows, on_device(text, device), places_T


def answer_texts(answers_WC: Tensor, text_W: Tensor, num_texts: int, how: Windows) -> Tensor:
    """`[B, C]`: the mean of each text's windows, the largest of each output, or the mean by scores,
    the last column.
    """
    answers_WC = answers_WC.float()
    weights_W1 = torch.ones_like(answers_WC[:, :1])
    if how is not Windows.mean:
        places = text_W.unsqueeze(1).expand_as(answers_WC)
        most_BC = answers_WC.new_zeros(num_texts, answers_WC.shape[1])
        most_BC = most_BC.scatter_reduce(0, places, answers_WC, "amax", include_self=False)
        if how is Windows.max:
            return most_BC
        weights_W1 = (answers_WC[:, -1:] - most_BC[:, -1:].detach()[text_W]).exp()
        answers_WC = answers_WC[:, :-1]
    found = answers_WC.new_zeros(num_texts, answers_WC.shape[1]).index_add(
        0, text_W, answers_WC * weights_W1
    )
    return found / answers_WC.new_zeros(num_texts, 1).index_add(0, text_W, weights_W1)
