"""Sums, maxima and lists over all ranks, and tensors of which each rank holds a slice.

Where there is one process, values pass through unchanged; so do whole tensors. So code need not
know the kind.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

_WARM_UP = 8
_SECONDS = 0.5
_MOST_LOOKS = 256


def are_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def of_all_ranks(value: Any) -> list[Any]:
    """The values of every rank, in their order; all ranks must ask at once."""
    if not are_several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sum_over_ranks(counts: NDArray[Any], device: torch.device) -> NDArray[Any]:
    if not are_several():
        return counts
    summed = torch.tensor(counts, device=device)  # a copy: it is added to in place
    dist.all_reduce(summed)
    return summed.cpu().numpy()


def largest_of_ranks(numbers: Sequence[float], device: torch.device) -> list[float]:
    """The largest of each number over all ranks; all ranks must ask at once."""
    if not are_several():
        return list(numbers)
    largest = torch.tensor([float(each) for each in numbers], device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


class SharedMaximum:
    """The largest numbers of all ranks, about twice a second: to ask in each step would cost a wait
    for the device.
    """

    def __init__(self) -> None:
        self._every = _WARM_UP
        self._looks = 0
        self._since = time.perf_counter()

    def look(self, numbers: Sequence[float], device: torch.device) -> list[float] | None:
        """The largest of each number, or None where it is not time yet.

        Every rank must look equally often.
        """
        if not are_several():
            return list(numbers)
        self._looks += 1
        if self._looks % self._every:
            return None
        now = time.perf_counter()
        # Ranks count looks, as their clocks differ; the slowest rank decides for all how many make
        # half a second.
        *found, slowest_s = largest_of_ranks([*numbers, (now - self._since) / self._every], device)
        self._looks = 0
        self._since = now
        self._every = min(_MOST_LOOKS, max(1, int(_SECONDS / max(slowest_s, 1e-6))))
        return found


def is_share(tensor: Tensor) -> bool:
    """Whether other ranks hold the rest of it.

    Asked by a method of theirs: to import their class takes seconds.
    """
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; all ranks must ask at once."""
    return cast(Any, tensor).full_tensor() if is_share(tensor) else tensor


def share_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's slice of a tensor that every rank has, cut as `like` is."""
    if not is_share(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    cut = cast(Any, like)
    return distribute_tensor(
        tensor.to(like.device), cut.device_mesh, cut.placements, src_data_rank=None
    )
