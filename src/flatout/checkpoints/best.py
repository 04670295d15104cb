"""Which checkpoint is the best by a metric of the validations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L

from flatout.errors import UserError, require


@dataclass(slots=True)
class Best:
    """The best value of a metric so far, and the step it was found at."""

    monitor: str | None = None
    """Name the metric is logged under, such as `val/accuracy`; None: none is best."""
    mode: str = "max"
    min_delta: float = 0.0
    value: float | None = None
    step: int | None = None
    epoch: int | None = None
    """The epoch that it was found in, counted from 1; None after checkpoints of earlier versions, too."""

    def __post_init__(self) -> None:
        require(self.mode in ("max", "min"), "ExactCheckpoint.mode", repr(self.mode), allowed="max or min")

    def judge(self, trainer: L.Trainer, step: int) -> None:
        """Take the metric of a validation that has just ended."""
        if self.monitor is None:
            return
        logged = trainer.callback_metrics
        if self.monitor not in logged:
            hint = f"Log it in validation_step by self.log({self.monitor!r}, value), or set monitor to a logged one."
            what, known = f"no metric {self.monitor!r} was logged", ", ".join(logged) or "none"
            raise UserError("ExactCheckpoint.monitor", what, allowed=known, hint=hint)
        value = float(logged[self.monitor])
        if self._is_better(value):
            self.value, self.step, self.epoch = value, step, trainer.current_epoch + 1

    def forget(self) -> None:
        self.value = self.step = self.epoch = None

    def state_dict(self) -> dict[str, Any]:
        return {"monitor": self.monitor, "best_value": self.value, "best_step": self.step, "best_epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.step, self.epoch = state["best_value"], state["best_step"], state.get("best_epoch")

    def _is_better(self, value: float) -> bool:
        if self.value is None or self.value != self.value:
            return True
        gain = value - self.value if self.mode == "max" else self.value - value
        return gain > self.min_delta
