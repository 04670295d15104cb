"""What cutting costs: the score of the test rows that were cut, beside that of the whole ones.

A store has tokens after the cut, and how many rows were cut. All of these have the same length. The few whole rows of
just that length are scored with them, and counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flatout.data.batches.gather import TOKENS
from flatout.data.store.store import StoreSplit
from flatout.tasks.metrics import TaskMetrics
from flatout.tasks.score_intervals import OverRanks

_LEAST_ROWS = 30  # rows of either kind, below which a score says little
_LEAST_SHARE = 0.9  # of the rows of that length so many must have been cut


class CutScores:
    """The metrics of rows that were cut and of rows that were not, over one pass of a split."""

    def __init__(self, metrics: TaskMetrics, is_cut: Tensor, cut_rows: int) -> None:
        self.metrics, self.is_cut, self.cut_rows = metrics, is_cut, cut_rows
        metrics.auroc = None  # no sum over rows

    @classmethod
    def of(cls, split: StoreSplit, cut: int, build: Callable[[], TaskMetrics]) -> CutScores | None:
        """For the rows of a split, with metrics that are built then; None where too few were cut, or are whole."""
        lengths = torch.from_numpy(split.lengths(TOKENS).copy())
        is_full = lengths == lengths.max()
        filled = int(is_full.sum())
        is_told = cut >= max(_LEAST_ROWS, _LEAST_SHARE * filled) and len(lengths) - filled >= _LEAST_ROWS
        return cls(build(), is_full, cut) if is_told else None

    def add(self, outputs: Tensor, targets: Tensor, rows: Tensor) -> None:
        """Take in answers to the rows of these numbers."""
        self.metrics.update(outputs, targets, self.is_cut[rows.cpu()].long())

    def report(self, named: str | None, usual: str, over_ranks: OverRanks) -> dict[str, Any]:
        """A metric of both kinds of rows, and how many there are of each; empty where not all rows were judged.
        The usual metric stands in for a named one that is no sum over rows. Every rank takes part."""
        sums_2S = self.metrics.sums.gathered(over_ranks)[:2]
        whole_rows, full_rows = sums_2S[:, -1].tolist()
        if whole_rows + full_rows != len(self.is_cut):
            return {}
        values = self.metrics.values_of(sums_2S)
        name = named if named in values else usual
        whole, cut = values[name].tolist()
        rows = {"cut_rows": self.cut_rows, "equal_rows": int(full_rows) - self.cut_rows, "whole_rows": int(whole_rows)}
        return {"metric": f"test/{name}", "cut": cut, "whole": whole, **rows}
