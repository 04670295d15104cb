"""The rows of some consecutive batches, as a plan gives them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class BatchRows:
    """A run of consecutive batches: whose rows, how many each, and how many of those count."""

    rows: Rows
    """[R] row numbers, batch after batch, each batch shortest row first."""
    bounds: Rows
    """[batches + 1] where each batch begins in `rows`."""
    num_real: Rows
    """[batches] rows that count in each batch."""
    step_rows: Rows
    """[batches] real rows of the optimizer step each batch belongs to, over all ranks."""
    ends_step: NDArray[np.bool_]
    """[batches] whether the optimizer steps after it."""
