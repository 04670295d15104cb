"""Where training stands, and everything random about it: what a resumed run must find as it was.

The plan is a pure function, so a position is three numbers: the epoch, the optimizer steps taken in it, and all
optimizer steps. It holds for any number of ranks and micro-batches that make the same steps. A position lies between
two optimizer steps, never inside one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist


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


class RandomState:
    """What the next random numbers depend on: Python's, numpy's, torch's and the device's."""

    __slots__ = ("device", "numpy", "python", "torch")

    def __init__(self, device: torch.device, *, with_others: bool = True) -> None:
        """`with_others` false leaves out Python's and numpy's, which nothing of ours draws from: 33 of 34 µs."""
        self.torch = torch.get_rng_state()
        self.device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self.python = random.getstate() if with_others else None
        self.numpy = np.random.get_state() if with_others else None

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.torch)
        if self.device is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.device, device)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            np.random.set_state(self.numpy)

    def as_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        python, numpy = self.python or random.getstate(), self.numpy or np.random.get_state()
        kind, key, *rest = numpy
        return {
            "torch": self.torch,
            "device": self.device,
            "python": python,
            "numpy": [str(kind), torch.from_numpy(np.asarray(key).astype(np.int64)), *rest],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RandomState:
        state = cls.__new__(cls)
        state.torch, state.device, state.python = values["torch"], values["device"], values["python"]
        kind, key, *rest = values["numpy"]
        restored: Any = (kind, key.numpy().astype(np.uint32), *rest)
        state.numpy = restored
        return state


def of_all_ranks(value: Any) -> list[Any]:
    """The values of every rank, in their order; all ranks must ask at once."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


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
            "epoch_loop.manual_optimization.optim_step_progress": {"total": dict(steps), "current": dict(steps)},
        }
    }


def _tracker(current: int, total: int) -> dict[str, dict[str, int]]:
    names = ("ready", "started", "processed", "completed")
    return {"total": dict.fromkeys(names, total), "current": dict.fromkeys(names, current)}


def go_on_from(trainer: L.Trainer, position: Position, restore: Callable[[], None]) -> None:
    """Let training go on behind the batch that ends at a position: `restore` runs just before, then what was due.

    Lightning has ways of its own to take up a loop inside a validation or a hook; a position is never there, so they
    are switched off once its counters are set.
    """
    loop = trainer.fit_loop.epoch_loop
    start = loop.on_run_start

    def start_again(fetcher: Any) -> None:
        del vars(loop)["on_run_start"]
        start(fetcher)
        for each in (trainer.fit_loop, loop, loop.val_loop, loop.manual_optimization, loop.automatic_optimization):
            vars(each)["_restarting"] = False
        restore()
        if position.validated != position.step:
            loop.on_advance_end(fetcher)

    vars(loop)["on_run_start"] = start_again
