"""Constants that are made once on a GPU and kept: zeros, 0, 1, 2, …, and the shifts of bits.

On a GPU a small model waits for the host, which launches one operator after the other. There each
step takes views of kept tensors, which launches no operator. Nothing may write to them. On a CPU
they are made each time: an exported model would hold a kept tensor of one size as a constant.

Sizes are rounded up to powers of two, so few tensors are kept. States of 5, 6 or 8 rows of 16
numbers are views of the same 128 zeros. A kept tensor never moves or ends, so a CUDA graph may
read it. What differs from step to step is copied by `on_device`, and not kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of this shape, only to be read."""
    if _is_made_each_time(device):
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    return _keep_zeros(_round_up(count), dtype, device)[:count].view(shape)


def count_up(count: int, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """`[count]`: 0, 1, 2, …, only to be read."""
    if _is_made_each_time(device):
        return torch.arange(count, dtype=dtype, device=device)
    return _keep_range(_round_up(count), dtype, device)[:count]


def shifts_of_bits(device: torch.device) -> Tensor:
    """`[8]` uint8: 7, 6, …, 0, by which the bits of a byte are shifted; only to be read."""
    return _make_shifts(device) if _is_made_each_time(device) else _keep_shifts(device)


def on_device(values: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """Values of the host on a device; on a CPU they share memory with what was given.

    To a GPU they go through page-locked memory, so the host does not wait until the device has done
    its earlier work.
    """
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _is_made_each_time(device: torch.device) -> bool:
    # A compiled model makes constants within its own kernels, so keeping them would gain nothing.
    return device.type == "cpu" or torch.compiler.is_compiling()


def _round_up(count: int) -> int:
    """The least power of two that is at least `count`: 5 → 8, 8 → 8, 0 → 1."""
    return 1 << max(0, count - 1).bit_length()


@cache
def _keep_zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _make_shareable(lambda: torch.zeros(count, dtype=dtype, device=device))


@cache
def _keep_range(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _make_shareable(lambda: torch.arange(count, dtype=dtype, device=device))


@cache
def _keep_shifts(device: torch.device) -> Tensor:
    return _make_shareable(lambda: _make_shifts(device))


def _make_shifts(device: torch.device) -> Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)


def _make_shareable(function: Callable[[], Tensor]) -> Tensor:
    """The tensor of `function`, which any step may read, on any stream; waits until it is there."""
    # If a validation asks first, its inference mode would make a tensor that training cannot use.
    with torch.inference_mode(False):
        tensor = function()
    if tensor.device.type == "cuda":
        # Other streams do not wait for the one that fills it; this happens once for each size.
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor
