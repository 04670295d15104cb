"""Which tokens of a batch are masked: a pure function of a seed, the epoch and the row.

Each row gives the same share of its tokens, rounded, and one at least. Which ones is decided by a hash of seed, epoch,
row number and place. So a row is masked alike in any batch, on any device, in any piece of a batch and in a resumed
run, and otherwise in each epoch. How many tokens are masked follows from the lengths, which the host knows: nothing
waits for the device.

Of the masked tokens most become the mask token, some a random one, the others stay (BERT: 80, 10 and 10 %).

Shapes: T tokens, B rows, K masked tokens, V words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.gather import on_device

NO_TARGET = -100
"""The target of a place that counts in no loss."""
_BITS = 0xFFFFFFFF
_FACTOR = 0x45D9F3B
_KIND, _WORD = 0x1B873593, 0x19D699A5
"""What sets the draws of one token apart."""


@dataclass(frozen=True, slots=True)
class Masking:
    """How tokens are masked."""

    share: float
    """Fraction of the tokens of a row."""
    masked: float
    """Fraction of these that become the mask token."""
    random: float
    """Fraction of these that become a random token."""
    mask_id: int
    vocabulary_size: int
    frame: int
    """Tokens that are put around the text of a row."""

    def counts(self, lengths: NDArray[np.integer]) -> NDArray[np.int64]:
        """How many tokens are masked in rows of these lengths."""
        words = np.maximum(lengths.astype(np.int64) - self.frame, 0)
        return np.minimum(words, np.maximum(1, np.rint(self.share * words).astype(np.int64)))

    def mask(self, batch: FlatBatch, is_special_V: Tensor, *, seed: int, epoch: int) -> FlatBatch:
        """The batch with tokens masked, and with places and targets `[K]`; special tokens stay, without a target."""
        chosen_K = self._places_in_order(batch)
        device, starts_B = batch.tokens.device, batch.offsets[:-1]
        lengths_B, rows_B = batch.offsets[1:] - starts_B, torch.arange(batch.num_rows, device=device)
        row_of_T = torch.repeat_interleave(rows_B, lengths_B, output_size=batch.num_tokens)
        place_T = torch.arange(batch.num_tokens, device=device) - starts_B[row_of_T]
        start = _mix_number(_mix_number(seed & _BITS) + epoch)
        numbers_B = _mix(on_device(batch.rows.numpy(), device) ^ start)
        draws_T = _mix(numbers_B[row_of_T] + place_T)
        is_special_T = is_special_V[batch.tokens]
        order_T = torch.argsort((row_of_T << 33) | (is_special_T.long() << 32) | draws_T)
        places_K = order_T[on_device(chosen_K, device)]
        tokens_K, is_special_K = batch.tokens[places_K], is_special_T[places_K]
        tokens_T = batch.tokens.clone()
        tokens_T[places_K] = torch.where(is_special_K, tokens_K, self._replacements(tokens_K, draws_T[places_K]))
        targets_K = tokens_K.long().masked_fill(
            is_special_K | (rows_B[row_of_T[places_K]] >= batch.num_real), NO_TARGET
        )
        return replace(batch, tokens=tokens_T, targets=targets_K, target_offsets=None, places=places_K)

    def _places_in_order(self, batch: FlatBatch) -> NDArray[np.int64]:
        """`[K]` for rows whose tokens lie in the order of their draws: the first few of each; one at least."""
        lengths = batch.lengths.numpy()
        counts = self.counts(lengths)
        counts[batch.num_real :] = 0
        if not counts.any():
            return np.zeros(1, np.int64)  # a special token, or of a row that does not count
        ends = np.cumsum(counts)
        starts = np.cumsum(lengths) - lengths
        found: NDArray[np.int64] = np.repeat(starts - ends + counts, counts) + np.arange(ends[-1])
        return found

    def _replacements(self, tokens_K: Tensor, draws_K: Tensor) -> Tensor:
        share_K = _mix(draws_K + _KIND).double() / (_BITS + 1)
        words_K = (_mix(draws_K + _WORD) % self.vocabulary_size).to(tokens_K.dtype)
        changed_K = torch.where(share_K < self.masked + self.random, words_K, tokens_K)
        return changed_K.masked_fill(share_K < self.masked, self.mask_id)


def _mix(values: Tensor) -> Tensor:
    """A hash of 32 bits; the product of 32 and 27 bits fits into int64 on every device."""
    values = values & _BITS
    for _ in range(2):
        values = ((values ^ (values >> 16)) * _FACTOR) & _BITS
    return values ^ (values >> 16)


def _mix_number(value: int) -> int:
    value &= _BITS
    for _ in range(2):
        value = ((value ^ (value >> 16)) * _FACTOR) & _BITS
    return value ^ (value >> 16)
