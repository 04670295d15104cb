"""The norm of the whole gradient, and clipping by it; slices of several ranks count as one gradient."""

from __future__ import annotations

import math

import torch
from torch import nn

from flatout.distributed.collectives import is_share, whole

_LEAST = 1e-6
"""What torch's clipping adds to a length."""


def clip_gradients(parameters: list[nn.Parameter], longest: float) -> torch.Tensor:
    """Shorten the gradient to `longest` where it is longer; its length before, still on the device."""
    return whole(nn.utils.clip_grad_norm_(parameters, longest, foreach=True))


def clip_divisor(norm: torch.Tensor, longest: float) -> torch.Tensor:
    """What clipping to `longest` divides a gradient of this length by, on its device; 1 where it is short enough."""
    return ((norm + _LEAST) / longest).clamp_min(1.0)


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer reads `grad_scale` and `found_inf`, and divides or leaves out a step by itself."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def gradient_is_finite(parameters: list[nn.Parameter]) -> bool:
    """Whether the gradient has no number that is none; waits for the device."""
    if parameters and (is_share(parameters[0]) or not parameters[0].is_cpu):  # one number to wait for, of all ranks
        return math.isfinite(gradient_length(parameters))
    # On a CPU a sum for each weight is quicker than a length; it is not finite where any of its parts is not.
    return all(math.isfinite(weight.grad.sum()) for weight in parameters if weight.grad is not None)


def gradient_length(parameters: list[nn.Parameter]) -> torch.Tensor:
    """The length of the whole gradient, still on the device."""
    gradients = [weight.grad for weight in parameters if weight.grad is not None]
    if _are_alike(gradients):  # then torch's own function, which groups them first, computes just this
        with torch.no_grad():
            return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)), 2.0)
    return whole(nn.utils.get_total_norm(gradients, foreach=True))


def _are_alike(gradients: list[torch.Tensor]) -> bool:
    """Whether gradients are plain tensors of one type on a CPU."""
    kinds = {each.dtype for each in gradients}
    return len(kinds) == 1 and all(type(each) is torch.Tensor and each.is_cpu for each in gradients)
