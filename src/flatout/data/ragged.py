"""Index arithmetic for rows of unequal length that lie one after the other in one flat array.

Most loops over rows in this package are one of these four functions on whole arrays. Open this
file to see what `begins` and `indices` mean elsewhere.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer]
Counts = NDArray[np.int64]


def row_begins(lengths: Ints) -> Counts:
    """Where each row begins: lengths [3, 1, 2] → [0, 3, 4]."""
    ends: Counts = np.cumsum(lengths, dtype=np.int64)
    ends -= lengths
    return ends


def row_bounds(lengths: Ints) -> Counts:
    """Where each row begins, and at last where all end: lengths [3, 1, 2] → [0, 3, 4, 6]."""
    return np.append(0, np.cumsum(lengths, dtype=np.int64))


def row_indices(starts: Ints, lengths: Ints) -> Counts:
    """The index of each value of rows that begin anywhere: starts [5, 0], lengths [2, 3] →
    [5 6, 0 1 2].
    """
    # Values of the result are numbered 0, 1, 2, …; each row shifts its numbers by the distance
    # from where it lands to where it lies: shifts [5 - 0, 0 - 2] → [5 5, -2 -2 -2] + [0 1 2 3 4].
    indices: Counts = np.repeat(starts - row_begins(lengths), lengths)
    indices += np.arange(len(indices))
    return indices


def numbers_in_row(lengths: Ints) -> Counts:
    """Of each value its number in its row, from 0: lengths [3, 1, 2] → [0 1 2, 0, 0 1]."""
    return row_indices(np.zeros_like(lengths), lengths)
