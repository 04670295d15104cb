"""Rows of a padded batch turned round, each by itself, for the direction that reads them from their end.

Time comes first, `[L, B, D]`: L longest row, B rows, D numbers a place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def turned_places(lengths_B: Tensor, longest: int) -> Tensor:
    """`[L*B]`: for each place the one it takes when each row is turned round by itself; padding stays."""
    places_L1 = torch.arange(longest, device=lengths_B.device).unsqueeze(1)
    turned_LB = lengths_B - 1 - places_L1
    rows_B = torch.arange(len(lengths_B), device=lengths_B.device)
    return (torch.where(turned_LB >= 0, turned_LB, places_L1) * len(lengths_B) + rows_B).flatten()


def turn(states_LBD: Tensor, turned: Tensor | None) -> Tensor:
    """States with each row turned round; None: no row is padded."""
    if turned is None:
        return states_LBD.flip(0)
    found: Tensor = _Turn.apply(states_LBD, turned)
    return found


class _Turn(torch.autograd.Function):
    """Turning twice changes nothing, so the gradient is turned too: a copy, where autograd would scatter and add."""

    @staticmethod
    def forward(ctx: Any, states_LBD: Tensor, turned: Tensor) -> Tensor:
        ctx.save_for_backward(turned)
        return states_LBD.flatten(0, 1).index_select(0, turned).view(states_LBD.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient_LBD,) = gradients
        return gradient_LBD.flatten(0, 1).index_select(0, ctx.saved_tensors[0]).view(gradient_LBD.shape), None
