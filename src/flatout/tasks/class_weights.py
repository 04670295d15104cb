"""Weights of classes in a loss: equal, by how rare a class is, or as the settings name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from flatout.errors import UserError, check_settings, did_you_mean, require, setting

_MOST_NAMED = 20
ClassWeights = StrEnum("ClassWeights", "none auto")


@dataclass(kw_only=True, slots=True)
class NamedClassesConfig:
    """The loss of a task that answers classes, or tags, by name."""

    class_weights: ClassWeights = setting(
        ClassWeights.none,
        "auto: each class or tag weighs by the inverse of its share in training; one on average.",
    )
    weights: dict[str, float] = setting(
        dict,
        "Weight of a class, or of a tag, by its name, for those that are not to weigh 1; instead of"
        " class_weights.",
        least=0,
        allowed="0 or more, for classes or tags by name",
        example="+task.weights.sport=2",
    )
    label_smoothing: float = setting(
        0.0,
        "Share of a target spread over all classes or tags; of several, over present and absent.",
        least=0,
        below=1,
    )

    def __post_init__(self) -> None:
        check_settings(self, "task")
        is_one_way = self.class_weights is ClassWeights.none or not self.weights
        require(
            is_one_way,
            "task.weights",
            "is set with task.class_weights=auto",
            hint="Leave out the one or the other.",
        )
        self.weights = {str(name): float(weight) for name, weight in self.weights.items()}


def balanced(counts: Sequence[int]) -> Tensor:
    """`[C]`: rows / (classes x rows of the class): of 6 and 2 rows in 2 classes [0.67, 2].

    Averaged over all rows, the weight is 1: (6 · 0.67 + 2 · 2) / 8.
    """
    counts_C = torch.tensor(counts, dtype=torch.float32)
    return counts_C.sum() / (len(counts) * counts_C.clamp(min=1))


def named(weights: Mapping[str, float], classes: Sequence[str]) -> Tensor | None:
    """`[C]` weights that the settings name, one for other classes; None where they name none."""
    if not weights:
        return None
    for name in weights:
        if name not in classes:
            allowed = (
                ", ".join(classes) if len(classes) <= _MOST_NAMED else f"{len(classes):,} classes"
            )
            raise UserError(
                "task.weights",
                f"no class {name!r}",
                allowed=allowed,
                hint=did_you_mean(name, classes),
            )
    return torch.tensor([weights.get(name, 1.0) for name in classes])
