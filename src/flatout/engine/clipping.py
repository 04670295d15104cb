"""The norm of the whole gradient, and clipping by it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatout.distributed.collectives import is_share, whole

_LEAST = 1e-6  # what torch's clipping adds to a length


def clip_gradients(parameters: list[nn.Parameter], longest: float) -> Tensor:
    """Shorten the gradient to `longest` where it is longer; its length before, still on
    the device.
    """
    return whole(nn.utils.clip_grad_norm_(parameters, longest, foreach=True))


def clip_divisor(norm: Tensor, longest: float) -> Tensor:
    """What clipping to `longest` divides a gradient of this length by, on its device; 1 where it is
    short enough.
    """
    return ((norm + _LEAST) / longest).clamp_min(1.0)


def is_fused(optimizer: Optimizer) -> bool:
    """Whether an optimizer reads `grad_scale` and `found_inf`, and divides or leaves out a step by
    itself.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def gradient_is_finite(parameters: list[nn.Parameter]) -> bool:
    """Whether the gradient has no number that is none; waits for the device."""
    # one number to wait for, of all ranks
    if parameters and (is_share(parameters[0]) or not parameters[0].is_cpu):
        return math.isfinite(gradient_length(parameters))
    # On a CPU a sum for each weight is quicker than a length; it is not finite where any of its
    # parts is not.
    return all(math.isfinite(weight.grad.sum()) for weight in parameters if weight.grad is not None)


def gradient_length(parameters: list[nn.Parameter]) -> Tensor:
    """The length of the whole gradient, still on the device."""
    gradients = [weight.grad for weight in parameters if weight.grad is not None]
    is_plain = all(type(each) is Tensor and each.is_cpu for each in gradients)
    if is_plain and len({each.dtype for each in gradients}) == 1:
        # then torch's own function, which groups them first, computes just this
        with torch.no_grad():
            return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)), 2.0)
    return whole(nn.utils.get_total_norm(gradients, foreach=True))
