"""A step of torch's fused AdamW on a CPU, without what torch puts around the kernel.

For a network of a few thousand weights these wrappers (profiler ranges, hooks that are empty, grouping by device) cost
five times the kernel itself. Kernel and arguments are the same, and so are all bits. Whatever is unusual is left to
`optimizer.step()`: another optimizer, hooks, other devices, weights without state.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

_UNUSUAL = ("amsgrad", "maximize", "differentiable", "capturable")
_AROUND = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def can_step_directly(optimizer: Optimizer) -> bool:
    """Whether `step_directly` may serve an optimizer for the length of a training."""
    if type(optimizer) is not AdamW or not hasattr(torch, "_fused_adamw_"):
        return False
    groups = optimizer.param_groups
    is_usual = all(group.get("fused") and not any(group.get(name) for name in _UNUSUAL) for group in groups)
    kinds = {(weight.device.type, weight.dtype) for group in groups for weight in group["params"]}
    is_torchs_own = getattr(inspect.unwrap(optimizer.step), "__module__", "") == "torch.optim.adam"
    return is_usual and is_torchs_own and len(kinds) == 1 and next(iter(kinds))[0] == "cpu"


@torch.no_grad()
def step_directly(optimizer: Optimizer) -> bool:
    """Take a step of an optimizer that `can_step_directly`; False, and nothing is changed, where torch has to."""
    own = vars(optimizer)
    if any(own.get(name) for name in _AROUND) or own.get("found_inf") is not None:
        return False
    found = [_gather(group, optimizer.state) for group in optimizer.param_groups]
    groups = [each for each in found if each is not None]
    if len(groups) < len(found):
        return False
    torch._foreach_add_([step for group in groups for step in group[4]], 1)
    grad_scale = own.get("grad_scale")
    for group, (weights, gradients, means, squares, steps) in zip(optimizer.param_groups, groups, strict=True):
        if weights:
            beta1, beta2 = group["betas"]
            torch._fused_adamw_(
                weights,
                gradients,
                means,
                squares,
                [],
                steps,
                amsgrad=False,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                grad_scale=grad_scale,
                found_inf=None,
            )
    own["_opt_called"] = True  # what torch's schedulers look for
    return True


def drop_gradients(optimizer: Optimizer) -> None:
    """`optimizer.zero_grad()` without a profiler range."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = None


def _gather(group: dict[str, Any], state: Any) -> tuple[list[Tensor], ...] | None:
    """Weights with a gradient, gradients, means, squares and steps; None where a weight has no state yet."""
    weights: list[Tensor] = []
    gradients: list[Tensor] = []
    means: list[Tensor] = []
    squares: list[Tensor] = []
    steps: list[Tensor] = []
    for weight in group["params"]:
        if (gradient := weight.grad) is None:
            continue
        kept = state.get(weight)
        if not kept:
            return None
        weights.append(weight)
        gradients.append(gradient)
        means.append(kept["exp_avg"])
        squares.append(kept["exp_avg_sq"])
        steps.append(kept["step"])
    return weights, gradients, means, squares, steps
