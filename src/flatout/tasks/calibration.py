"""How well a trained model's probabilities hold, and how to correct them on the validation rows.

- A temperature divides all logits: answers stay the same, and a model that is too sure of itself is
  less so. It is fitted on one half of the rows and judged on the other, and left out where it does
  not lower the loss there.
- `Sureness` measures the calibration error: of answers given at 80 %, 80 % should be right.
- Thresholds decide from which probability on a label is answered, where rows may have several.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.run_log import RunLog

_BINS = 15  # of probabilities, in which sureness and right answers are compared
# temperatures between which the likeliest is looked for
_COLDEST = 0.05
_HOTTEST = 20.0
_NARROWINGS = 40  # of these ends: each leaves 0.618 of the range, all of them about 4e-9
# How far a temperature strays from 1 before rows have spoken, as the spread of its logarithm.
# Without it the likelihood of a half that has no error rises for ever, and probabilities become 0
# and 1.
_SPREAD = 0.5
_LEAST_ROWS = 20  # rows with a label, below which its threshold stays at one half
_MOST_CHOICES = 1_000_000  # rows times labels, by which the temperature of labels is fitted


@dataclass(frozen=True, slots=True)
class Calibration:
    """A temperature, and the calibration error and loss of rows it was not fitted on."""

    temperature: float  # of use: what was fitted, or 1 where that does not lower the loss
    error_before: float
    error_after: float  # with the temperature of use
    fitted: float
    error_fitted: float  # with the one that was fitted
    loss_before: float  # mean negative logarithm of the target's probability
    loss_fitted: float

    def report(self, log: RunLog) -> dict[str, Any]:
        """Report the temperature and what it changes on other rows; facts for the run's summary."""
        changes = "lowered" if self.loss_fitted < self.loss_before else "did not lower"
        why = "outputs are divided by it before they become probabilities"
        why += f"; a fit of {self.fitted:.2f} {changes} the held-out loss"
        why += f": {self.loss_before:.3f} without it, {self.loss_fitted:.3f} with it"
        errors = (
            f"held-out calibration error: {self.error_before:.3f} without the fit,"
            f" {self.error_fitted:.3f} with it"
        )
        log.decision("temperature", f"{self.temperature:.2f}", why, errors)
        return {"calibration": asdict(self)}


def calibrated(logits_BC: Tensor, targets_B: Tensor, rows_B: Tensor | None = None) -> Calibration:
    """Fit a temperature on one half of the answers, and judge it on the other half.

    The temperature of use is 1 if the fitted one does not lower the loss of the other half.
    `rows_B`: answers with the same number, such as the words of a row, are in the same half. None:
    each answer stands alone.
    """
    is_fitted_B = _first_half(torch.arange(len(targets_B)) if rows_B is None else rows_B)
    if is_fitted_B.all() or not is_fitted_B.any():
        error = calibration_error(logits_BC.softmax(-1), targets_B)
        loss = _loss(logits_BC, targets_B, 1.0)
        return Calibration(1.0, error, error, 1.0, error, loss, loss)
    fitted = _likeliest(logits_BC[is_fitted_B].double(), targets_B[is_fitted_B])
    logits = logits_BC[~is_fitted_B].double()
    targets = targets_B[~is_fitted_B]
    before = calibration_error(logits.softmax(-1), targets)
    after = calibration_error((logits / fitted).softmax(-1), targets)
    loss_before = _loss(logits, targets, 1.0)
    loss_fitted = _loss(logits, targets, fitted)
    if loss_fitted < loss_before:
        return Calibration(fitted, before, after, fitted, after, loss_before, loss_fitted)
    return Calibration(1.0, before, before, fitted, after, loss_before, loss_fitted)


