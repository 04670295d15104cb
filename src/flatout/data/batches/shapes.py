"""Batches in few shapes, so that a captured step serves many of them.

A captured step (`engine/step_graph.py`) reads its batch from fixed addresses and has a fixed shape.
`Shapes` chooses at most eight shapes from the plan of a training, where they add the least padding,
and copies batches into buffers of these shapes. What is added changes no loss: flat batches get
filler rows behind their own, padded ones a longer rectangle, whose end is masked. Open this file to
change how much padding captured steps cost, or which batches they can take.

    a flat batch of 3 rows and 7 tokens, in a shape of 12 tokens and 2 filler rows
    offsets   0 1 3 7        ->   0 1 3 7 9 12
    tokens    a b b c c c c  ->   a b b c c c c | x x x x x

Shapes: T tokens, B rows, F filler rows.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.data.batches.flat_batch import FlatBatch, rows_on_device
from flatout.data.batches.kept_tensors import on_device
from flatout.data.problem import NO_TAG

if TYPE_CHECKING:
    from flatout.data.batches.feed import Feed

MOST_SHAPES = 8
"""Each graph costs a capture, and memory for its list of kernels."""
_PLANNED = 4096  # batches of the first epoch whose sizes decide
_TOKENS_APART = 8  # sizes of flat batches are multiples of it, as tensor cores like them
_ROOM = 1.03  # how much larger than the first epoch's largest batch a later one may be


class Shape(NamedTuple):
    """The shape of a buffer that holds a batch."""

    rows: int  # rows of the batch, fillers not counted
    tokens: int  # of the buffer
    longest: int  # no row is longer
    is_even: bool  # whether all rows have exactly this length
    labels: int  # of the buffer; 0: batches have none

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens"


class Shapes:
    """The shapes that batches of one training are brought to."""

    plain_first = 1  # batches of a shape that train plainly before its step is captured
    most = 16  # shapes, also by the number of labels; batches of rarer ones are plain

    def __init__(
        self,
        rows: int,
        sizes: list[int],
        longest: int,
        *,
        is_padded: bool,
        is_even: bool,
        tags: bool = False,
        reads_rows: bool = False,
        fillers_count: bool = False,
    ) -> None:
        """`sizes`: of flat batches their tokens, of padded ones their longest row.

        `longest`: the longest row of the data. `is_even`: whether all its rows are as long. `tags`:
        whether labels are those of tokens. `reads_rows`: whether steps read the rows' numbers.
        `fillers_count`: whether filler rows are answered like others, as the loss leaves out what
        has no label.
        """
        self.tags = tags
        self.reads_rows = reads_rows
        self.fillers_count = fillers_count
        # labels of recordings say which samples were measured: 0, none
        self.unlabelled = NO_TAG if fillers_count else 0
        self.rows = rows
        self.is_padded = is_padded
        self.longest = longest
        self.is_even = is_even
        self.fillers = 0
        self.sizes = sizes
        if not (is_padded or is_even):
            self.fillers, self.sizes = _make_room(sizes, longest)

    @classmethod
    def planned(
        cls,
        feed: Feed,
        *,
        is_padded: bool,
        tags: bool = False,
        reads_rows: bool = False,
        fillers_count: bool = False,
    ) -> Shapes:
        """The best shapes for the batches that a feed has planned."""
        rows, tokens, longest = feed.planned_sizes(_PLANNED)
        usual_rows = int(np.bincount(rows).argmax())
        usual = rows == usual_rows
        of_all = feed.split.lengths("tokens")
        is_even = bool(of_all.min() == of_all.max())
        needs = longest[usual] if is_padded or is_even else _rounded(tokens[usual])
        # flat batches get one size more, see `_make_room`
        sizes = choose_sizes(needs, MOST_SHAPES if is_padded else MOST_SHAPES - 1)
        longest_of_all = int(of_all.max())
        return cls(
            usual_rows,
            sizes,
            longest_of_all,
            is_padded=is_padded,
            is_even=is_even,
            tags=tags,
            reads_rows=reads_rows,
            fillers_count=fillers_count,
        )

    @property
    def steps_read_more(self) -> str:
        """What a step reads beside tokens, offsets and targets; empty if nothing."""
        return "the numbers of its rows" if self.reads_rows else ""

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest buffer."""
        if self.is_even:
            return self.rows * self.longest
        return self.rows * self.sizes[-1] + 1 if self.is_padded else self.sizes[-1]

    @property
    def token_counts(self) -> list[int]:
        """Tokens of the buffers of flat batches, ascending."""
        return [self.most_tokens] if self.is_even else self.sizes

    def shape_of(self, batch: FlatBatch) -> Shape | str:
        """The shape for a batch, or in words why there is none."""
        if batch.num_rows != self.rows or batch.num_real != self.rows:
            return "of other rows"
        if batch.places is not None or batch.states is not None:
            return "whose parts vary in size"
        if self.is_even:
            return self._shape(batch, batch.num_tokens, self.longest)
        needed = batch.longest() if self.is_padded else batch.num_tokens + self.fillers
        if needed > self.sizes[-1]:
            return "with more tokens than planned"
        size = self.sizes[bisect_left(self.sizes, needed)]
        if self.is_padded:
            # A place more than the rectangle: `FlatBatch.padded` takes a view of a full one.
            return self._shape(batch, self.rows * size + 1, size)
        if size - batch.num_tokens > self.fillers * self.longest:
            return "with fewer tokens than planned"
        return self._shape(batch, size, self.longest)

    def _shape(self, batch: FlatBatch, tokens: int, longest: int) -> Shape:
        """The shape with so many tokens, and with room for the labels of a batch."""
        labels = 0 if batch.targets is None else batch.targets.shape[0]
        if labels and self.tags:
            labels = tokens
        elif batch.target_offsets is not None:
            labels = _round_up_by_eighths(labels)
        return Shape(self.rows, tokens, longest, self.is_even, labels)

    def make(self, shape: Shape, batch: FlatBatch) -> FlatBatch:
        """A buffer of a shape, filled with a batch."""
        rows = shape.rows + self.fillers
        lengths = self._host_lengths(shape, rows)
        tokens = batch.tokens[:1].expand(shape.tokens, *batch.tokens.shape[1:]).clone()
        device = tokens.device
        labels: Tensor | None = None
        if batch.targets is not None:
            labels = batch.targets.new_zeros(shape.labels, *batch.targets.shape[1:])
        buffer = replace(
            batch,
            tokens=tokens,
            offsets=torch.zeros(rows + 1, dtype=torch.int64, device=device),
            lengths=lengths,
            rows=torch.zeros(rows, dtype=torch.int64, device=device if self.reads_rows else None),
            targets=labels,
            step_rows=torch.zeros((), device=device),
        )
        buffer.longest_row = shape.longest
        if self.fillers_count:
            buffer.num_real = rows
        if self.tags:
            buffer.target_offsets = None
        elif batch.target_offsets is not None:
            buffer.target_offsets = batch.target_offsets.clone()
        return self.fill(buffer, batch)

    def fill(self, buffer: FlatBatch, batch: FlatBatch) -> FlatBatch:
        """Copy a batch into a buffer of its shape, which is returned; nothing waits."""
        # Behind the batch's own tokens stand those of earlier batches. Any will do: fillers count
        # nothing.
        buffer.tokens[: batch.num_tokens].copy_(batch.tokens)
        if self.fillers:
            offsets = self.offsets_of(batch.lengths.numpy()[None], np.array([buffer.num_tokens]))
            buffer.offsets.copy_(on_device(offsets[0], buffer.offsets.device))
        else:
            buffer.offsets.copy_(batch.offsets)
        if self.reads_rows:
            buffer.rows[: batch.num_rows].copy_(rows_on_device(batch))
        _fill_labels(buffer, batch, self.unlabelled)
        assert isinstance(buffer.step_rows, Tensor)
        buffer.step_rows.fill_(batch.step_rows)
        buffer.copied_from = batch
        return buffer

    def release(self, buffer: FlatBatch) -> None:
        """Let a buffer forget its batch: a slice of many, which it would keep in memory."""
        buffer.copied_from = None

    def count_tokens(
        self, shapes: Sequence[Shape], batches: Sequence[FlatBatch]
    ) -> tuple[int, int]:
        """Tokens of some batches, and those that steps of their shapes compute."""
        tokens = sum([batch.num_tokens for batch in batches])
        if self.is_padded and not self.is_even:
            return tokens, sum([shape.rows * shape.longest for shape in shapes])
        return tokens, sum([shape.tokens for shape in shapes])

    def _host_lengths(self, shape: Shape, rows: int) -> Tensor:
        """Stand-in lengths for the host, the same for all batches of a shape.

        Models read their largest and their sum, and whether they differ. So they are as even as
        they can be with one row as long as the longest: 12 tokens, 4 rows, longest 6 -> 2 2 2 6.
        """
        others = max(0, shape.tokens - shape.longest)
        begins = np.arange(rows) * others // max(1, rows - 1)
        lengths = np.append(np.diff(begins), shape.longest)
        if not shape.is_even and self.is_padded:
            # a full rectangle would look even
            lengths[0] = min(lengths[0], shape.longest - 1)
        return torch.from_numpy(lengths)

    def offsets_of(
        self, lengths_KB: NDArray[np.int64], sizes_K: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Where rows begin in K buffers of these sizes, filler rows among them.

        Fillers hold what is missing as evenly as they can: 7 tokens in 3 rows are rows of 2, 2 and
        3 tokens, which end at 2, 4, 7.
        """
        count = len(lengths_KB)
        begins = np.zeros((count, 1), np.int64)
        ends = lengths_KB.cumsum(axis=1)
        if not self.fillers:
            return np.concatenate((begins, ends), axis=1)
        tokens = ends[:, -1:]
        numbers = np.arange(1, self.fillers + 1, dtype=np.int64)
        missing = sizes_K[:, None] - tokens
        return np.concatenate((begins, ends, tokens + numbers * missing // self.fillers), axis=1)


def _fill_labels(buffer: FlatBatch, batch: FlatBatch, unlabelled: int) -> None:
    """Copy the labels of a batch; behind them stand labels that count nothing."""
    if buffer.targets is None or batch.targets is None:
        return
    count = len(batch.targets)
    buffer.targets[:count].copy_(batch.targets)
    if buffer.target_offsets is not None and batch.target_offsets is not None:
        # The last row takes all ids behind its own, which are beyond the classes.
        buffer.targets[count:].fill_(torch.iinfo(buffer.targets.dtype).max)
        buffer.target_offsets[:-1].copy_(batch.target_offsets[:-1])
        buffer.target_offsets[-1:].fill_(len(buffer.targets))
    elif count < len(buffer.targets):
        buffer.targets[count:].fill_(unlabelled)


def _round_up_by_eighths(count: int) -> int:
    """To the next of eight sizes between two powers of two: 33 to 36, 1,000 to 1,024."""
    step = max(8, (1 << count.bit_length()) >> 4)
    return -(-count // step) * step


def choose_sizes(needs: NDArray[np.integer], most: int) -> list[int]:
    """At most so many sizes, ascending, that pad these needs the least; the last is the largest.

    Each need gets the next size above it. Needs 3, 3, 4, 9, 10 and two sizes give 4 and 10.
    """
    values, counts = np.unique(needs, return_counts=True)
    # All needs from value `first` to value `last` in a size of the last cost
    #     last * (their number) - (their sum).
    numbers = np.append(0, np.cumsum(counts))
    sums = np.append(0, np.cumsum(counts * values))
    # Least padding of the first 0, 1, 2, ... values in as many sizes as were chosen so far.
    cheapest = np.full(len(values) + 1, np.inf)
    cheapest[0] = 0.0
    begins = list[NDArray[np.int64]]()
    for _ in range(min(most, len(values))):
        begin = np.zeros(len(values) + 1, np.int64)
        cost = np.full(len(values) + 1, np.inf)
        for last, value in enumerate(values, 1):
            padding = value * (numbers[last] - numbers[:last]) - (sums[last] - sums[:last])
            total = cheapest[:last] + padding
            begin[last] = int(total.argmin())
            cost[last] = total[begin[last]]
        cheapest = cost
        begins.append(begin)
    sizes = list[int]()
    last = len(values)
    for begin in reversed(begins):
        if last == 0:
            break
        sizes.append(int(values[last - 1]))
        last = int(begin[last])
    return sizes[::-1]


def _rounded(tokens: NDArray[np.integer]) -> NDArray[np.integer]:
    return -(-tokens // _TOKENS_APART) * _TOKENS_APART


def _make_room(sizes: list[int], longest: int) -> tuple[int, list[int]]:
    """How many filler rows hold what is missing to the next size, and sizes with room for them.

    Each filler row has a token at least and `longest` tokens at most. One size more serves batches
    of later epochs that are larger than all of the first.
    """
    sizes = [*sizes, int(sizes[-1] * _ROOM) + 1]
    for fillers in itertools.count(1):
        with_fillers = _rounded(np.array(sizes) + fillers)
        # the smallest batch of a size has a token more than the size before it
        gaps = with_fillers[1:] - np.array(sizes[:-1])
        # below the first size: batches that are smaller by a quarter, too
        widest = max(int(gaps.max()), int(with_fillers[0]) - sizes[0] * 3 // 4)
        if widest <= fillers * longest:
            return fillers, with_fillers.tolist()
    raise AssertionError("unreachable")
