"""Where each place of a padded batch goes when every row is turned round by itself."""

from __future__ import annotations

import torch
from torch import Tensor


def turned_places(lengths_B: Tensor, longest: int) -> Tensor:
    """`[B*L]`: for each place of the batch the one it takes when each row is turned round by itself; padding stays."""
    places_L = torch.arange(longest, device=lengths_B.device)
    turned_BL = lengths_B.unsqueeze(1) - 1 - places_L
    starts_B = torch.arange(lengths_B.shape[0], device=lengths_B.device) * longest
    return (torch.where(turned_BL >= 0, turned_BL, places_L) + starts_B.unsqueeze(1)).flatten()
