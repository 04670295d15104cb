"""Refuse a model whose training cannot fit into memory, before minutes pass in building it.

Torch's meta device builds a model without memory for its numbers. A million layers would still take minutes there, so
models of one and of two layers are built, and their difference is the price of a layer. This costs 20 to 100 ms a run.
The estimate is a lower bound: activations come on top. Batches shrink where those do not fit; weights do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from flatout.data.batches.feed import free_memory
from flatout.engine.limits import free_bytes
from flatout.errors import UserError

Build = Callable[[Any], nn.Module]
_COPIES_TRAINED = 4
"""A trained weight has a gradient and AdamW's two moments beside it."""
_COUNTS = ("layers", "depth")
_SIZES = (*_COUNTS, "hidden", "intermediate", "filters", "widths", "embedding")
"""Settings that decide how large a model is."""


def require_memory(settings: Any, build: Build, device: torch.device, copies: float = 1.0) -> None:
    """Refuse a model from scratch that a device cannot hold for training.

    `copies`: models this memory must hold, below 1 where devices share one. Other models have their weights already.
    """
    if not dataclasses.is_dataclass(settings) or getattr(settings, "pretrained", None) is not None:
        return
    try:
        needed = int(training_bytes(settings, build) * copies)
    except UserError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError):
        return  # some families of transformers cannot be built without memory, or not with other numbers of layers
    free = free_bytes() if device.type == "cpu" else free_memory(device)
    if needed > free:
        raise _too_large(settings, needed, free)


def training_bytes(settings: Any, build: Build) -> int:
    """Bytes of weights, gradients and optimizer state of the model that these settings describe."""
    layers = next((getattr(settings, name) for name in _COUNTS if hasattr(settings, name)), 1)
    frozen = 0 if getattr(settings, "unfreeze_epochs", 0) else min(layers, getattr(settings, "freeze_layers", 0))
    first = _bytes_of(settings, build, layers=1, frozen=min(1, frozen))
    if layers == 1:
        return first
    a_layer = _bytes_of(settings, build, layers=2, frozen=0) - _bytes_of(settings, build, layers=1, frozen=0)
    is_free = max(0, frozen - 1)  # the first layer is counted above
    return first + (layers - 1 - is_free) * a_layer + is_free * a_layer // _COPIES_TRAINED


def _bytes_of(settings: Any, build: Build, *, layers: int, frozen: int) -> int:
    """Bytes of a model with few layers."""
    changes: dict[str, Any] = {**dict.fromkeys(_COUNTS, layers), "freeze_layers": frozen, "unfreeze_epochs": 0.0}
    changes |= {"vectors": None, "freeze_vectors": False}
    small = dataclasses.replace(settings, **{name: each for name, each in changes.items() if hasattr(settings, name)})
    with torch.device("meta"), _DrawNothing():
        model = build(small)
    if getattr(settings, "freeze_vectors", False):
        model.get_submodule("embedding").requires_grad_(False)
    return sum(weight.nbytes * (_COPIES_TRAINED if weight.requires_grad else 1) for weight in model.parameters())


class _DrawNothing(TorchFunctionMode):
    """Leaves out random numbers, and keeps lists as they are on the host.

    To compute with either on the meta device, torch imports its compiler, which takes seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_"):
            return args[0] if args else given["tensor"]
        if func is torch.tensor:
            given = {"device": "cpu", **given}
        return func(*args, **given)


def _too_large(settings: Any, needed: int, free: int) -> UserError:
    """Names the two sizes that are furthest above their defaults."""
    growth = {name: _growth(settings, name) for name in _SIZES if getattr(settings, name, None) is not None}
    first, *others = sorted(growth, key=lambda name: -growth[name])
    what = f"needs about {_in_units(needed)} for weights, gradients and optimizer, {_in_units(free)} are free"
    lower = " or ".join(f"model.{name}" for name in (first, *others[:1]))
    return UserError(f"model.{first}={getattr(settings, first)}", what, hint=f"Lower {lower}.")


def _growth(settings: Any, name: str) -> float:
    """How many times as large as by default a setting is."""
    value, usual = getattr(settings, name), getattr(type(settings)(), name)
    if isinstance(value, list):
        return sum(value) / sum(usual)
    return float(value / (usual or getattr(settings, "hidden", value)))


def _in_units(num_bytes: int) -> str:
    amount, names = num_bytes / 1e6, ["MB", "GB", "TB", "PB", "EB"]
    while amount >= 1000 and len(names) > 1:
        amount, names = amount / 1000, names[1:]
    return f"{amount:,.{1 if amount < 10 else 0}f} {names[0]}"
