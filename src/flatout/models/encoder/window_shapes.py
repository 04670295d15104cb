"""Texts in windows, in few shapes: the rows of a captured step's buffer are windows.

Texts of one batch have more windows than those of another. A buffer has as many rows as the most
that were planned, and what a batch lacks are rows of one token. Filler rows follow, as in
`shapes.py`. All rows that are no window belong to a text behind those of the batch.

    texts of 5 and 2 tokens, windows of 3, a buffer of 5 rows and 2 fillers
    tokens of rows    3 2 2 1 1, and fillers
    text of each      0 0 1 2 2, and 2 2

Shapes: W rows of a buffer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.kept_tensors import on_device
from flatout.data.batches.shapes import MOST_SHAPES, Shape, Shapes, choose_sizes
from flatout.models.encoder.windows import window_lengths

if TYPE_CHECKING:
    from flatout.data.batches.feed import Feed

_PLANNED = 4096  # batches of the first epoch whose sizes decide
_ROOM = 1.03  # how many more windows than the most of the first epoch a later batch may have
_TOKENS_APART = 8


class WindowShapes(Shapes):
    """The shapes that batches of texts in windows are brought to."""

    def __init__(
        self, texts: int, most_windows: int, sizes: list[int], window: int, *, tags: bool
    ) -> None:
        """`texts`: those of a batch; `sizes`: tokens of buffers; `window`: tokens of a window."""
        super().__init__(
            most_windows,
            sizes,
            window,
            is_padded=False,
            is_even=False,
            tags=tags,
            fillers_count=tags,
        )
        self.texts = texts
        self.window = window

    @classmethod
    def planned_windows(cls, feed: Feed, window: int, *, tags: bool) -> WindowShapes:
        """The best shapes for the batches that a feed has planned."""
        lengths, bounds = feed.planned_lengths(_PLANNED)
        begins = bounds[:-1]
        texts = np.diff(bounds)
        usual_texts = int(np.bincount(texts).argmax())
        is_usual = texts == usual_texts
        windows = np.add.reduceat(-(-lengths // window), begins)[is_usual]
        tokens = np.add.reduceat(lengths, begins)[is_usual]
        most_windows = int(windows.max())
        if most_windows > usual_texts:
            most_windows = int(most_windows * _ROOM) + 1
        needs = tokens + most_windows - windows
        sizes = choose_sizes(needs + -needs % _TOKENS_APART, MOST_SHAPES - 1)
        longest = min(window, int(feed.split.lengths("tokens").max()))
        return cls(usual_texts, most_windows, sizes, longest, tags=tags)

    @property
    def steps_read_more(self) -> str:
        return "where texts are cut"

    def shape_of(self, batch: FlatBatch) -> Shape | str:
        if batch.num_rows != self.texts or batch.num_real != self.texts:
            return "of other rows"
        lengths, _ = window_lengths(batch.lengths.numpy(), self.window)
        missing = self.rows - len(lengths)
        if missing < 0:
            return "with more windows than planned"
        # a view of as many tokens as the batch has with its windows of one token
        tokens = batch.tokens[:1].expand(batch.num_tokens + missing)
        counted = replace(batch, tokens=tokens, lengths=torch.ones(self.rows), num_real=self.rows)
        return super().shape_of(counted)

    def make(self, shape: Shape, batch: FlatBatch) -> FlatBatch:
        buffer = super().make(shape, self._cut(batch))
        buffer.copied_from = batch
        return buffer

    def fill(self, buffer: FlatBatch, batch: FlatBatch) -> FlatBatch:
        windows = self._cut(batch) if batch.texts is None else batch
        super().fill(buffer, windows)
        assert buffer.texts is not None
        assert windows.texts is not None
        buffer.texts.copy_(windows.texts)
        buffer.copied_from = batch
        return buffer

    def _cut(self, batch: FlatBatch) -> FlatBatch:
        """A batch whose rows are its windows, and others of one token."""
        lengths, texts = window_lengths(batch.lengths.numpy(), self.window)
        missing = self.rows - len(lengths)
        lengths_W = np.append(lengths, np.ones(missing, np.int64))
        of_none = np.full(missing + self.fillers, self.texts)
        return replace(
            batch,
            tokens=torch.cat((batch.tokens, batch.tokens[:1].expand(missing))),
            lengths=torch.from_numpy(lengths_W),
            texts=on_device(np.append(texts, of_none), batch.tokens.device),
        )
