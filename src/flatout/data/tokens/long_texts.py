"""Texts longer than an encoder reads at once: cut, read from both ends, or read window by window.

A text in windows stays one row, so that plans, ranks, losses and metrics have it as one. Its
windows stand one after the other, each with its own special tokens. All but the last are full, so
the length of a row says where its windows begin. Open this file to change which tokens of a long
text are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flatout.data.ragged import Counts, numbers_in_row

# A quarter of the tokens that are read come from the beginning of the text, the rest from its end
# (Sun et al. 2019 read 128 and 382 of 510).
_HEAD_SHARE = 4
Long = StrEnum("Long", "cut head_tail windows")
"""What becomes of a text that is longer than `data.max_length`, or than a window."""


class TextPieces(NamedTuple):
    """Pieces of texts, such as windows, in the order of the texts."""

    starts: Counts  # the first token of each piece, counted from where its text begins
    sizes: Counts  # tokens of each piece
    text: Counts  # the number of the text that each piece is of


@dataclass(frozen=True, slots=True)
class LongTexts:
    """How long texts become rows."""

    kind: Long = Long.cut
    window: int = 0  # tokens of a window, special ones included; 0 where there are no windows
    overlap: int = 0  # tokens that a window shares with the one before it

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", Long(self.kind))  # a file holds its name

    def count_windows(self, lengths: NDArray[np.integer]) -> int:
        """Windows in all rows of these lengths, special tokens included."""
        if not self.window:
            return 0
        rounded_up = -(-lengths.astype(np.int64) // self.window)
        return int(rounded_up.sum())

    def pick(self, lengths: Counts, sizes_kept: Counts, frame: int) -> TextPieces:
        """The pieces of texts that are read.

        `lengths`: tokens of each text; `sizes_kept`: how many of them may stay; `frame`: special
        tokens around a window.
        """
        if self.kind is Long.windows:
            return self.cut_windows(sizes_kept, self.window - frame)
        # Two pieces a text. Of 10 tokens 8 are kept: the first 2, and 6 from the 4th on. A text
        # that fits is all head, and its second piece is empty.
        head = np.where(lengths > sizes_kept, sizes_kept // _HEAD_SHARE, sizes_kept)
        tail = sizes_kept - head
        starts = np.stack([np.zeros_like(head), lengths - tail], 1)
        sizes = np.stack([head, tail], 1)
        text = np.repeat(np.arange(len(lengths)), 2)
        return TextPieces(starts.ravel(), sizes.ravel(), text)

    def cut_windows(self, lengths: Counts, room: int) -> TextPieces:
        """The windows of texts of `lengths` tokens each; a window has room for `room` of them."""
        # Each window begins `step` tokens after the one before it. With room 4 and overlap 1, a
        # text of 8 tokens has three windows: 0 1 2 3, 3 4 5 6 and 6 7.
        step = room - self.overlap
        num_windows = 1 + np.maximum(0, -(-(lengths - room) // step))
        text = np.repeat(np.arange(len(lengths)), num_windows)
        starts = numbers_in_row(num_windows) * step
        return TextPieces(starts, np.minimum(room, lengths[text] - starts), text)

    def is_answered(self, windows: TextPieces) -> NDArray[np.bool_]:
        """For each token of windows, one after the other, whether the answer of this window counts.

        A token that two windows share is answered once, by the window that shows more on both
        sides of it.
        """
        # A window leaves the first half of what it shares to the window before it, and the last
        # half to the one after it. An overlap of 2 in windows 0 1 2 3, 2 3 4 5 → 0 1 2, 3 4 5.
        half = (self.overlap + 1) // 2
        sizes = windows.sizes
        is_new = windows.text[1:] != windows.text[:-1]
        is_first = np.append(True, is_new)[: len(sizes)]
        is_last = np.append(is_new, True)
        begins = np.where(is_first, 0, half)
        ends = np.where(is_last, sizes, sizes - self.overlap + half)
        number = numbers_in_row(sizes)
        return (number >= np.repeat(begins, sizes)) & (number < np.repeat(ends, sizes))


CUT = LongTexts()
