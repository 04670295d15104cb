"""The rows of a flat batch gathered into rectangles: rows of nearly equal lengths, side by side.

A CPU multiplies rectangles. Rows come sorted by length, so a few rectangles hold them with little
padding. One more rectangle costs as much as `_CALL_SCORES` scores of padding, and `rectangle_edges`
cuts where that pays. A `RectangleLayout` also holds the indices that carry tokens to their places
in the rectangles and back. Open this file to change where rows are cut, or how they lie in memory;
`rectangle_attention.py` computes on them. `choose_kernel` in `network.py` decides whether
rectangles are used at all.

    rows of lengths 2, 3, 3, 40, tokens 0 to 47
    rectangles    [[0, 1, 0], [2, 3, 4], [5, 6, 7]] and [[8, ... 47]]; the third place of row 0 is
                  padding, and repeats the row's first token
    tokens  [P]   0 1 0 2 3 4 5 6 7 8 ... 47     the token at each place
    places  [T]   0 1 3 4 5 6 7 8 9 ... 48       the place of each token

Shapes: T tokens, H heads, D numbers a head; N rows of a rectangle, L its longest row, P places of
all rectangles.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Index = NDArray[np.int64]

# Tokens. A row as long as this, or longer, is worth a call by itself, and one of the fused kernel
# (`Rectangle.is_long`).
_LONG = 160
# Scores of padding that cost as much as one more rectangle: where it was measured, both took about
# 60 µs a layer.
_CALL_SCORES = 1300


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Consecutive rows of nearly equal lengths."""

    rows: int
    length: int  # tokens of its longest row
    first_row: int
    first_place: int  # the number of places of the rectangles before it
    is_long: bool  # whether its rows are long enough for the fused kernel
    # `[N, 1, 1, L]` zero on tokens and -inf on padding; None where rows are equally long
    bias: Tensor | None = None
    padding: Tensor | None = None  # `[N, 1, L, 1]` True where a place is no token

    @property
    def places(self) -> int:
        return self.rows * self.length


@dataclass(slots=True)
class RectangleLayout:
    """The rows of a batch as rectangles."""

    rectangles: list[Rectangle]
    tokens: Tensor  # [P] the token at each place of the rectangles
    places: Tensor  # [T] the place of each token
    _indices: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def indices_by_head(self, heads: int, parts: int) -> tuple[Tensor, Tensor]:
        """Indices that carry vectors of tokens into rectangles, and back.

        The first gathers `[parts, P*H]` vectors, rectangle after rectangle `[N, H, L]`, from the
        flattened `[T, parts, H]`. The second gathers `[T, parts, H]` from these. `parts` is 3 for
        queries, keys and values side by side, 2 for keys and values, 1 for one of them.
        """
        key = (heads, parts)
        if key not in self._indices:
            index = self._index_one(heads) if parts == 1 else self._index_several(heads, parts)
            into, back = index
            self._indices[key] = (torch.from_numpy(into), torch.from_numpy(back))
        return self._indices[key]

    def _index_one(self, heads: int) -> tuple[Index, Index]:
        """The indices for one part; a vector's number is token * heads + head.

        One rectangle of one row, tokens 0 and 1, two heads: the vectors 0 1 2 3 are (token 0, head
        0), (0, 1), (1, 0), (1, 1). In the rectangle heads come first: `into` is 0 2 1 3, and so is
        `back`.
        """
        head = np.arange(heads)
        tokens = self.tokens.numpy()
        into = np.empty(len(tokens) * heads, np.int64)
        # where the vector of each place and head lies: `[P*H]` in the order of places
        lies_at = np.empty(len(tokens) * heads, np.int64)
        for rectangle in self.rectangles:
            end = rectangle.first_place + rectangle.places
            vectors = slice(rectangle.first_place * heads, end * heads)
            # With heads outside of lengths, bmm reads `[N*H, L, D]` without a copy.
            own_tokens = tokens[rectangle.first_place : end]
            token_N1L = own_tokens.reshape(rectangle.rows, 1, rectangle.length)
            into[vectors] = (token_N1L * heads + head[:, None]).ravel()
            # Numbered in the order `[N, H, L]` in which they lie, read off in the order `[N, L, H]`
            # of tokens.
            numbers = vectors.start + np.arange(rectangle.places * heads)
            numbers_NHL = numbers.reshape(rectangle.rows, heads, rectangle.length)
            lies_at[vectors] = numbers_NHL.transpose(0, 2, 1).ravel()
        # Places of padding are left out on the way back: nothing reads their answers.
        back = lies_at.reshape(-1, heads)[self.places.numpy()].ravel()
        return into, back

    def _index_several(self, heads: int, parts: int) -> tuple[Index, Index]:
        """The indices for several parts, made from those for one."""
        into, back = (index.numpy() for index in self.indices_by_head(heads, 1))
        token, head = np.divmod(into, heads)
        part = np.arange(parts)[:, None]
        # In a token the parts stand side by side; bmm reads them one after the other.
        into_several = token * (parts * heads) + part * heads + head
        back_several = back.reshape(-1, 1, heads) + part * len(into)
        return into_several.ravel(), back_several.ravel()


