"""Ridge regression in closed form, for the baselines of recordings, bit strings and audits.

It needs only sums over rows, so rows need no memory, sums of several parts add up, and all
penalties are solved from one pass. With inputs X, answers Y, their means x and y, n rows and the
penalty p:

    W = (X'X - n x'x + p I)^-1 (X'Y - n x'y)        answers = (inputs - x) W + y

The linear model of texts is `baselines/linear_text.py`: its inputs are words and n-grams.

Shapes: N rows, D inputs, O answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# tried for inputs of recordings; the held-out rows choose
PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)
_MOST_INPUTS_IN_DOUBLE = 2_048
_FEW_ROWS = 1_000


@dataclass(slots=True)
class RidgeSums:
    """The sums over some rows from which ridge regression is solved."""

    inputs_DD: Tensor
    crossed_DO: Tensor
    sum_D: Tensor
    sum_O: Tensor
    num_rows: int = 0

    @classmethod
    def zeros(
        cls,
        num_inputs: int,
        num_answers: int,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> RidgeSums:
        sum_D = torch.zeros(num_inputs, dtype=dtype, device=device)
        sum_O = torch.zeros(num_answers, dtype=dtype, device=device)
        return cls(
            inputs_DD=sum_D.new_zeros(num_inputs, num_inputs),
            crossed_DO=sum_D.new_zeros(num_inputs, num_answers),
            sum_D=sum_D,
            sum_O=sum_O,
        )

    @classmethod
    def of(cls, inputs_ND: Tensor, answers_NO: Tensor) -> RidgeSums:
        """The sums of these rows, in their number format."""
        sums = cls.zeros(inputs_ND.shape[1], answers_NO.shape[1], inputs_ND.dtype, inputs_ND.device)
        sums.add(inputs_ND, answers_NO)
        return sums

    def add(self, inputs_ND: Tensor, answers_NO: Tensor) -> None:
        """Count more rows."""
        self.inputs_DD.addmm_(inputs_ND.T, inputs_ND)
        self.crossed_DO.addmm_(inputs_ND.T, answers_NO)
        self.sum_D += inputs_ND.sum(0)
        self.sum_O += answers_NO.sum(0)
        self.num_rows += len(inputs_ND)

    def __add__(self, other: RidgeSums) -> RidgeSums:
        return RidgeSums(
            inputs_DD=self.inputs_DD + other.inputs_DD,
            crossed_DO=self.crossed_DO + other.crossed_DO,
            sum_D=self.sum_D + other.sum_D,
            sum_O=self.sum_O + other.sum_O,
            num_rows=self.num_rows + other.num_rows,
        )

    def growing(self, penalty: float) -> float:
        """A penalty that weighs as much against many rows as against a thousand."""
        return penalty * max(1.0, self.num_rows / _FEW_ROWS)

    def solve(self, penalty: float) -> tuple[Tensor, Tensor, Tensor]:
        """`[D, O]` weights for centred inputs, and the means of inputs and answers, in double."""
        wide = torch.float64
        mean_D = self.sum_D.to(wide) / self.num_rows
        mean_O = self.sum_O.to(wide) / self.num_rows
        # Differences are taken in place: with thousands of inputs each square has 0.1 GB and more.
        products_DD = torch.outer(mean_D, mean_D).mul_(-self.num_rows).add_(self.inputs_DD)
        products_DD.diagonal().add_(penalty)
        crossed_DO = torch.outer(mean_D, mean_O).mul_(-self.num_rows).add_(self.crossed_DO)
        return _solve_positive(products_DD, crossed_DO), mean_D, mean_O

    def solve_map(self, penalty: float) -> tuple[Tensor, Tensor]:
        """`[D, O]` weights for inputs as they are, and the `[O]` bias, in double."""
        weight_DO, mean_D, mean_O = self.solve(penalty)
        return weight_DO, mean_O - mean_D @ weight_DO


def _solve_positive(products_DD: Tensor, crossed_DO: Tensor) -> Tensor:
    """The solution of a symmetric system, which is positive but for rounding."""
    # Inputs are nearly dependent, so the system is solved in double precision. For many inputs
    # that takes too long: fp32 is tried first, and double precision where it fails.
    if len(products_DD) > _MOST_INPUTS_IN_DOUBLE:
        factor_DD, failed = torch.linalg.cholesky_ex(products_DD.float())
        if not failed:
            return torch.cholesky_solve(crossed_DO.float(), factor_DD).double()
    factor_DD, failed = torch.linalg.cholesky_ex(products_DD)
    if failed:  # by rounding: a solver for any system is less exact there
        return torch.linalg.solve(products_DD, crossed_DO)
    return torch.cholesky_solve(crossed_DO, factor_DD)
