"""The running mean of the weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatout.distributed.collectives import share_of, whole
from flatout.models.contract import contract


class WeightAverage:
    """A running mean of all that training changes in a model (weights, statistics); it often
    answers better.
    """

    def __init__(self, model: nn.Module, memory: float) -> None:
        self.memory = memory
        will_thaw = contract(model).unfreeze_epochs > 0
        kept = model.state_dict().keys()  # of running statistics those that a checkpoint has
        weights = {
            name: each for name, each in model.named_parameters() if each.requires_grad or will_thaw
        }
        buffers = {
            name: each
            for name, each in model.named_buffers()
            if name in kept and each.is_floating_point()
        }
        self._weights: dict[str, Tensor] = {**weights, **buffers}
        self._means = {name: weight.detach().clone() for name, weight in self._weights.items()}
        # whether the mean stands in the model's place and the weights aside
        self.is_in_model = False

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Move towards the weights that step `step`, counted from 0, has left."""
        memory = min(self.memory, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self._means.values()), list(self._weights.values()), 1 - memory)

    @torch.no_grad()
    def exchange(self) -> None:
        """Put the mean into the model and keep the weights aside; the second time, the other way
        round.
        """
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
            if name in self._means:  # earlier versions kept what is frozen, too
                self._means[name].copy_(share_of(mean, self._means[name]))
