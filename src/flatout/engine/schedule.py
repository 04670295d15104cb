"""The learning rate of each optimizer step, as a schedule of torch.

`OptimConfig.lr_at` computes the rate of a step from the settings; `StepSchedule` gives it to the
optimizer's groups after each step. Open this file to change how a rate reaches the groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class StepSchedule(LRScheduler):
    """Sets the rate of every group to `rate_at(step)` times the `lr_share` of the group.

    `rate_at` gets the number of the optimizer step, counted from 0. The `lr_share` of a group is 1,
    or smaller for lower layers where `optim.layer_decay` is set. A checkpoint keeps the step alone.
    """

    def __init__(self, optimizer: Optimizer, rate_at: Callable[[int], float]) -> None:
        self.rate_at = rate_at
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next step. `epoch` is torch's, and not used."""
        self.last_epoch += 1
        rate = self.rate_at(self.last_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_share"]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the rates as they were when the state was taken."""
        self.last_epoch = state_dict["step"] - 1
        self.step()
