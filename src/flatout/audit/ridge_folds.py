"""Ridge regression in folds: each row is answered by a model that has not seen it.

Ridge regression needs only sums of products over its samples, and sums add up. So the samples are
read once, into one sum for each fold and each part of the learning curve. A model of any folds and
parts is then a sum of sums and one solve, however many samples there are.

    4 rows in 2 folds; the parts of the curve are the first half of the rows, and the rest

    row 0 → fold 0, part 0     row 1 → fold 1, part 0
    row 2 → fold 0, part 1     row 3 → fold 1, part 1

    rows of fold 0 are answered by the model of cell (1, 0), and on all rows of (1, 0) + (1, 1)

Shapes: N samples, D inputs, O answers, R rows, G groups of rows.
"""

from __future__ import annotations

import functools
import itertools
import operator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.audit.forecast import PARTS, Floats
from flatout.audit.number_rows import NumberRows
from flatout.baselines.ridge import RidgeSums
from flatout.data.checks.findings import counted
from flatout.errors import require


class RidgeFolds:
    """The fold of each row and group, and models of the folds."""

    def __init__(self, rows: NumberRows, num_folds: int) -> None:
        num_rows = len(rows.names)
        group_R = _number_groups(rows)
        num_groups = int(group_R.max()) + 1
        thing = "group" if num_groups < num_rows else rows.kind[:-1]
        require(
            num_groups >= num_folds,
            "folds",
            f"{counted(num_groups, thing)} for {num_folds} folds",
            hint="Set folds to fewer, or name more data.",
        )
        # Groups are dealt in a random order, like cards: the folds differ by one group at most.
        position_G = np.random.default_rng(0).permutation(num_groups)
        position_R = position_G[group_R]
        self.rows = rows
        self.num_folds = num_folds
        self.group_R = torch.from_numpy(group_R)
        self.fold_R = torch.from_numpy(position_R % num_folds)
        self.fold_N = self.fold_R[rows.row_N]
        # Parts of the curve end at an eighth, a quarter and a half: of 16 rows, at 2, 4 and 8.
        rank_R = torch.from_numpy(_rank_rows(group_R, position_R))
        ends = torch.tensor(PARTS[:-1]) * num_rows
        part_R = torch.bucketize(rank_R.float(), ends, right=True)
        self._sums = self._add_up(part_R[rows.row_N])

    def _add_up(self, part_N: Tensor) -> dict[tuple[int, int], RidgeSums]:
        """Sums over the samples of each fold and each part of the curve."""
        sums = dict[tuple[int, int], RidgeSums]()
        for fold, part in itertools.product(range(self.num_folds), range(len(PARTS))):
            is_in_N = (self.fold_N == fold) & (part_N == part)
            inputs_ND = self.rows.inputs_ND[is_in_N].double()
            answers_NO = self.rows.answers_NO[is_in_N].double()
            sums[fold, part] = RidgeSums.of(inputs_ND, answers_NO)
        return sums

    def losses(self, penalty: float, part: int) -> tuple[Floats, Tensor]:
        """Mean loss of each row, and `[N, O]` answers, by models of the other folds.

        `part`: number of the last part of the curve that models learn from.
        """
        answers_NO = torch.empty_like(self.rows.answers_NO, dtype=torch.float32)
        for fold in range(self.num_folds):
            is_judged_N = self.fold_N == fold
            answers_NO[is_judged_N] = self._answer(fold, penalty, part)
        loss_N = self.rows.loss(answers_NO, self.rows.answers_NO)
        return self._mean_of_rows(loss_N, self.rows.row_N), answers_NO

    def first_fold_loss(self, penalty: float, part: int) -> float:
        """The sum of the mean losses of the first fold's rows; less work than all folds."""
        is_judged_N = self.fold_N == 0
        answers_NO = self._answer(0, penalty, part)
        loss_N = self.rows.loss(answers_NO, self.rows.answers_NO[is_judged_N])
        loss_R = self._mean_of_rows(loss_N, self.rows.row_N[is_judged_N])
        return float(loss_R.sum())

    def _answer(self, fold: int, penalty: float, last_part: int) -> Tensor:
        """Answers of a fold's samples by a model of the other folds."""
        others = list[RidgeSums]()
        for (other, part), sums in self._sums.items():
            if other != fold and part <= last_part:
                others.append(sums)
        total = functools.reduce(operator.add, others)
        weight_DO, mean_D, mean_O = total.solve(total.growing(penalty))
        inputs_ND = self.rows.inputs_ND[self.fold_N == fold]
        distances_ND = (inputs_ND - mean_D).float()
        return distances_ND @ weight_DO.float() + mean_O.float()

    def _mean_of_rows(self, loss_N: Tensor, row_N: Tensor) -> Floats:
        """Each row's mean over its samples, so that a long recording counts once; 0 for others."""
        num_rows = len(self.rows.names)
        sums_R = torch.zeros(num_rows).double().index_add(0, row_N, loss_N.double())
        return (sums_R / torch.bincount(self.rows.row_N)).numpy()


def _number_groups(rows: NumberRows) -> NDArray[np.int64]:
    """The group of each row, numbered from 0; each row by itself where there are no two groups."""
    if len(set(rows.groups)) <= 1:
        return np.arange(len(rows.names))
    return np.unique(rows.groups, return_inverse=True)[1]


def _rank_rows(group_R: NDArray[np.int64], position_R: NDArray[np.int64]) -> NDArray[np.int64]:
    """The order in which rows join the learning curve: group by group, but two rows first.

    `position_R`: place of each row's group in the random order of groups.
    """
    # Rows a0 a1 a2 b0 b1 of the groups a and b, and b is first in the random order:
    #
    #     within      0  1  2  0  1      number of each row within its group
    #     position    1  1  1  0  0
    #     is_later    0  1  1  0  1
    #     order       b0 a0 b1 a1 a2     by is_later, then position, then within
    #     rank        1  3  4  0  2
    #
    # So the smallest part has a row of two groups, which are in two folds: each fold has others to
    # learn from, however large the first group is.
    num_rows = len(group_R)
    by_group = np.argsort(group_R, kind="stable")
    sorted_groups = group_R[by_group]
    begin_of_group = np.searchsorted(sorted_groups, sorted_groups)
    within_R = np.empty(num_rows, np.int64)
    within_R[by_group] = np.arange(num_rows) - begin_of_group
    is_later_R = (within_R > 0) | (position_R > 1)
    order = np.lexsort((within_R, position_R, is_later_R))
    return np.argsort(order)
