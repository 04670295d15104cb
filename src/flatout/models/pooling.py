"""From one vector a token to one a row, over padded batches whose padding must never be seen.

Shapes: B rows, L longest row, D width.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor, nn


class Pooling(StrEnum):
    """What a row's vector is made of."""

    last = "last"
    max = "max"
    mean = "mean"
    attention = "attention"


class Pool(nn.Module):
    """Max, mean or learned-attention pooling; `mask_BL` is True on real tokens, None where no row is padded."""

    def __init__(self, kind: Pooling, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.score = nn.Linear(width, 1, bias=False) if kind is Pooling.attention else None

    def forward(self, states_BLD: Tensor, lengths_B: Tensor, mask_BL: Tensor | None) -> Tensor:
        if self.kind is Pooling.max:
            if mask_BL is not None:
                states_BLD = states_BLD.masked_fill(~mask_BL.unsqueeze(-1), torch.finfo(states_BLD.dtype).min)
            return states_BLD.amax(1)
        if self.score is not None:
            scores_BL = self.score(states_BLD).squeeze(-1)
            if mask_BL is not None:
                scores_BL = scores_BL.masked_fill(~mask_BL, torch.finfo(scores_BL.dtype).min)
            return torch.einsum("bl,bld->bd", scores_BL.softmax(-1).to(states_BLD.dtype), states_BLD)
        if mask_BL is None:
            return states_BLD.mean(1)
        summed_BD = states_BLD.masked_fill(~mask_BL.unsqueeze(-1), 0).sum(1)
        return summed_BD / lengths_B.unsqueeze(1).to(summed_BD.dtype)
