"""Errors of answers to recordings: for each target in its own unit, over all recordings and for each.

Sums are kept for each recording and target on the device, so a batch costs a few additions and memory stays flat.

Shapes: N answers, R recordings, K targets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flatout.distributed.collectives import of_all_ranks

NAMES = ("rmse", "mae", "max_error", "r2", "mse_scaled", "mae_scaled")
_COUNT, _SQUARES, _ABSOLUTE, _TRUTH, _TRUTH_SQUARES = range(5)


class SequenceScores:
    """Adds up errors on scaled values, and says what they are in each target's unit."""

    def __init__(self, recordings: int, targets: Sequence[str], factor: Sequence[float]) -> None:
        self.targets = list(targets)
        self._factor = torch.tensor(list(factor), dtype=torch.float64)
        self.of_targets: dict[str, dict[str, float]] = {}
        """The errors of each target over all recordings, of the last `values`."""
        shape = recordings, len(self.targets)
        self._sums = torch.zeros(5, *shape, dtype=torch.float64)
        self._largest = torch.zeros(shape, dtype=torch.float64)

    @property
    def names(self) -> list[str]:
        """Of `values`; of several targets also the error of each."""
        return names_of(self.targets)

    def reset(self) -> None:
        self._sums.zero_()
        self._largest.zero_()

    def add(self, answers_NK: Tensor, truths_NK: Tensor, recording_N: Tensor) -> None:
        """Take in scaled answers and what they should be."""
        if self._sums.device != answers_NK.device:
            self._sums, self._largest = self._sums.to(answers_NK.device), self._largest.to(answers_NK.device)
        truths_NK = truths_NK.double()
        errors_NK = answers_NK.double() - truths_NK
        absolute_NK = errors_NK.abs()
        parts = torch.ones_like(errors_NK), errors_NK**2, absolute_NK, truths_NK, truths_NK**2
        self._sums.index_add_(1, recording_N, torch.stack(parts))
        self._largest.scatter_reduce_(0, recording_N.unsqueeze(1).expand_as(absolute_NK), absolute_NK, "amax")

    def values(self) -> dict[str, float]:
        """Each metric over all ranks; of several targets the mean over them, and the error of each."""
        return self._values(*self._of_all_ranks())

    def values_here(self) -> dict[str, float]:
        """The same of this rank alone."""
        return self._values(self._sums.cpu(), self._largest.cpu())

    def _values(self, sums: Tensor, largest: Tensor) -> dict[str, float]:
        by_target = _errors(sums.sum(1), largest.amax(0), self._factor)
        self.of_targets = {
            target: {name: float(errors[number]) for name, errors in by_target.items()}
            for number, target in enumerate(self.targets)
        }
        found = {name: float(by_target[name].mean()) for name in ("rmse", "mae", "max_error", "r2")}
        count = sums[_COUNT].sum()
        found |= {"mse_scaled": float(sums[_SQUARES].sum() / count), "mae_scaled": float(sums[_ABSOLUTE].sum() / count)}
        if len(self.targets) > 1:
            errors = by_target["rmse"].tolist()
            found |= {f"rmse_{name}": value for name, value in zip(self.targets, errors, strict=True)}
        return found

    def by_recording(self) -> dict[str, Tensor]:
        """`[R, K]` of each error; NaN where a recording has no answer."""
        return _errors(*self._of_all_ranks(), self._factor)

    def _of_all_ranks(self) -> tuple[Tensor, Tensor]:
        found = of_all_ranks([self._sums.cpu(), self._largest.cpu()])
        sums = torch.stack([each[0] for each in found]).sum(0)
        return sums, torch.stack([each[1] for each in found]).amax(0)


def names_of(targets: Sequence[str]) -> list[str]:
    """Names of the metrics of some targets."""
    return [*NAMES, *(f"rmse_{name}" for name in targets if len(targets) > 1)]


def _errors(sums: Tensor, largest: Tensor, factor: Tensor) -> dict[str, Tensor]:
    count = sums[_COUNT].masked_fill(sums[_COUNT] == 0, float("nan"))
    spread = sums[_TRUTH_SQUARES] - sums[_TRUTH] ** 2 / count
    return {
        "rmse": (sums[_SQUARES] / count).sqrt() * factor,
        "mae": sums[_ABSOLUTE] / count * factor,
        "max_error": largest * factor,
        "r2": 1 - sums[_SQUARES] / spread.masked_fill(spread <= 0, float("nan")),
    }
