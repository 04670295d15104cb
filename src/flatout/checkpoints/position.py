"""Where training stands, and everything random about it: what a resumed run must find as it was.

The plan is a pure function, so a position is three numbers: the epoch, the optimizer steps taken in it, and all
optimizer steps. It holds for any number of ranks and micro-batches that make the same steps. A position lies between
two optimizer steps, never inside one.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
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
    batches_stepped: int | None = None
    """Batches that ended with a step, by which Lightning's loggers count; fewer than steps with several optimizers."""

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Batches:
    """The position in batches of one rank, as Lightning counts them."""

    in_epoch: int
    """Batches taken in the epoch that is under way."""
    in_all: int
    """Batches taken in all epochs."""
    is_last: bool
    """Whether none is left in the epoch."""
    loaders: list[Any] = field(default_factory=list)
    """States of the loaders; empty where they have none."""

    @classmethod
    def of(cls, position: Position, accumulate: int, batches_in_epoch: int) -> Batches:
        """Those of a plan with `batches_in_epoch` batches of one rank."""
        done = min(position.step_in_epoch * accumulate, batches_in_epoch)
        loader = {"epoch": position.epoch, "consumed": done}
        return cls(done, position.epoch * batches_in_epoch + done, done >= batches_in_epoch, [loader])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def loops_at(position: Position, batches: Batches) -> dict[str, Any]:
    """Lightning's own account of its loops, as it would be at a position."""
    counts = _tracker(batches.in_epoch, total=batches.in_all)
    epochs = {"ready": position.epoch + 1, "started": position.epoch + 1} | dict.fromkeys(
        ("processed", "completed"), position.epoch
    )
    steps = {"ready": position.step, "completed": position.step}
    twice = {"total": steps, "current": steps}
    is_validated = position.validated == position.step
    stepped = position.step if position.batches_stepped is None else position.batches_stepped
    return {
        "fit_loop": {
            "state_dict": {"combined_loader": batches.loaders},
            "epoch_progress": {"total": dict(epochs), "current": dict(epochs)},
            "epoch_loop.state_dict": {"_batches_that_stepped": stepped - (not is_validated)},
            "epoch_loop.batch_progress": {**counts, "is_last_batch": batches.is_last},
            "epoch_loop.scheduler_progress": copy.deepcopy(twice),
            "epoch_loop.automatic_optimization.optim_progress": {
                "optimizer": {
                    "step": copy.deepcopy(twice),
                    "zero_grad": {"total": _zero_grads(position.step), "current": _zero_grads(position.step)},
                }
            },
            "epoch_loop.manual_optimization.optim_step_progress": copy.deepcopy(twice),
        }
    }


def _zero_grads(steps: int) -> dict[str, int]:
    return dict.fromkeys(("ready", "started", "completed"), steps)


def _tracker(current: int, total: int) -> dict[str, dict[str, int]]:
    names = ("ready", "started", "processed", "completed")
    return {"total": dict.fromkeys(names, total), "current": dict.fromkeys(names, current)}
