"""Both directions of a recurrent layer at the same time on a GPU.

An LSTM is a chain of small kernels, and one direction alone leaves most of a GPU idle. Autograd runs each part of the
backward pass on the stream of its forward pass. Among several ranks both stay on one stream, as DDP needs.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn


def run_both(ahead: nn.Module, back: nn.Module, inputs: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    """States of both directions, `back` over rows that are turned round; on a GPU it has a stream of its own."""
    device = inputs.device
    if not _has_streams(device):
        return ahead(inputs)[0], back(turned)[0]
    here, beside = torch.cuda.current_stream(device), _stream_beside(device)
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        back_states: Tensor = back(turned)[0]
    ahead_states: Tensor = ahead(inputs)[0]
    here.wait_stream(beside)
    turned.record_stream(beside)  # else its memory might be used again while the other stream reads it
    back_states.record_stream(here)
    return ahead_states, back_states


def _has_streams(device: torch.device) -> bool:
    is_alone = not (dist.is_available() and dist.is_initialized())
    return device.type == "cuda" and is_alone and not torch.compiler.is_compiling()


@cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
