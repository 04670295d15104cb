"""The norm of the whole gradient, and clipping by it.

Where each rank holds a slice of the weights, the norm is that of all slices together. There is one
norm and one divisor for all weights of an optimizer, whatever its parameter groups. A fused
optimizer divides the gradient while it steps, so it gets `clip_divisor` as a tensor on the device,
and one pass over memory is saved. Any other optimizer gets gradients that `clip_gradients` has
shortened in place. Nothing here waits for the device but `gradient_is_finite`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatout.distributed.collectives import is_share, whole

_ADDED_TO_NORM = 1e-6  # torch's own clipping does so before it divides by the norm
_MOST_JOINED = 1 << 20  # numbers of a gradient that a GPU copies in some microseconds


def clip_gradients(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Shorten the gradient to `max_norm` where it is longer; returns its norm before."""
    return whole(nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True))


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """What a gradient of this norm is divided by to be no longer than `max_norm`, at least 1."""
    return ((norm + _ADDED_TO_NORM) / max_norm).clamp_min(1.0)


def clip_divisor_and_check(norm: Tensor, inverse_max_norm: Tensor, broken: Tensor) -> Tensor:
    """The same as `clip_divisor`; also sets `broken` to 1 where the norm is not finite.

    Else `broken` keeps its value. These are three operators where the plain way takes ten, and a
    small model's step on a GPU is as long as its list of operators.
    """
    divisor = norm + _ADDED_TO_NORM
    # torch has this function for gradients of a loss that was scaled. Here it multiplies the
    # divisor by `inverse_max_norm` in place, and sets `broken` to 1 if the divisor is not finite.
    torch._amp_foreach_non_finite_check_and_unscale_([divisor], broken, inverse_max_norm)
    return divisor.clamp_min_(1.0)


def is_fused(optimizer: Optimizer) -> bool:
    """Whether the optimizer reads the attributes `grad_scale` and `found_inf` in its step.

    Such an optimizer divides the gradient on its own, and leaves out a step that is not finite.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def gradient_is_finite(parameters: list[nn.Parameter]) -> bool:
    """Whether the gradient, summed up, is finite. Waits for the device."""
    if parameters and (is_share(parameters[0]) or not parameters[0].is_cpu):
        # one number to wait for, and the same answer on all ranks
        return math.isfinite(gradient_norm(parameters))
    # On a CPU a sum for each weight is quicker than a norm. It is not finite if a number is not. It
    # may also be beyond the largest number of the format, which counts as not finite, too.
    return all(math.isfinite(gradient.sum()) for gradient in _gradients_of(parameters))


@torch.no_grad()
def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """The norm of the whole gradient, still on the device."""
    gradients = _gradients_of(parameters)
    are_plain = all(type(gradient) is Tensor and gradient.is_cpu for gradient in gradients)
    if are_plain and len({gradient.dtype for gradient in gradients}) == 1:
        # the same numbers as torch's function below, which groups gradients by device and type
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)), 2.0)
    are_few = 0 < sum(gradient.numel() for gradient in gradients) <= _MOST_JOINED
    devices = {gradient.device for gradient in gradients}
    if are_few and len(devices) == 1 and not any(map(is_share, gradients)):
        # two operators in place of three, for one more pass over little memory
        return torch.linalg.vector_norm(torch.cat([each.flatten() for each in gradients]))
    return whole(nn.utils.get_total_norm(gradients, foreach=True))


def _gradients_of(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [weight.grad for weight in parameters if weight.grad is not None]
