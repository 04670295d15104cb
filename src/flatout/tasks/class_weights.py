"""How much each class counts in a loss: all alike, by how rare it is, or as the settings say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

import torch
from torch import Tensor

from flatout.errors import UserError, as_choice, did_you_mean, require

_MOST_NAMED = 20


class ClassWeights(StrEnum):
    """Whether rare classes weigh more in the loss."""

    none = "none"
    auto = "auto"


def checked(choice: object, weights: Mapping[str, float]) -> tuple[ClassWeights, dict[str, float]]:
    """`task.class_weights` and `task.weights`, of which one may be set."""
    chosen = as_choice(ClassWeights, choice, "task.class_weights")
    for name, weight in weights.items():
        require(0 <= weight < math.inf, f"task.weights.{name}", f"{weight}", allowed="0 or more")
    is_one_way = chosen is ClassWeights.none or not weights
    require(is_one_way, "task.weights", "is set with task.class_weights=auto", hint="Leave out the one or the other.")
    return chosen, {str(name): float(weight) for name, weight in weights.items()}


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
