"""The settings of a run's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from flatout.errors import check_settings, setting
from flatout.tasks.metrics import BEST_MODE


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """What counts as best, when to stop waiting for better, and how often a checkpoint is made."""

    metric: str | None = setting(
        None,
        "Validation metric to choose by, such as accuracy or macro_f1; null: the problem's usual one.",
        allowed="a metric of the problem, with a loss as val_loss, or null",
        example="macro_f1",
    )
    patience: int | None = setting(5, "Validations with no better metric before training stops; null: never.", least=1)
    min_delta: float = setting(0.0, "Least change that counts as better.", least=0, example="0.001")
    every_minutes: float | None = setting(10.0, "Minutes between checkpoints; null: only after validations.", above=0)
    every_steps: int | None = setting(None, "Steps between checkpoints; null: by time.", above=0, example="1000")

    def __post_init__(self) -> None:
        check_settings(self, "checkpoint")


def best_mode(metric: str) -> str:
    """Whether a metric is better when higher (`max`) or lower (`min`)."""
    return "min" if metric == "loss" or metric.startswith("rmse_") else BEST_MODE[metric]
