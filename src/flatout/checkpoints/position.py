"""Where training stands, and everything random about it: what a resumed run must find as it was.

The plan is a pure function, so a position is three numbers: the epoch, the optimizer steps taken in it, and all
optimizer steps. It holds for any number of ranks and micro-batches that make the same steps. A position lies between
two optimizer steps, never inside one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Position:
    """Between two optimizer steps."""

    epoch: int = 0
    """The epoch that is under way, counted from 0."""
    step_in_epoch: int = 0
    """Optimizer steps taken in it."""
    step: int = 0
    """Optimizer steps taken in all."""
    validated: int = -1
    """The step after which the last validation came; what is due at this step is still to be done if it is another."""

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def loops_at(position: Position, accumulate: int, batches_in_epoch: int) -> dict[str, Any]:
    """Lightning's own account of its loops, as it would be at a position."""
    batch = position.step_in_epoch * accumulate
    batches = _tracker(batch, total=position.epoch * batches_in_epoch + batch)
    epochs = {"ready": position.epoch + 1, "started": position.epoch + 1} | dict.fromkeys(
        ("processed", "completed"), position.epoch
    )
    steps = {"ready": position.step, "completed": position.step}
    is_validated = position.validated == position.step
    return {
        "fit_loop": {
            "state_dict": {
                "combined_loader": [{"epoch": position.epoch, "consumed": batch}],
            },
            "epoch_progress": {"total": dict(epochs), "current": dict(epochs)},
            "epoch_loop.state_dict": {"_batches_that_stepped": position.step - (not is_validated)},
            "epoch_loop.batch_progress": {**batches, "is_last_batch": batch >= batches_in_epoch},
            "epoch_loop.scheduler_progress": {"total": dict(steps), "current": dict(steps)},
            "epoch_loop.automatic_optimization.optim_progress": {
                "optimizer": {
                    "step": {"total": dict(steps), "current": dict(steps)},
                    "zero_grad": {"total": _zero_grads(position.step), "current": _zero_grads(position.step)},
                }
            },
        }
    }


def _zero_grads(steps: int) -> dict[str, int]:
    return dict.fromkeys(("ready", "started", "completed"), steps)


def _tracker(current: int, total: int) -> dict[str, dict[str, int]]:
    names = ("ready", "started", "processed", "completed")
    return {"total": dict.fromkeys(names, total), "current": dict.fromkeys(names, current)}
