"""A running mean of what training changes in a model, which often answers better than its last state.

That is weights that are trained or will thaw, and running statistics. What is frozen needs no second copy.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatout.distributed.slices import share_of, whole
from flatout.models.contract import contract


class WeightAverage:
    """Follows the weights; young, it remembers less, so that it forgets where they began."""

    def __init__(self, model: nn.Module, memory: float) -> None:
        self.memory = memory
        self._weights = _changing(model)
        self._means = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self.is_in_model = False
        """Whether the mean stands in the model's place and the weights aside."""

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Move towards the weights that step `step`, counted from 0, has left."""
        memory = min(self.memory, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self._means.values()), list(self._weights.values()), 1 - memory)

    @torch.no_grad()
    def exchange(self) -> None:
        """Put the mean into the model and keep the weights aside; the second time, the other way round."""
        self.is_in_model = not self.is_in_model
        for name, weight in self._weights.items():
            kept = weight.clone()
            weight.copy_(self._means[name])
            self._means[name].copy_(kept)

    def state_dict(self) -> dict[str, Tensor]:
        """Whole means, also where each rank follows its slices; all ranks must ask at once."""
        return {name: whole(mean) for name, mean in self._means.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, mean in state.items():
            if name not in self._means:  # frozen: earlier versions kept all
                continue
            self._means[name].copy_(share_of(mean, self._means[name]))


def _changing(model: nn.Module) -> dict[str, Tensor]:
    """Weights that are trained or will be, and the running statistics that a checkpoint keeps, by name."""
    will_thaw = contract(model).unfreeze_epochs > 0
    found: dict[str, Tensor] = {
        name: weight for name, weight in model.named_parameters() if weight.requires_grad or will_thaw
    }
    kept = model.state_dict().keys()
    found |= {name: buffer for name, buffer in model.named_buffers() if name in kept and buffer.is_floating_point()}
    return found
