"""How much each class counts in a loss: all alike, by how rare it is, or as the settings say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import torch
from torch import Tensor

from flatout.errors import UserError, did_you_mean, require

_MOST_NAMED = 20


class ClassWeights(StrEnum):
    """Whether rare classes weigh more in the loss."""

    none = "none"
    auto = "auto"


def checked(chosen: ClassWeights, weights: Mapping[str, float]) -> dict[str, float]:
    """`task.weights`, where `task.class_weights` leaves them free."""
    is_one_way = chosen is ClassWeights.none or not weights
    require(is_one_way, "task.weights", "is set with task.class_weights=auto", hint="Leave out the one or the other.")
    return {str(name): float(weight) for name, weight in weights.items()}


def balanced(counts: Sequence[int]) -> Tensor:
    """`[C]`: all / (classes x those of the class), which is one on average over all."""
    counts_C = torch.tensor(counts, dtype=torch.float32)
    return counts_C.sum() / (len(counts) * counts_C.clamp(min=1))


def named(weights: Mapping[str, float], classes: Sequence[str]) -> Tensor | None:
    """`[C]` weights that the settings name, one for other classes; None where they name none."""
    if not weights:
        return None
    for name in weights:
        if name not in classes:
            allowed = ", ".join(classes) if len(classes) <= _MOST_NAMED else f"{len(classes):,} classes"
            raise UserError("task.weights", f"no class {name!r}", allowed=allowed, hint=did_you_mean(name, classes))
    return torch.tensor([weights.get(name, 1.0) for name in classes])
