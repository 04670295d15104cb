"""The settings of a run's checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from flatout.errors import check_settings, setting
from flatout.tasks.metrics import BEST_MODE

Mode = StrEnum("Mode", "auto min max")
_ERRORS = tuple(
    "loss error mae mse perplexity mape nll entropy rmsle cost hamming bits_per".split()
)
_SHORT = frozenset(
    "wer cer kl hter ppl bpc bpb ece brier distance crps mase wape fid eer deviance regret".split()
)


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """What counts as best, when to stop waiting for better, and how often a checkpoint is made."""

    metric: str | None = setting(
        None,
        "Validation metric to choose by, such as accuracy or macro_f1; null: the problem's usual"
        " one.",
        allowed="a metric of the problem, with a loss as val_loss, or null",
        example="macro_f1",
    )
    mode: Mode = setting(
        Mode.auto, "Whether a lower metric is better (min) or a higher (max); auto: by its name."
    )
    patience: int | None = setting(
        5, "Validations with no better metric before training stops; null: never.", least=1
    )
    min_delta: float = setting(0.0, "Least change that counts as better.", least=0, example="0.001")
    every_minutes: float | None = setting(
        10.0, "Minutes between checkpoints; null: only after validations.", above=0
    )
    every_steps: int | None = setting(
        None, "Steps between checkpoints; null: by time.", above=0, example="1000"
    )

    def __post_init__(self) -> None:
        check_settings(self, "checkpoint")

    def mode_of(self, metric: str) -> str:
        """Whether a metric is better when higher (`max`) or lower (`min`): as `mode` says, as
        known, or by its name.
        """
        by_name = BEST_MODE.get(metric) or ("min" if is_better_lower(metric) else "max")
        return by_name if self.mode is Mode.auto else str(self.mode)


def is_better_lower(metric: str) -> bool:
    """Whether a metric of any name is an error, by the words that people have for one."""
    name = metric.lower()
    return any(each in name for each in _ERRORS) or not _SHORT.isdisjoint(
        re.split(r"[\W\d_]+", name)
    )