def rectangle_edges(lengths: NDArray[np.integer]) -> list[int]:
    """Where to cut rows into rectangles; the last row of each rectangle is its longest.

    `lengths [2, 3, 3, 9]` gives `[0, 4]`, as 2 * 72 + 77 scores of padding cost less than a call.
    With 40 instead of 9 it gives `[0, 3, 4]`. Rows in order of length need the fewest rectangles;
    there is at least one row.
    """
    edges = [len(lengths)]
    longest = int(lengths[-1])
    wasted = 0  # scores of padding in the rectangle that grows downwards from `longest`
    for row in range(len(lengths) - 1, -1, -1):
        length = int(lengths[row])
        # Scores grow with the square, so a few short rows beside a long one cost more than a call.
        wasted += longest * longest - length * length
        # Equal rows waste nothing and stay together. Long ones that differ part at once: each is
        # worth a call.
        is_too_much = longest >= _LONG or wasted > _CALL_SCORES
        if length != longest and (length > longest or is_too_much):
            edges.append(row + 1)
            longest = length
            wasted = 0
    return [*edges, 0][::-1]


def lay_out_rows(lengths: NDArray[np.int64]) -> RectangleLayout:
    """Rows of these lengths, shortest first, as rectangles."""
    first_tokens = np.cumsum(lengths) - lengths
    first_place = 0
    rectangles = list[Rectangle]()
    tokens = list[Index]()
    places = list[Index]()
    for begin, end in itertools.pairwise(rectangle_edges(lengths)):
        length = int(lengths[end - 1])
        lengths_N1 = lengths[begin:end, None]
        place_L = np.arange(length)
        is_token_NL = place_L < lengths_N1
        bias = None
        padding = None
        if (lengths_N1 != length).any():
            # The masks get an axis for heads, and one for queries or keys.
            mask_NL = torch.from_numpy(is_token_NL)
            bias = torch.zeros(mask_NL.shape).masked_fill_(~mask_NL, float("-inf"))
            bias = bias[:, None, None]
            padding = ~mask_NL[:, None, :, None]
        # A place of padding repeats its row's first token, which no masked score lets through.
        token_NL = first_tokens[begin:end, None] + np.where(is_token_NL, place_L, 0)
        tokens.append(token_NL.ravel())
        places.append(first_place + np.flatnonzero(is_token_NL))
        rows = end - begin
        is_long = length >= _LONG
        rectangles.append(Rectangle(rows, length, begin, first_place, is_long, bias, padding))
        first_place += rows * length
    all_tokens = torch.from_numpy(np.concatenate(tokens))
    all_places = torch.from_numpy(np.concatenate(places))
    return RectangleLayout(rectangles, all_tokens, all_places)
