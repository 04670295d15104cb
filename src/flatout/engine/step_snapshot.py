"""All that a training step changes: copied, put back, and compared.

A step is tried from the same beginning more than once, plainly and by a replay (`step_graph.py`).
Open this file when a step changes something more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatout.engine.random_state import random_state, restore_random_state

if TYPE_CHECKING:
    from flatout.engine.step import Step


class StepSnapshot:
    """All that a step changes, copied."""

    def __init__(self, step: Step, means: Sequence[Tensor]) -> None:
        """`means`: running means of the weights that the step moves, too."""
        self._step = step
        self._tensors = [*tensors_of_step(step), *means]
        self._copies = copy_of(self._tensors)
        scaler = step.side.scaler
        self._scaler = None if scaler is None else scaler.state_dict()
        self._random = random_state(step.module.device, with_others=False)

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.copy_(copy)
        if self._step.side.scaler is not None and self._scaler is not None:
            self._step.side.scaler.load_state_dict(self._scaler)
        restore_random_state(self._random, self._step.module.device)

    def distance(self) -> float:
        """The largest difference of a number from when this was copied; waits for the device."""
        return distance_between(self._tensors, self._copies)


def copy_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


@torch.no_grad()
def distance_between(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest difference of a number; waits for the device."""
    if len(tensors) != len(others):
        return math.inf
    pairs = zip(tensors, others, strict=True)
    differences = [_difference(now, before) for now, before in pairs if now.numel()]
    return float(torch.stack(differences).max()) if differences else 0.0


def _difference(now: Tensor, before: Tensor) -> Tensor:
    """The largest difference of two tensors' numbers; equal infinities and NaNs have none."""
    are_equal = (now == before) | (now.isnan() & before.isnan())
    return (now.double() - before.double()).abs().masked_fill(are_equal, 0.0).max()


def tensors_of_step(step: Step) -> list[Tensor]:
    """Weights, buffers, the states of optimizer and task, and the flag of a broken step."""
    tensors: list[Tensor] = [*step.module.parameters(), *step.module.buffers()]
    tensors += optimizer_states(step)
    tensors += task_states(step)
    if step.losses.broken is not None:
        tensors.append(step.losses.broken)
    return tensors


def optimizer_states(step: Step) -> list[Tensor]:
    """The state that the optimizer keeps for all weights."""
    states = step.optimizer.state.values()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def task_states(step: Step) -> list[Tensor]:
    """What a task of flatout keeps from step to step."""
    module: Any = step.module
    tensors: list[Tensor] = module.step_tensors() if hasattr(module, "step_tensors") else []
    return tensors
