"""When steps ended: on a GPU the host is ahead, so it waits there, but only where a
time is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def wait_for_device(step: int, timed: Sequence[int]) -> None:
    """Let the GPU come to the end of this step, where its time is wanted."""
    if step in timed and torch.cuda.is_initialized():
        torch.cuda.synchronize()
