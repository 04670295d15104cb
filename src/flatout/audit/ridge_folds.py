"""Ridge regression in folds, from sums."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from flatout.audit.forecast import PARTS, Floats
from flatout.audit.number_rows import NumberRows
from flatout.data.checks.findings import counted
from flatout.errors import require
from flatout.models.series import Sums, ridge_sums, solve_ridge


class RidgeFolds:
    """Sums over the samples of each fold and each part of the curve, and models of them."""

    def __init__(self, rows: NumberRows, num_folds: int) -> None:
        count = len(rows.names)
        groups, group_R = np.unique(
            rows.groups if len(set(rows.groups)) > 1 else range(count), return_inverse=True
        )
        require(
            len(groups) >= num_folds,
            "folds",
            (
                f"{counted(len(groups), 'group' if len(groups) < count else rows.what[:-1])} for"
                f" {num_folds} folds"
            ),
            hint="Set folds to fewer, or name more data.",
        )
        rank_G = np.random.default_rng(0).permutation(len(groups))
        by_group = np.argsort(group_R, kind="stable")
        nth_R = np.empty(count, np.int64)
        own_R = rank_G[group_R]
        nth_R[by_group] = np.arange(count) - np.searchsorted(group_R[by_group], group_R[by_group])
        # whole groups behind a row of two, so that no fold lacks rows of a part
        is_later_R = (nth_R > 0) | (own_R > 1)
        rank_R = torch.from_numpy(np.argsort(np.lexsort((nth_R, own_R, is_later_R))))
        self.rows = rows
        self.num_folds = num_folds
        self.fold_R = torch.from_numpy(own_R % num_folds)
        self.group_R = torch.from_numpy(group_R)
        self.fold_N = self.fold_R[rows.row_N]
        ends = torch.tensor(PARTS[:-1]) * count
        part_N = torch.bucketize(rank_R.float(), ends, right=True)[rows.row_N]
        self._cells: dict[tuple[int, int], Sums] = {}
        for fold, part in itertools.product(range(num_folds), range(len(PARTS))):
            own_N = (self.fold_N == fold) & (part_N == part)
            self._cells[fold, part] = ridge_sums(
                rows.inputs_ND[own_N].double(), rows.answers_NO[own_N].double()
            )

    def losses(self, penalty: float, part: int, judged: int | None = None) -> tuple[Floats, Tensor]:
        """Mean loss of each row of all folds or one, by models of a part of the others; and what
        these answer.
        """
        rows = self.rows
        answers_NO = torch.empty_like(self.rows.answers_NO, dtype=torch.float32)
        for fold in range(self.num_folds) if judged is None else (judged,):
            cells = [
                sums for (own, its), sums in self._cells.items() if own != fold and its <= part
            ]
            weight_DO, mean_D, mean_O = solve_ridge(
                tuple(sum(each) for each in zip(*cells, strict=True)), penalty
            )
            is_judged_N = self.fold_N == fold
            inputs_ND = (rows.inputs_ND[is_judged_N] - mean_D).float()
            answers_NO[is_judged_N] = inputs_ND @ weight_DO.float() + mean_O.float()
        kept_N = slice(None) if judged is None else self.fold_N == judged
        loss_N = rows.loss(answers_NO[kept_N], rows.answers_NO[kept_N]).double()
        row_N = rows.row_N[kept_N]
        sums_R = torch.zeros(len(rows.names)).double().index_add(0, row_N, loss_N)
        return (sums_R / torch.bincount(rows.row_N)).numpy(), answers_NO
