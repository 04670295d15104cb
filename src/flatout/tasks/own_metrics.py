"""The metrics that a task of yours adds by `configure_metrics`: checked, updated and computed.

They are objects of torchmetrics. The task keeps them in an `nn.ModuleDict`, so that they are on its
device; Lightning resets none of them by itself. A metric of others may raise anything or compute
more than one number: the errors here name it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from flatout.errors import UserError, first_line, require


def own_metrics(where: str, metrics: Mapping[str, Metric], taken: list[str]) -> nn.ModuleDict:
    """The metrics by name, once each is found to be one; `taken`: names that others have."""
    for name, metric in metrics.items():
        require(
            isinstance(metric, Metric),
            where,
            f"{name!r} is no metric of torchmetrics",
            hint="Subclass torchmetrics.Metric, or take one of torchmetrics.classification.",
        )
        is_free = name.isidentifier() and not hasattr(nn.ModuleDict, name)
        require(
            is_free and name not in taken,
            where,
            f"{name!r} cannot be the name of a metric, or is one of flatout's",
            hint="Give it another name of letters, digits and '_'.",
        )
    return nn.ModuleDict(metrics)


def update_metrics(where: str, metrics: nn.ModuleDict, answers: Tensor, targets: Tensor) -> None:
    for name, metric in metrics.items():
        assert isinstance(metric, Metric)
        try:
            metric.update(answers, targets)
        # so do metrics refuse a shape or a type
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                where,
                f"{name!r} does not take these answers: {first_line(error)}",
                hint=f"Answers are {list(answers.shape)}, targets {list(targets.shape)}.",
            ) from error


def compute_metrics(where: str, metrics: nn.ModuleDict) -> dict[str, float]:
    """The value of each metric over a split that has ended, of all ranks."""
    values = {}
    for name, metric in metrics.items():
        assert isinstance(metric, Metric)
        value = torch.as_tensor(metric.compute())
        require(
            value.numel() == 1,
            where,
            f"{name!r} computes {value.numel()} numbers",
            hint="Average them: a curve is one number.",
        )
        values[name] = float(value)
    return values