def as_two_classes(
    logits_BC: Tensor, targets_BC: Tensor, rows_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Each label of the first rows as a choice between absent and present.

    Returns the choices' logits, targets, and the rows they are of.
    """
    classes = logits_BC.shape[1]
    count = max(1, _MOST_CHOICES // classes)
    present = logits_BC[:count].flatten()
    logits = torch.stack([torch.zeros_like(present), present], 1)
    targets = targets_BC[:count].flatten().long()
    return logits, targets, rows_B[:count].repeat_interleave(classes)


class Sureness:
    """How sure answers are and how often they are right, added up in bins of probabilities.

    Two answers at 0.8, one of them right: their bin is surer than right by 2 * 0.8 - 1 = 0.6. The
    error is 0.6 / 2 = 0.3.
    """

    def __init__(self) -> None:
        # for each bin the sum of probabilities less the number of right answers
        self.surer = torch.zeros(_BINS, dtype=torch.float64)
        self.rows = 0

    def add(self, shares_BC: Tensor, targets_B: Tensor) -> None:
        sure_B, answer_B = shares_BC.max(-1)
        bin_B = (sure_B * _BINS).long().clamp_(max=_BINS - 1)
        self.surer.index_add_(0, bin_B, sure_B.double() - (answer_B == targets_B).double())
        self.rows += len(targets_B)

    def error(self) -> float:
        """Mean distance between how sure answers are and how often they are right."""
        return float(self.surer.abs().sum() / max(1, self.rows))


def calibration_error(shares_BC: Tensor, targets_B: Tensor) -> float:
    """`Sureness.error` of rows that are all there."""
    sureness = Sureness()
    sureness.add(shares_BC, targets_B)
    return sureness.error()


def best_thresholds(shares_BC: Tensor, targets_BC: Tensor) -> list[float]:
    """For each label the probability from which on it is answered, so that its F1 is best."""
    return [
        _best_threshold(shares_B, has_B)
        for shares_B, has_B in zip(shares_BC.T, targets_BC.T > 0.5, strict=True)
    ]


def _first_half(rows_B: Tensor) -> Tensor:
    """About every other row, whatever pattern their numbers have (Knuth's multiplicative hash)."""
    return (rows_B.long() * 2_654_435_761 & 0xFFFF_FFFF) < 1 << 31


def _loss(logits_BC: Tensor, targets_B: Tensor, temperature: float) -> float:
    """Mean negative logarithm of the target's probability."""
    return float(F.cross_entropy(logits_BC / temperature, targets_B))


def _likeliest(logits_BC: Tensor, targets_B: Tensor) -> float:
    """The temperature with the least loss, drawn towards 1 where there are few rows."""
    # Golden section: of a range, two inner points are compared, and the side beyond the worse one
    # is left out. On a logarithm, since 0.5 and 2 are equally far from 1.
    low = torch.tensor(_COLDEST).log().item()
    high = torch.tensor(_HOTTEST).log().item()
    ratio = (5**0.5 - 1) / 2

    def loss(logarithm: float) -> float:
        drawn_to_1 = (logarithm / _SPREAD) ** 2 / (2 * len(targets_B))
        return _loss(logits_BC, targets_B, math.exp(logarithm)) + drawn_to_1

    for _ in range(_NARROWINGS):
        left = high - ratio * (high - low)
        right = low + ratio * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    return float(torch.tensor((low + high) / 2).exp())


def _best_threshold(shares_B: Tensor, has_B: Tensor) -> float:
    """The threshold with the best F1, halfway to the next lower probability."""
    if int(has_B.sum()) < _LEAST_ROWS:
        return 0.5
    # Every probability is a threshold: F1 is twice the right ones over answered and present ones.
    #
    #     probabilities, sorted     0.9    0.8    0.6    0.3
    #     has the label             x             x
    #     right so far              1      1      2      2
    #     F1                        2/3    2/4    4/5    4/6      best at 0.6, so (0.6 + 0.3) / 2
    ordered = shares_B.sort(descending=True)
    right = has_B[ordered.indices].double().cumsum(0)
    f1 = 2 * right / (torch.arange(1, len(right) + 1) + has_B.sum())
    f1[:-1][ordered.values[:-1] == ordered.values[1:]] = 0  # equal ones are answered alike
    best = int(f1.argmax())
    below = float(ordered.values[best + 1]) if best + 1 < len(right) else 0.0
    return (float(ordered.values[best]) + below) / 2
