"""Small collectives (sums, maxima, lists over all ranks), and tensors sliced over ranks.

In a single process they return their argument, so callers need not ask how many ranks there are.
With several ranks, every rank has to call a collective, in the same order; a rank that does not
makes the others wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

Value = TypeVar("Value")
# How often `SharedMaximum` communicates.
_WARM_UP = 8  # calls until the first time
_SECONDS = 0.5  # between two times after that, about
_MOST_LOOKS = 256  # calls at most, however fast steps are


def are_several() -> bool:
    """Whether several ranks run and can communicate."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def of_all_ranks(value: Value) -> list[Value]:
    """The value of every rank, in the order of ranks. A collective; values are pickled."""
    values = [value]
    if not are_several():
        return values
    values *= dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sum_over_ranks(counts: NDArray[Any], device: torch.device) -> NDArray[Any]:
    """The sum of the arrays of all ranks. A collective; `device` is the rank's, for its backend."""
    if not are_several():
        return counts
    summed = torch.tensor(counts, device=device)  # a copy, as `all_reduce` works in place
    dist.all_reduce(summed)
    return summed.cpu().numpy()


def largest_of_ranks(numbers: Sequence[float], device: torch.device) -> list[float]:
    """The largest of each number over all ranks. A collective.

    [1, 5] on one rank and [2, 3] on another give [2, 5] on both.
    """
    if not are_several():
        return list(numbers)
    largest = torch.tensor([float(number) for number in numbers], device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


class SharedMaximum:
    """The largest numbers over all ranks, about twice a second.

    Communicating in each step would make the host wait for the device in each step.
    """

    def __init__(self) -> None:
        self._every = _WARM_UP
        self._looks = 0
        self._since = time.perf_counter()

    def look(self, numbers: Sequence[float], device: torch.device) -> list[float] | None:
        """The largest of each number over all ranks, or None if it is not time yet.

        A collective now and then: every rank has to call it equally often.
        """
        if not are_several():
            return list(numbers)
        self._looks += 1
        if self._looks % self._every:
            return None
        now = time.perf_counter()
        # All ranks have to communicate at the same call, but their clocks differ. So they count
        # calls, and agree on how many make half a second by the slowest rank's seconds per call.
        seconds_a_call = (now - self._since) / self._every
        *largest, slowest_s = largest_of_ranks([*numbers, seconds_a_call], device)
        self._looks = 0
        self._since = now
        self._every = min(_MOST_LOOKS, max(1, int(_SECONDS / max(slowest_s, 1e-6))))
        return largest


def is_share(tensor: Tensor) -> bool:
    """Whether this is one rank's slice of a tensor (a `DTensor`)."""
    # Importing DTensor for `isinstance` takes seconds.
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor, gathered from all ranks if it is sliced. Then a collective."""
    return cast(Any, tensor).full_tensor() if is_share(tensor) else tensor


def share_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's slice of a tensor that every rank holds whole, sliced as `like` is."""
    if not is_share(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    cut = cast(Any, like)
    return distribute_tensor(
        tensor.to(like.device), cut.device_mesh, cut.placements, src_data_rank=None
    )
