"""AdamW in one kernel a group of weights, whose steps one operator counts.

torch counts the steps of each weight on the device, group by group. One operator counts on, and a
second one counts back where the step was left out. Weights with and without decay are two groups.
Here the counts of all groups are changed at once, which saves two operators of a step. All numbers
are those of torch's AdamW, and so is the state. Open this file when a new version of torch counts
in another way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

# What torch's own way to make the state is asked for, by name.
_LISTS = ("params_with_grad", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps")


def is_as_known() -> bool:
    """Whether this version of torch makes the state of AdamW as `FusedAdamW` knows it."""
    names = ("_init_group", "_group_tensors_by_device_and_dtype")
    if not all(hasattr(AdamW, name) for name in names):
        return False
    return tuple(inspect.signature(AdamW._init_group).parameters) == ("self", "group", *_LISTS)


class FusedAdamW(AdamW):
    """`torch.optim.AdamW(fused=True)` with fewer operators, for weights of one device.

    As torch's, it reads two attributes, which may be set for one step.
    """

    found_inf: Tensor | None = None
    """1 where the step is left out, else 0."""
    grad_scale: Tensor
    """What gradients are divided by. Without a value here, as torch's scaler multiplies it."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tensors_of_groups = [self._tensors_of(group) for group in self.param_groups]
        counts = [count for tensors in tensors_of_groups for count in tensors[-1]]
        if not counts:  # no weight has a gradient
            return loss
        torch._foreach_add_(counts, 1)
        for group, tensors in zip(self.param_groups, tensors_of_groups, strict=True):
            self._step_group(group, tensors)
        if self.found_inf is not None:
            torch._foreach_sub_(counts, [self.found_inf] * len(counts))
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state, also that of an AdamW that was not fused: it counts on the host."""
        groups = [{**group, "fused": True, "foreach": None} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def _tensors_of(self, group: dict[str, Any]) -> list[list[Tensor]]:
        """What the kernel gets of the weights with a gradient: the weights, gradients, two means,
        the largest second mean (empty without amsgrad), and the counts of steps.
        """
        tensors: list[list[Tensor]] = [[] for _ in _LISTS]
        make_state: Any = self._init_group  # torch's, which makes the state in the first step
        make_state(group, *tensors)
        return tensors

    def _step_group(self, group: dict[str, Any], tensors: list[list[Tensor]]) -> None:
        if not tensors[0]:  # no weight of the group has a gradient, as where layers are frozen
            return
        beta1, beta2 = group["betas"]
        # one kernel reads weights of one type
        group_by_type: Any = self._group_tensors_by_device_and_dtype
        for of_type, _ in group_by_type(tensors).values():
            torch._fused_adamw_(
                *of_type,
                amsgrad=group["amsgrad"],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
                grad_scale=self.grad_scale if hasattr(self, "grad_scale") else None,
                found_inf=self.found_inf,
            )
