"""How much of each record's grams is found out: Dice, precision, recall and F1 a record, and the
share of exact sets.

Everything is counted at 256 thresholds at once, in one pass: a record's answers are sorted into
buckets by their score, and sums over buckets from above give what a threshold would have answered.
So no answer is kept.

Shapes: B records, G grams, T thresholds.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from flatout.tasks.score_intervals import Interval, OverRanks, RowSums, bootstrap

THRESHOLDS = 256
NAMES = ("dice", "precision", "recall", "f1", "exact")


class GramMetrics(Metric):
    """Means over records, at the threshold with the best Dice or at one that is given."""

    full_state_update = False
    sums: Tensor
    total: Tensor

    def __init__(self, threshold: float | None = None, *, is_alone: bool = False) -> None:
        """`is_alone`: this rank sees all rows, so that nothing is added up over ranks."""
        super().__init__(sync_on_compute=not is_alone)
        self.given = threshold
        self.of_rows = RowSums(len(NAMES) + 1)
        self.threshold = 0.5 if threshold is None else threshold
        """Least score that counts as an answer; found by `compute` where none is given."""
        self.add_state(
            "sums", torch.zeros(len(NAMES), THRESHOLDS, dtype=torch.float64), dist_reduce_fx="sum"
        )
        self.add_state("total", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, scores: Tensor, targets: Tensor, rows: Tensor | None = None) -> None:
        """Scores `[B, G]` from 0 to 1, targets of zeros and ones; `rows`: numbers of the records,
        for intervals.
        """
        buckets_BG = (scores.float() * THRESHOLDS).long().clamp_(0, THRESHOLDS - 1)
        zeros_BT = torch.zeros(len(scores), THRESHOLDS, device=scores.device)
        answered_BT = _at_least(zeros_BT.scatter_add(1, buckets_BG, torch.ones_like(targets)))
        found_BT = _at_least(zeros_BT.scatter_add(1, buckets_BG, targets))
        scores_BT = record_scores(found_BT, answered_BT, targets.sum(1, keepdim=True))
        self.sums += torch.stack([values.sum(0).double() for values in scores_BT]).to(
            self.sums.device
        )
        self.total += len(scores)
        if rows is not None:
            parts = [values[:, self._place()] for values in scores_BT]
            self.of_rows.add(rows, torch.stack([*parts, torch.ones_like(parts[0])], 1))

    def compute(self) -> dict[str, float]:
        means = (self.sums / self.total.clamp(min=1)).cpu()
        if self.given is None:
            self.threshold = int(means[0].argmax()) / THRESHOLDS
        return {name: float(means[row, self._place()]) for row, name in enumerate(NAMES)}

    def intervals(self, over_ranks: OverRanks | None = None) -> dict[str, Interval]:
        """The 95 % interval of each score, of the records whose numbers were given.

        On every rank at once.
        """

        def values_of(sums: Tensor) -> dict[str, Tensor]:
            return {name: sums[..., row] / sums[..., -1] for row, name in enumerate(NAMES)}

        return bootstrap(self.of_rows.gathered(over_ranks), values_of)

    def reset(self) -> None:
        super().reset()
        self.of_rows.reset()

    def _place(self) -> int:
        return min(THRESHOLDS - 1, round(self.threshold * THRESHOLDS))


def record_scores(found: Tensor, answered: Tensor, there: Tensor) -> tuple[Tensor, ...]:
    """Dice, precision, recall, F1 and exactness from counts of each record; 1 where none is there
    nor answered.
    """
    both_empty = (answered + there) == 0
    dice = torch.where(both_empty, 1.0, 2 * found / (answered + there).clamp(min=1))
    precision = torch.where(both_empty, 1.0, found / answered.clamp(min=1))
    recall = torch.where(both_empty, 1.0, found / there.clamp(min=1))
    f1 = 2 * precision * recall / (precision + recall).clamp(min=1e-12)
    return dice, precision, recall, f1, ((found == answered) & (found == there)).to(dice.dtype)


def _at_least(counts_BT: Tensor) -> Tensor:
    """Counts at or above each bucket."""
    return counts_BT.flip(1).cumsum(1).flip(1)
