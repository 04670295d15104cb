"""The learning rate of each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class StepSchedule(LRScheduler):
    """Sets every group's rate to `rate_at(step)` times the group's `lr_share`; its whole state is
    one number.
    """

    def __init__(self, optimizer: Optimizer, rate_at: Callable[[int], float]) -> None:
        self.rate_at = rate_at
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        rate = self.rate_at(self.last_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_share"]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["step"] - 1
        self.step()
