"""A running mean of a model's weights, which often answers better than the last of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatout.distributed.slices import share_of, whole


class WeightAverage:
    """Follows the weights; young, it remembers less, so that it forgets where they began."""

    def __init__(self, model: nn.Module, memory: float) -> None:
        self.memory = memory
        self._weights = dict(model.named_parameters())
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
            self._means[name].copy_(share_of(mean, self._means[name]))
