"""Texts longer than an encoder reads at once: cut, read from both ends, or read window by window.

A text in windows stays one row, so that plans, ranks, losses and metrics have it as one. Its
windows stand one after the other, each in its own frame. All but the last are whole, so a row's
length says where they begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

# a quarter of the kept tokens are the first ones (Sun et al. 2019 keep 128 and 382 of 510)
_HEAD_SHARE = 4
Counts = NDArray[np.int64]
Tokens = NDArray[np.int32]
Long = StrEnum("Long", "cut head_tail windows")
"""What becomes of a text that is longer than `data.max_length`, or than a window."""


@dataclass(frozen=True, slots=True)
class LongTexts:
    """How long texts become rows."""

    kind: Long = Long.cut
    window: int = 0  # tokens of a window with its frame; 0 where there are none
    overlap: int = 0  # tokens that a window shares with the one before it

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", Long(self.kind))  # as a file has it

    def windows_of(self, lengths: NDArray[np.integer]) -> int:
        """Windows in rows of these lengths."""
        return int((-(-lengths.astype(np.int64) // self.window)).sum()) if self.window else 0

    def pick(self, lengths: Counts, kept: Counts, frame: int) -> tuple[Counts, Counts, Counts]:
        """Which tokens of texts go into rows of which `kept` each stay: first token, number and
        text of each piece.
        """
        if self.kind is Long.windows:
            return self.windows(kept, self.window - frame)
        head = np.where(lengths > kept, kept // _HEAD_SHARE, kept)
        starts = np.stack([np.zeros_like(head), lengths - (kept - head)], 1)
        return (
            starts.ravel(),
            np.stack([head, kept - head], 1).ravel(),
            np.repeat(np.arange(len(lengths)), 2),
        )

    def windows(self, kept: Counts, room: int) -> tuple[Counts, Counts, Counts]:
        """The windows of texts, each of so much `room`: first token, number and text of each."""
        step = room - self.overlap
        counts = 1 + np.maximum(0, -(-(kept - room) // step))
        text = np.repeat(np.arange(len(kept)), counts)
        place = np.arange(len(text)) - np.repeat(np.cumsum(counts) - counts, counts)
        return place * step, np.minimum(room, kept[text] - place * step), text

    def answers_of(self, sizes: Counts, text: Counts) -> NDArray[np.bool_]:
        """Of each token of windows whether it is answered there: once, where it has most context
        around it.
        """
        half = (self.overlap + 1) // 2
        is_new = text[1:] != text[:-1]
        begins = np.where(np.append(True, is_new)[: len(text)], 0, half)
        ends = np.where(np.append(is_new, True), sizes, sizes - self.overlap + half)
        within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return (within >= np.repeat(begins, sizes)) & (within < np.repeat(ends, sizes))


CUT = LongTexts()


def pieces_of(
    tokens: Tokens, lengths: Counts, starts: Counts, sizes: Counts, text: Counts
) -> Tokens:
    """So many tokens from there on of each of these texts, one piece after the other."""
    begins = (np.cumsum(lengths) - lengths)[text] + starts
    return tokens[
        np.repeat(begins - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))
    ]
