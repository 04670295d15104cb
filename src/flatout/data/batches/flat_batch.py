"""The flat batch: rows of unequal length as one run of tokens plus offsets.

Nothing is padded on disk, in memory or on the bus. A model that needs a rectangle asks for one with
`padded`. It is made on the device, from lengths that the host knows already, so no shape waits for
the device. Open this file to see what a model receives, and how a batch is cut into micro-batches.

Shapes: T tokens of the whole batch, B rows, L longest row, C classes. Three rows of 1, 2 and 3
tokens:

    tokens  [a b b c c c]    offsets [0 1 3 6]    lengths [1 2 3]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.data.batches.kept_tensors import count_up, on_device, shifts_of_bits

DEVICE_FIELDS = ("tokens", "offsets", "targets", "target_offsets", "places", "states")


@dataclass(slots=True, kw_only=True)
class FlatBatch:
    """The rows of one micro-batch, shortest first. Filler rows come last; no loss or metric may
    count them.
    """

    tokens: Tensor
    """[T] int32, every row's tokens one after the other; bytes of packed bits (uint8) where rows
    are bit strings."""
    offsets: Tensor  # [B+1] int64, where each row begins; on the tokens' device
    # [B] int64, always on the host: shapes are decided from it without asking the device
    lengths: Tensor
    rows: Tensor
    """[B] int64 on the host, the rows' numbers in their split; on the device in the buffer of a
    captured step that reads them."""
    targets: Tensor | None = None
    """[B] class ids or values; for several labels a row their ids one after the other; None when
    predicting."""
    # [B+1] int64, where each row's labels begin; only for several labels a row
    target_offsets: Tensor | None = None
    places: Tensor | None = None
    """[K] int64, the tokens that are read after an encoder's last layer; None: its head decides."""
    states: Tensor | None = None
    """[T, H], or [B, H] where only first tokens are read: outputs of frozen layers for these rows,
    from a store."""
    texts: Tensor | None = None
    """[B] int64, in the buffer of a captured step whose rows are windows: the text of each. Rows
    that are no windows are of a text behind all others."""
    num_real: int  # rows that count; any after them only keep a rank in step
    step_rows: int | Tensor
    """Real rows of the whole optimizer step, over all ranks and micro-batches: the loss is divided
    by it. On the device in the buffer of a captured step."""
    ends_step: bool = True  # whether the optimizer steps after this micro-batch
    cut_from: tuple[int, int] | None = None
    """For a piece of a batch: the real rows before it, and those of the whole batch."""
    copied_from: FlatBatch | None = field(default=None, repr=False, compare=False)
    """The batch that was copied into this buffer of fixed shape: pieces are cut from it."""
    longest_row: int = field(default=-1, init=False, repr=False, compare=False)
    """Length of the longest row; -1 until it is known. Reading it off `lengths` costs
    microseconds."""

    @property
    def num_rows(self) -> int:
        return self.lengths.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]

    @property
    def is_buffer(self) -> bool:
        """Whether this is the buffer of a captured step: the host knows only its shape."""
        return isinstance(self.step_rows, Tensor)

    def longest(self, multiple: int = 1) -> int:
        """Length of the longest row, rounded up to a multiple."""
        # Rows are sorted, so it is the last one.
        if self.longest_row < 0:
            self.longest_row = int(self.lengths[-1]) if self.num_rows else 0
        return -(-self.longest_row // multiple) * multiple

    def padded(self, multiple: int = 1, fill: int = 0) -> tuple[Tensor, Tensor]:
        """The batch as `[B, L]` tokens and `[B]` lengths, on the device of the tokens.

        Rows of one length are a view. Else `fill` stands behind shorter rows.
        """
        longest = self.longest(multiple)
        starts_B = self.offsets[:-1]
        lengths_B = self.offsets[1:] - starts_B
        if longest * self.num_rows == self.num_tokens:
            return self.tokens.view(self.num_rows, longest), lengths_B
        # Every row takes `longest` tokens from where it begins; those behind its end belong to the
        # next rows and are masked. Behind the last row the last token is taken again.
        places_L = count_up(longest, self.tokens.device)
        tokens_BL = self.tokens[(starts_B.unsqueeze(1) + places_L).clamp_max_(self.num_tokens - 1)]
        return tokens_BL.masked_fill_(places_L >= lengths_B.unsqueeze(1), fill), lengths_B

    def bits(self, dtype: torch.dtype) -> Tensor:
        """Packed rows as `[B, bits]` zeros and ones, unpacked on the device.

        The highest bit of a byte comes first: 5 → 0 0 0 0 0 1 0 1.
        """
        shifts = shifts_of_bits(self.tokens.device)
        bytes_BW1 = self.tokens.view(self.num_rows, -1, 1)
        bits_BW8 = bytes_BW1.bitwise_right_shift(shifts).bitwise_and_(1)
        return bits_BW8.view(self.num_rows, -1).to(dtype)

    def multi_hot(self, num_classes: int) -> Tensor:
        """Ragged label ids as `[B, C]` zeros and ones (see the function `multi_hot`)."""
        if self.targets is None or self.target_offsets is None:
            raise ValueError("this batch carries no ragged labels")
        return multi_hot(self.targets, self.target_offsets, num_classes)

    def to(self, device: torch.device, *, non_blocking: bool = True) -> FlatBatch:
        """The batch on `device`; what belongs to the host stays there."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> FlatBatch:
        """The batch in page-locked memory, so that its copy to a device need not wait."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: Callable[[Tensor], Tensor]) -> FlatBatch:
        moved: dict[str, Any] = {}
        for name in DEVICE_FIELDS:
            tensor = getattr(self, name)
            if tensor is not None:
                moved[name] = function(tensor)
        return replace(self, **moved)


def rows_on_device(batch: FlatBatch) -> Tensor:
    """`[B]` the numbers of a batch's rows, where its tokens lie."""
    rows_B = batch.rows
    return on_device(rows_B, batch.tokens.device) if rows_B.device.type == "cpu" else rows_B


def multi_hot(ids: Tensor, offsets: Tensor, num_classes: int) -> Tensor:
    """Ragged ids as `[B, C]` zeros and ones; ids beyond the classes are left out.

    Ids [0 2, 1] with offsets [0, 2, 3] and three classes → [[1 0 1], [0 1 0]].
    """
    return multi_hot_of_counts(ids, offsets[1:] - offsets[:-1], num_classes)


def multi_hot_of_counts(ids: Tensor, counts_B: Tensor, num_classes: int) -> Tensor:
    """The same, with the number of ids of each row."""
    row_of_id = torch.repeat_interleave(counts_B, output_size=ids.shape[0])
    size = len(counts_B) * num_classes
    places = torch.add(ids, row_of_id, alpha=num_classes)
    hot = torch.zeros(size + 1, device=ids.device)  # the last place takes what is left out
    hot.index_fill_(0, places.masked_fill_(ids >= num_classes, size), 1.0)
    return hot[:size].view(-1, num_classes)


def flat_batch(
    token_rows: list[list[int]] | list[Tensor], targets: Tensor | None = None
) -> FlatBatch:
    """Make a batch of rows of token ids: for prediction on a few rows, and for tests."""
    lengths = torch.tensor([len(row) for row in token_rows], dtype=torch.int64)
    order = torch.argsort(lengths, stable=True)
    rows = [torch.as_tensor(token_rows[int(i)], dtype=torch.int32) for i in order]
    return FlatBatch(
        tokens=torch.cat(rows),
        offsets=torch.nn.functional.pad(lengths[order].cumsum(0), (1, 0)),
        lengths=lengths[order],
        rows=order,
        targets=None if targets is None else targets[order],
        num_real=len(rows),
        step_rows=len(rows),
    )


def cut_batch(
    batch: FlatBatch, count: int, *, labels_are_of_tokens: bool = False
) -> list[FlatBatch]:
    """Cut a batch into at most `count` pieces of about as many tokens, each with at least one row.

    Filler rows are left out, unless there are no others. `labels_are_of_tokens`: targets are
    labels of tokens, not of rows.
    """
    # What is added up over the rows of a step (losses, gradients, counts) is the same over the
    # pieces as over the whole batch: each piece still says how many rows the step has. Nothing is
    # copied but offsets and the ids of several labels a row, and nothing waits for the device.
    if count <= 1 or batch.num_real <= 1:
        return [batch]
    batch = batch.copied_from or batch
    edges = piece_edges(batch.lengths[: batch.num_real].numpy(), min(count, batch.num_real))
    return [
        _piece(batch, start, stop, labels_are_of_tokens)
        for start, stop in itertools.pairwise(edges)
    ]


def rows_of_one_length(batch: FlatBatch) -> list[FlatBatch]:
    """Cut a batch where the length of its rows changes, so that no piece needs padding.

    Pieces have no labels.
    """
    edges = np.flatnonzero(np.diff(batch.lengths.numpy(), prepend=-1, append=-1)).tolist()
    unlabelled = replace(batch, targets=None, target_offsets=None)
    return [_piece(unlabelled, start, stop, False) for start, stop in itertools.pairwise(edges)]


def piece_edges(lengths: NDArray[np.integer], count: int) -> list[int]:
    """Where to cut rows into `count` pieces of about as many tokens, each with at least one row.

    Lengths [1, 1, 2, 4] in two pieces → [0, 3, 4].
    """
    ends = np.cumsum(lengths)
    number = np.arange(1, count)
    # Cut n falls behind the row that reaches n shares of the tokens. Less n, cuts may be equal and
    # must only not fall; with n added again, each piece has a row.
    inner = np.searchsorted(ends, ends[-1] * number / count) + 1 - number
    inner = np.clip(np.maximum.accumulate(inner), 0, len(lengths) - count) + number
    return [0, *inner.tolist(), len(lengths)]


def _piece(batch: FlatBatch, start: int, stop: int, labels_are_of_tokens: bool) -> FlatBatch:
    """Rows `start` to `stop` of a batch."""
    first_token = int(batch.lengths[:start].sum())
    tokens = slice(first_token, int(batch.lengths[:stop].sum()))
    targets = batch.targets
    target_offsets = batch.target_offsets
    if targets is not None and labels_are_of_tokens:
        targets = targets[tokens]
        if target_offsets is not None:
            target_offsets = target_offsets[start : stop + 1] - first_token
    elif targets is not None and target_offsets is not None:
        targets, target_offsets = _cut_ragged_labels(targets, target_offsets[start : stop + 1])
    elif targets is not None:
        targets = targets[start:stop]
    states = batch.states
    if states is not None:
        states = states[tokens] if len(states) == batch.num_tokens else states[start:stop]
    return FlatBatch(
        tokens=batch.tokens[tokens],
        offsets=batch.offsets[start : stop + 1] - first_token,
        lengths=batch.lengths[start:stop],
        rows=batch.rows[start:stop],
        targets=targets,
        target_offsets=target_offsets,
        states=states,
        num_real=stop - start,
        step_rows=batch.step_rows,
        ends_step=batch.ends_step and stop == batch.num_real,
        cut_from=(start, batch.num_real),
    )


def _cut_ragged_labels(ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Ragged labels of a piece: all ids of the batch, those of other pieces without a class.

    `ids`: of the whole batch; `offsets`: of the rows of the piece.
    """
    # Where the labels of the piece begin is known to the device alone, and slicing by it would
    # wait for the device. So the first row of the piece also takes the ids before it, and the last
    # row those behind it, all replaced by an id beyond the classes, which `multi_hot` leaves out.
    places = torch.arange(len(ids), device=ids.device)
    is_other = (places < offsets[0]) | (places >= offsets[-1])
    offsets = offsets.clone()
    offsets[:1].zero_()
    offsets[-1:].fill_(len(ids))
    return ids.masked_fill(is_other, torch.iinfo(torch.int32).max), offsets
