"""The settings of a run's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from flatout.errors import require
from flatout.tasks.metrics import BEST_MODE


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """What counts as best, when to stop waiting for better, and how often a checkpoint is made."""

    metric: str | None = None
    """Validation metric to choose by, such as accuracy or macro_f1; null: the problem's usual one."""
    patience: int | None = 5
    """Validations without a better metric before training stops; null: never."""
    min_delta: float = 0.0
    """Least change that counts as better."""
    every_minutes: float | None = 10.0
    """Minutes between two checkpoints while training; null: only after validations."""
    every_steps: int | None = None
    """Optimizer steps between two checkpoints; null: minutes decide."""

    def __post_init__(self) -> None:
        ok = self.patience is None or self.patience >= 1
        require(ok, "checkpoint.patience", f"{self.patience}", allowed="1 or more, or null")
        require(self.min_delta >= 0, "checkpoint.min_delta", f"{self.min_delta}", allowed="0 or more")
        for name in ("every_minutes", "every_steps"):
            value = getattr(self, name)
            require(value is None or value > 0, f"checkpoint.{name}", f"{value}", allowed="above 0, or null")


def best_mode(metric: str) -> str:
    """Whether a metric is better when higher (`max`) or lower (`min`)."""
    return "min" if metric == "loss" or metric.startswith("rmse_") else BEST_MODE[metric]
