"""Refuse a model that cannot fit into memory, before minutes pass in building it.

torch's meta device builds a model without memory for its numbers. A million layers would still take
minutes there, so models of one and of two layers are built, and their difference is the price of a
layer:

    bytes(1 layer) = 10    bytes(2 layers) = 14    →    bytes(5 layers) = 10 + 4 · (14 - 10) = 26

This costs 20 to 100 ms a run. The estimate is a lower bound: activations come on top. They are no
reason to refuse, as a batch that does not fit is cut into pieces (`run/micro_batches.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from flatout.data.batches.feed import free_memory
from flatout.errors import UserError
from flatout.models.encoder.transformer import ALL

Build = Callable[[Any], nn.Module]  # a network from the settings of a model
_COPIES_TRAINED = 4  # a trained weight has a gradient and AdamW's two moments beside it
_COUNTS = ("layers", "depth")  # settings that count layers, of one family or another
# settings that decide how large a model is
_SIZES = (*_COUNTS, "hidden", "intermediate", "filters", "widths", "embedding")


def require_memory(settings: Any, build: Build, device: torch.device, copies: float = 1.0) -> None:
    """Refuse a model from scratch that a device cannot hold.

    `copies`: how many of them its memory must hold; below 1 where ranks hold a slice each.
    """
    if not dataclasses.is_dataclass(settings) or getattr(settings, "pretrained", None) is not None:
        return  # a network of your own is built already, and pretrained weights exist
    try:
        needed = int(training_bytes(settings, build) * copies)
    except UserError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError):
        # some families of transformers cannot be built without memory, or not with other numbers of
        # layers
        return
    free = free_memory(device)
    if needed <= free:
        return
    largest_first = _order_by_growth(settings)
    name = largest_first[0]
    keys = [f"model.{size}" for size in largest_first[:2]]
    raise UserError(
        f"model.{name}={getattr(settings, name)}",
        f"needs about {_format_bytes(needed)} for weights, gradients and optimizer,"
        f" {_format_bytes(free)} are free",
        hint=f"Lower {' or '.join(keys)}.",
    )


def training_bytes(settings: Any, build: Build) -> int:
    """Bytes of weights, gradients and optimizer state of the model that these settings describe."""
    layers = _count_layers(settings)
    frozen = _count_frozen(settings, layers)
    first = _bytes_of(settings, build, layers=1, frozen=min(1, frozen))
    if layers == 1:
        return first
    one = _bytes_of(settings, build, layers=1, frozen=0)
    two = _bytes_of(settings, build, layers=2, frozen=0)
    trained_layer = two - one
    # the first layer is counted in `first`
    more_frozen = max(0, frozen - 1)
    more_trained = layers - 1 - more_frozen
    return first + more_trained * trained_layer + more_frozen * trained_layer // _COPIES_TRAINED


def _count_layers(settings: Any) -> int:
    for name in _COUNTS:
        if hasattr(settings, name):
            return int(getattr(settings, name))
    return 1


def _count_frozen(settings: Any, layers: int) -> int:
    """Layers that are never trained; those that join the training later count as trained."""
    if getattr(settings, "unfreeze_epochs", 0):
        return 0
    frozen = getattr(settings, "freeze_layers", 0)
    return layers if frozen == ALL else min(layers, frozen)


def _bytes_of(settings: Any, build: Build, *, layers: int, frozen: int) -> int:
    """Bytes of the same model with another number of layers, built on the meta device."""
    changes: dict[str, Any] = {
        **dict.fromkeys(_COUNTS, layers),
        "freeze_layers": frozen,
        "unfreeze_epochs": 0.0,
        # a file of vectors would be read
        "vectors": None,
        "freeze_vectors": False,
        "reuse": False,
    }
    if hasattr(settings, "lora"):
        # beside all layers: those that are named may not be among the few
        changes["lora"] = dataclasses.replace(settings.lora, targets=[])
    known_changes = {name: value for name, value in changes.items() if hasattr(settings, name)}
    with torch.device("meta"), _DrawNothing():
        model = build(dataclasses.replace(settings, **known_changes))
    if getattr(settings, "freeze_vectors", False):
        model.get_submodule("embedding").requires_grad_(False)
    total = 0
    for weight in model.parameters():
        total += weight.nbytes * (_COPIES_TRAINED if weight.requires_grad else 1)
    return total


class _DrawNothing(TorchFunctionMode):
    """Inside it no random numbers are drawn, and lists become tensors on the CPU.

    On the meta device torch would import its compiler for either, in seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_"):
            return args[0] if args else keywords["tensor"]
        if func is torch.tensor:
            keywords = {"device": "cpu", **keywords}
        return func(*args, **keywords)


def _order_by_growth(settings: Any) -> list[str]:
    """Settings of sizes, the one that is the largest multiple of its default first."""
    sizes = [name for name in _SIZES if getattr(settings, name, None) is not None]
    return sorted(sizes, key=lambda name: -_growth(settings, name))


def _growth(settings: Any, name: str) -> float:
    """How many times its default a size is; for one without a default, as large as `hidden`."""
    value = getattr(settings, name)
    default = getattr(type(settings)(), name)
    if isinstance(value, list):
        return sum(value) / sum(default)
    return float(value / (default or getattr(settings, "hidden", value)))


def _format_bytes(num_bytes: int) -> str:
    """`12_300_000_000` → `12 GB`, `1_200_000` → `1.2 MB`."""
    amount = num_bytes / 1e6
    units = ["MB", "GB", "TB", "PB", "EB"]
    while amount >= 1000 and len(units) > 1:
        amount = amount / 1000
        units = units[1:]
    digits = 1 if amount < 10 else 0
    return f"{amount:,.{digits}f} {units[0]}"
