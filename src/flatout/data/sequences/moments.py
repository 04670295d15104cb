"""Count, mean, spread and range of each column of some samples.

`Moments.of` adds up blocks, one in memory at a time. `Moments.merge` combines the moments of
several runs of samples. Scales, and the search for recordings in another unit, are made of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from flatout.data.sequences.columns import Floats


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean, spread and range of some samples; arrays have a number for each column."""

    count: Floats
    mean: Floats
    squares: Floats  # the sum of squared distances from the mean
    least: Floats
    most: Floats

    @classmethod
    def of(cls, blocks: Iterable[Floats]) -> Moments:
        """The moments of blocks `[samples, columns]`."""
        parts = []
        for block in blocks:
            # A variance that is not finite is refused later, by the name of its column.
            with np.errstate(over="ignore"):
                mean = block.mean(axis=0)
                squares = ((block - mean) ** 2).sum(axis=0)
            count = np.full_like(mean, len(block))
            parts.append(cls(count, mean, squares, block.min(axis=0), block.max(axis=0)))
        return parts[0] if len(parts) == 1 else cls.merge(parts)

    @classmethod
    def merge(cls, parts: Sequence[Moments]) -> Moments:
        """The moments of all samples together, without the loss of digits of plain sums."""
        # Means 1 and 3 of two samples each: the mean is 2, and each sample is 1 farther from it
        # than from its own mean, on average. So 2 * (1 - 2)² + 2 * (3 - 2)² = 4 adds to `squares`.
        counts = np.stack([part.count for part in parts])
        means = np.stack([part.mean for part in parts])
        squares = np.stack([part.squares for part in parts])
        count = counts.sum(axis=0)
        # Values too large for a sum give a spread that is not finite, and no warning.
        with np.errstate(over="ignore", invalid="ignore"):
            mean = (counts * means).sum(axis=0) / count
            squares_of_all = squares.sum(axis=0) + (counts * (means - mean) ** 2).sum(axis=0)
        least = np.min([part.least for part in parts], axis=0)
        most = np.max([part.most for part in parts], axis=0)
        return cls(count, mean, squares_of_all, least, most)

    @property
    def spread(self) -> Floats:
        """The standard deviation."""
        return np.sqrt(self.squares / self.count)

    @property
    def root_mean_square(self) -> Floats:
        return np.sqrt(self.mean**2 + self.squares / self.count)
