"""From one vector a token to one a row, over padded batches whose padding must never be seen.

Shapes: B rows, L longest row, D width, of which the first half was read forwards and the second backwards.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor, nn

from flatout.models.flops import Product, between, through


class Pooling(StrEnum):
    """What a row's vector is made of."""

    last = "last"
    max = "max"
    mean = "mean"
    attention = "attention"


class Pool(nn.Module):
    """Final states, max, mean or learned attention; `mask_BL` is True on real tokens, None where no row is padded."""

    def __init__(self, kind: Pooling, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.score = nn.Linear(width, 1, bias=False) if kind is Pooling.attention else None

    def forward(self, states_BLD: Tensor, lengths_B: Tensor, mask_BL: Tensor | None) -> Tensor:
        if self.kind is Pooling.last:
            return _ends(states_BLD, None if mask_BL is None else lengths_B)
        if self.kind is Pooling.max:
            if mask_BL is not None:
                states_BLD = states_BLD + padding_bias(mask_BL, states_BLD.dtype).unsqueeze(-1)
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

    def products(self, tokens: float) -> list[Product]:
        """Learned attention scores each token and sums up by the scores; the others multiply nothing."""
        if self.score is None:
            return []
        return [through(tokens, self.score.weight), between(2 * tokens * self.score.in_features)]


def padding_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Zero on what is real and the least number elsewhere: added before a maximum it hides padding.

    Unlike filling, adding needs no pass of its own over the gradient.
    """
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def _ends(states_BLD: Tensor, lengths_B: Tensor | None) -> Tensor:
    """What each direction holds when it has read the whole row: forwards at its last token, backwards at its first."""
    half = states_BLD.shape[-1] // 2
    if lengths_B is None:
        ahead_BH = states_BLD[:, -1, :half]
    else:
        last_B1H = (lengths_B - 1).view(-1, 1, 1).expand(-1, 1, half)
        ahead_BH = states_BLD[..., :half].gather(1, last_B1H).squeeze(1)
    return torch.cat([ahead_BH, states_BLD[:, 0, half:]], -1)
