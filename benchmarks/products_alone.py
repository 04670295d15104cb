"""Forward and backward passes of a model against their matrix products alone, over the same
batches.

A dispatch mode notes the products of each pass with what they multiplied; then these calls are made
again, one after the other. What the passes take longer is everything else: attention's softmax,
norms, dropout, casts, gathers, Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.claim import in_turn
from flatout.data.batches.flat_batch import FlatBatch
from flatout.models.lean import LeanEmbedding

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


class _Noted(TorchDispatchMode):
    """Notes each product, to be called again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name.rpartition("::")[2] in _PRODUCTS:
            self.calls.append((func, args, kwargs))
        return func(*args, **kwargs)


def passes_over_products(
    model: nn.Module,
    batches: Sequence[FlatBatch],
    loss_of: Callable[[FlatBatch], Tensor],
    rounds: int,
) -> tuple[float, int]:
    """Times that forward and backward take of their products' time, a median in turn; and products
    a batch.
    """
    noted = _Noted()

    def run_passes() -> float:
        seconds = 0.0
        for batch in batches:
            started = time.perf_counter()
            loss_of(batch).backward()
            seconds += time.perf_counter() - started
            _drop_gradients(model)
        return seconds

    def repeat_products() -> float:
        started = time.perf_counter()
        with torch.no_grad():
            for call, args, kwargs in noted.calls:
                call(*args, **kwargs)
        return time.perf_counter() - started

    lean = [module for module in model.modules() if isinstance(module, LeanEmbedding)]
    for embedding in lean:  # as in a run of ours
        embedding.keeps_gradient = True
    with noted:
        run_passes()
    ours, theirs = in_turn([run_passes, repeat_products], rounds)
    for embedding in lean:
        embedding.keeps_gradient = False
    return ours / theirs, len(noted.calls) // len(batches)


def _drop_gradients(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, LeanEmbedding):
            module.clear()
    for weight in model.parameters():
        weight.grad = None
