"""Every private name of torch's DDP that flatout touches.

A name that is gone, or has another signature, is reported once, and the ordinary way is used.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_NAME = "_set_params_and_buffers_to_ignore_for_model"
_ARGUMENTS = ["module", "params_and_buffers_to_ignore"]


def leave_out_of_ddp(module: nn.Module, names: Sequence[str]) -> bool:
    """Let DDP wait for no gradients of these weights; False where torch has no such way.

    Large embeddings on a CPU then exchange the rows that a step has used, instead of the whole table.
    """
    method = getattr(DistributedDataParallel, _NAME, None)
    if method is None or list(inspect.signature(method).parameters) != _ARGUMENTS:
        what = f"torch {torch.__version__} has no DistributedDataParallel.{_NAME} as flatout knows it"
        warnings.warn(f"{what}: embeddings exchange whole tables", RuntimeWarning, stacklevel=2)
        return False
    method(module, list(names))
    return True
