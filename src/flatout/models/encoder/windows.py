"""Rows that hold the windows of a text one after the other: each is answered alone, and the row by all of them.

The windows of a batch are its rows here, shortest first; positions begin again with each. The answer of a text is the
mean of its windows' logits, or the largest of each class, so its loss counts once however long it is.

Shapes: B texts, W windows, C outputs.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from flatout.data.batches.flat_batch import FlatBatch


class Windows(StrEnum):
    """What the answer of a text is, of those of its windows."""

    mean = "mean"
    max = "max"


def window_lengths(lengths_B: NDArray[np.integer], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`[W]` tokens of each window of such rows, in the order in which they stand, and the row of each."""
    lengths = lengths_B.astype(np.int64)
    counts = -(-lengths // size)
    text = np.repeat(np.arange(len(lengths)), counts)
    place = np.arange(len(text)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.minimum(size, lengths[text] - place * size), text


def cut_windows(batch: FlatBatch, size: int) -> tuple[FlatBatch, Tensor]:
    """The windows of a batch as its rows, shortest first, and `[W]` the text of each on the tokens' device."""
    lengths, text = window_lengths(batch.lengths.numpy(), size)
    begins = np.cumsum(lengths) - lengths  # windows stand without gaps
    order = np.argsort(lengths, kind="stable")
    lengths, text = lengths[order], text[order]
    offsets = np.append(0, np.cumsum(lengths))
    index = np.repeat(begins[order] - offsets[:-1], lengths) + np.arange(offsets[-1])
    device = batch.tokens.device
    tokens = batch.tokens.index_select(0, _moved(index, device))
    on_host = {"lengths": torch.from_numpy(lengths), "rows": torch.from_numpy(text), "num_real": len(text)}
    windows = replace(
        batch, tokens=tokens, offsets=_moved(offsets, device), **on_host, targets=None, target_offsets=None
    )
    return windows, _moved(text, device)


def answer_texts(answers_WC: Tensor, text_W: Tensor, num_texts: int, how: Windows) -> Tensor:
    """`[B, C]`: the mean of each text's windows, or the largest answer of each output."""
    answers_WC = answers_WC.float()
    found = torch.zeros(num_texts, answers_WC.shape[1], device=answers_WC.device)
    if how is Windows.max:
        places = text_W.unsqueeze(1).expand_as(answers_WC)
        return found.scatter_reduce(0, places, answers_WC, "amax", include_self=False)
    counts = torch.zeros(num_texts, device=answers_WC.device).index_add(0, text_W, torch.ones_like(answers_WC[:, 0]))
    return found.index_add(0, text_W, answers_WC) / counts.unsqueeze(1)


def _moved(values: NDArray[np.int64], device: torch.device) -> Tensor:
    """Numbers of the host on a device, without a wait."""
    found = torch.from_numpy(values)
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)
