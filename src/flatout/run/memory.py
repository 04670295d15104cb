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

from flatout.data.batches.feed import free_memory
from flatout.errors import LARGEST_SEED, UserError
from flatout.models.contract import ModelConfig, is_pretrained
from flatout.models.encoder.transformer import ALL
from flatout.models.without_memory import without_memory

# makes a network from the settings of a model
Build = Callable[[ModelConfig], nn.Module]
_COPIES_TRAINED = 4  # a trained weight has a gradient and AdamW's two moments beside it
_COUNTS = ("layers", "depth")  # settings that count layers, of one family or another
# settings that decide how large a model is
_SIZES = (*_COUNTS, "hidden", "intermediate", "filters", "widths", "embedding")


def require_memory(
    settings: ModelConfig | nn.Module, build: Build, device: torch.device, copies: float = 1.0
) -> None:
    """Refuse a model from scratch that a device cannot hold.

    `copies`: how many of them its memory must hold; below 1 where ranks hold a slice each.
    """
    # A network of your own is built already, and pretrained weights exist.
    if isinstance(settings, nn.Module) or is_pretrained(settings):
        return
    try:
        needed = int(training_bytes(settings, build) * copies)
    except UserError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        # some families of transformers cannot be built without memory, or not with other numbers of
        # layers
        if "overflow" not in str(error):
            return
        needed = LARGEST_SEED  # more bytes than 64 bits count
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


def training_bytes(settings: ModelConfig, build: Build) -> int:
    """Bytes of weights, gradients and optimizer state of the model that these settings describe."""
    values = _values_of(settings)
    layers = _count_layers(values)
    frozen = _count_frozen(values, layers)
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


def _values_of(settings: ModelConfig) -> dict[str, Any]:
    """Settings by their names. Families differ in those that they have."""
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}


def _count_layers(values: dict[str, Any]) -> int:
    for name in _COUNTS:
        if name in values:
            return int(values[name])
    return 1


def _count_frozen(values: dict[str, Any], layers: int) -> int:
    """Layers that are never trained; those that join the training later count as trained."""
    if values.get("unfreeze_epochs"):
        return 0
    frozen = values.get("freeze_layers", 0)
    return layers if frozen == ALL else min(layers, frozen)


def _bytes_of(settings: ModelConfig, build: Build, *, layers: int, frozen: int) -> int:
    """Bytes of the same model with another number of layers, built on the meta device."""
    values = _values_of(settings)
    changes: dict[str, Any] = {
        **dict.fromkeys(_COUNTS, layers),
        "freeze_layers": frozen,
        "unfreeze_epochs": 0.0,
        # a file of vectors would be read
        "vectors": None,
        "freeze_vectors": False,
        "reuse": False,
    }
    if "lora" in values:
        # beside all layers: those that are named may not be among the few
        changes["lora"] = dataclasses.replace(values["lora"], targets=[])
    known_changes = {name: value for name, value in changes.items() if name in values}
    with without_memory():
        model = build(dataclasses.replace(settings, **known_changes))
    if values.get("freeze_vectors"):
        model.get_submodule("embedding").requires_grad_(False)
    return bytes_to_train(model)


def bytes_to_train(module: nn.Module) -> int:
    """Bytes of the weights; of trained ones with their gradient and AdamW's two moments."""
    total = 0
    for weight in module.parameters():
        total += weight.nbytes * (_COPIES_TRAINED if weight.requires_grad else 1)
    return total


def _order_by_growth(settings: ModelConfig) -> list[str]:
    """Settings of sizes, the one that is the largest multiple of its default first.

    layers 24 (default 4), hidden 512 (default 256)    →    layers (6 times), hidden (2 times)
    """
    values = _values_of(settings)
    defaults = _values_of(type(settings)())
    growth: dict[str, float] = {}
    for name in _SIZES:
        value = values.get(name)
        if isinstance(value, list):
            growth[name] = sum(value) / sum(defaults[name])
        elif value is not None:
            # a size without a default is as large as `hidden` by default
            usual = defaults[name] or values.get("hidden", value)
            growth[name] = value / usual
    return sorted(growth, key=lambda name: -growth[name])


def _format_bytes(num_bytes: int) -> str:
    """`12_300_000_000` → `12 GB`, `1_200_000` → `1.2 MB`."""
    amount = num_bytes / 1e6
    units = ["MB", "GB", "TB", "PB", "EB"]
    while amount >= 1000 and len(units) > 1:
        amount = amount / 1000
        units = units[1:]
    digits = 1 if amount < 10 else 0
    return f"{amount:,.{digits}f} {units[0]}"
