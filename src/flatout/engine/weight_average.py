"""A running mean of the weights (`optim.ema`), which often answers better than the last weights.

The mean follows the weights after each optimizer step. For validation, for the test and for the
best checkpoint a task exchanges it with the weights in the model, and back.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatout.distributed.collectives import share_of, whole
from flatout.models.contract import contract


class WeightAverage:
    """The exponential mean of all that training changes in a model: weights and running statistics.

    `memory` is the share of the old mean that stays in each step, such as 0.999.
    """

    def __init__(self, model: nn.Module, memory: float) -> None:
        self.memory = memory
        will_thaw = contract(model).unfreeze_epochs > 0
        weights = {
            name: weight
            for name, weight in model.named_parameters()
            if weight.requires_grad or will_thaw
        }
        # Running statistics, but no buffer that a checkpoint leaves out: such a one is computed
        # anew from the weights.
        checkpoint_names = model.state_dict().keys()
        statistics = {
            name: buffer
            for name, buffer in model.named_buffers()
            if name in checkpoint_names and buffer.is_floating_point()
        }
        self._weights: dict[str, Tensor] = {**weights, **statistics}
        self._means = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self.is_in_model = False
        """Whether the mean is in the model at the moment, and the weights are kept here."""
        self.share: Tensor | None = None
        """The share of the new weights on the device, where steps may be captured."""

    def share_at(self, step: int) -> float:
        """The share of the weights in the mean after optimizer step `step`, counted from 0."""
        # The first steps count more: a mean that begins at random weights would keep them for long.
        return 1 - min(self.memory, (1 + step) / (10 + step))

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Move the mean towards the weights after optimizer step `step`, counted from 0."""
        share = self.share_at(step)
        if self.share is None:
            torch._foreach_lerp_(self.means(), list(self._weights.values()), share)
        else:
            self.add_share(self.share.fill_(share))

    @torch.no_grad()
    def add_share(self, share: Tensor) -> None:
        """Move the mean by a share that lies on the device, as a captured step must."""
        means = self.means()
        steps = torch._foreach_sub(list(self._weights.values()), means)
        torch._foreach_mul_(steps, share)
        torch._foreach_add_(means, steps)

    def means(self) -> list[Tensor]:
        """The means, in the order of the weights."""
        return list(self._means.values())

    @torch.no_grad()
    def exchange(self) -> None:
        """Put the mean into the model and keep its weights here; called again, the other way."""
        self.is_in_model = not self.is_in_model
        for name, weight in self._weights.items():
            in_model = weight.clone()
            # in place: the optimizer and captured graphs know these tensors
            weight.copy_(self._means[name])
            self._means[name].copy_(in_model)

    def state_dict(self) -> dict[str, Tensor]:
        """The means as whole tensors, also where each rank has a slice; all ranks must call it."""
        return {name: whole(mean) for name, mean in self._means.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over whole means. Names that are not trained here are skipped."""
        for name, mean in state.items():
            if name in self._means:  # version 0.1 kept the means of frozen weights, too
                self._means[name].copy_(share_of(mean, self._means[name]))
