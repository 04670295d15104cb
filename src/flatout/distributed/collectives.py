"""Sums and lists over all ranks; plain values where there is one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray


def are_several() -> bool:
    """Whether there is more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def of_all_ranks(value: Any) -> list[Any]:
    """The values of every rank, in their order; all ranks must ask at once."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sum_over_ranks(counts: NDArray[Any], device: torch.device) -> NDArray[Any]:
    """Sums of some counts over all ranks."""
    if not are_several():
        return counts
    summed = torch.from_numpy(np.asarray(counts)).to(device)
    dist.all_reduce(summed)
    return summed.cpu().numpy()
