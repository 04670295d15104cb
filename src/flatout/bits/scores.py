"""Scores of answered grams: Dice, precision, recall, F1 and the fraction of exact sets.

All scores are per record, then averaged. They are computed at 256 thresholds in one pass, and no
answer is stored: each record's probabilities are counted in 256 buckets. The sum of the buckets
from a threshold upwards is the number of answers at that threshold. Open this file to add a score
or to change how the threshold is chosen.

Shapes: B records, G grams, T thresholds.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from flatout.tasks.score_intervals import Interval, OverRanks, RowSums, bootstrap

THRESHOLDS = 256
NAMES = ("dice", "precision", "recall", "f1", "exact")  # in the order of `record_scores`
_DEFAULT_THRESHOLD = 0.5  # until `compute` has chosen one


class GramMetrics(Metric):
    """Means over records, at the threshold with the best Dice or at a fixed one."""

    full_state_update = False
    sums: Tensor
    total: Tensor

    def __init__(self, threshold: float | None = None, *, is_alone: bool = False) -> None:
        """Fix the threshold, or leave its choice to `compute` (None).

        `is_alone`: this rank sees all rows, so nothing is added up over ranks.
        """
        super().__init__(sync_on_compute=not is_alone)
        self.fixed_threshold = threshold
        self.threshold = _DEFAULT_THRESHOLD if threshold is None else threshold
        """Least probability that counts as an answer."""
        # Each record's scores, and a column of ones. While records come in, the threshold is the
        # one that an earlier pass chose: the next is chosen when all have come.
        self.sums_of_rows = RowSums(len(NAMES) + 1)
        sums = torch.zeros(len(NAMES), THRESHOLDS, dtype=torch.float64)
        self.add_state("sums", sums, dist_reduce_fx="sum")
        self.add_state("total", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, scores: Tensor, targets: Tensor, rows: Tensor | None = None) -> None:
        """Add records with probabilities `[B, G]` and targets `[B, G]` of zeros and ones.

        `rows` are the numbers of the records; intervals need them.
        """
        # With four buckets and a record that holds the grams `an` and `ty`:
        #
        #     gram             an     nn     ty
        #     probability      0.9    0.6    0.1
        #     bucket           3      2      0
        #     in the record    x             x
        #
        #     buckets 0 to 3      summed from above
        #     answered  1 0 1 1   3   2   2   1
        #     correct   1 0 0 1   2   1   1   1
        #     Dice                0.8 0.5 0.5 0.67
        #
        # A probability of 1 would lie in a bucket beyond the last one, so it is put into the last.
        buckets_BG = (scores.float() * THRESHOLDS).long().clamp_(0, THRESHOLDS - 1)
        zeros_BT = torch.zeros(len(scores), THRESHOLDS, device=scores.device)
        answered_by_bucket_BT = zeros_BT.scatter_add(1, buckets_BG, torch.ones_like(targets))
        correct_by_bucket_BT = zeros_BT.scatter_add(1, buckets_BG, targets)
        scores_BT = record_scores(
            correct=_sum_from_above(correct_by_bucket_BT),
            answered=_sum_from_above(answered_by_bucket_BT),
            present=targets.sum(1, keepdim=True),
        )
        # Double precision: a sum over millions of records would lose small scores in fp32.
        sums_of_batch = torch.stack([values_BT.sum(0).double() for values_BT in scores_BT])
        self.sums += sums_of_batch.to(self.sums.device)
        self.total += len(scores)
        if rows is not None:
            at_threshold = [values_BT[:, self._bucket()] for values_BT in scores_BT]
            ones = torch.ones_like(at_threshold[0])
            self.sums_of_rows.add(rows, torch.stack([*at_threshold, ones], 1))

    def compute(self) -> dict[str, float]:
        """Mean scores; chooses the threshold first if none is fixed."""
        means = (self.sums / self.total.clamp(min=1)).cpu()
        if self.fixed_threshold is None:
            dice_by_threshold = means[NAMES.index("dice")]
            self.threshold = int(dice_by_threshold.argmax()) / THRESHOLDS
        at_threshold = means[:, self._bucket()]
        return dict(zip(NAMES, at_threshold.tolist(), strict=True))

    def intervals(self, over_ranks: OverRanks | None = None) -> dict[str, Interval]:
        """The 95 % interval of each score, from the records that came with numbers.

        Their scores are at the threshold that was known while they came in. A collective: all ranks
        call it together.
        """

        def mean_scores(drawn_sums: Tensor) -> dict[str, Tensor]:
            means = drawn_sums[..., :-1] / drawn_sums[..., -1:]
            return dict(zip(NAMES, means.unbind(-1), strict=True))

        return bootstrap(self.sums_of_rows.gathered(over_ranks), mean_scores)

    def reset(self) -> None:
        super().reset()
        self.sums_of_rows.reset()

    def _bucket(self) -> int:
        return min(THRESHOLDS - 1, round(self.threshold * THRESHOLDS))


def record_scores(correct: Tensor, answered: Tensor, present: Tensor) -> tuple[Tensor, ...]:
    """Dice, precision, recall, F1 and exactness of each record, from counts of its grams.

    `present` grams are in the record, `answered` ones were predicted, `correct` ones are both. A
    record with neither present nor answered grams scores 1; with only one of them it scores 0. Of
    one record Dice and F1 are the same number, 2 · correct / (answered + present); both names are
    known, so both are reported.
    """
    # `clamp` keeps a count of 0 from being divided by. Grams must be counted whole: it would change
    # sums of weights below 1.
    total = answered + present
    both_empty = total == 0
    dice = torch.where(both_empty, 1.0, 2 * correct / total.clamp(min=1))
    precision = torch.where(both_empty, 1.0, correct / answered.clamp(min=1))
    recall = torch.where(both_empty, 1.0, correct / present.clamp(min=1))
    f1 = 2 * precision * recall / (precision + recall).clamp(min=1e-12)
    is_exact = (correct == answered) & (correct == present)
    return dice, precision, recall, f1, is_exact.to(dice.dtype)


def _sum_from_above(counts_BT: Tensor) -> Tensor:
    """Sum of each bucket and all above it: `[1, 0, 2]` becomes `[3, 2, 2]`."""
    return counts_BT.flip(1).cumsum(1).flip(1)
