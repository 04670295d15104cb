"""Batches of any make, known by their signature, and copied into buffers for captured steps.

A captured step reads its tensors from fixed addresses, and repeats each plain number that it has
seen. So two batches can share a capture only if their tensors have equal shapes and types, and all
else in them is equal. That is their signature:

    {"x": a tensor [8, 3], "scale": 0.5}   ->   dict, "x", float32 [8, 3], "scale", 0.5

Lists, tuples, mappings and dataclasses are looked into. Open this file to add another container.
Batches of flatout's own feeds have `shapes.py`, which pads them to few shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype)
"""What a batch may hold beside tensors."""


@dataclass(frozen=True, slots=True)
class Signature:
    """All of a batch that a captured step fixes."""

    parts: tuple[object, ...]

    def __str__(self) -> str:
        shapes = [str(list(part[0])) for part in self.parts if isinstance(part, tuple)]
        return ", ".join(shapes[:4])


class Signatures:
    """Brings batches of any make to the buffer of their signature."""

    plain_first = 3
    """So many batches of a signature train plainly: most of many shapes come too rarely."""
    most = 8  # signatures that are captured

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def shape_of(self, batch: object) -> Signature | str:
        """The signature of a batch, or in words why it has none."""
        parts = list[object]()
        for leaf in leaves_of(batch):
            if isinstance(leaf, Tensor):
                if leaf.device.type != self._device.type:
                    return "with tensors that are not on the device"
                if leaf.layout is not torch.strided:
                    return "with sparse tensors"
                if leaf.requires_grad:
                    return "with tensors that want a gradient"
                parts.append((tuple(leaf.shape), leaf.stride(), leaf.dtype))
            elif isinstance(leaf, _PLAIN):
                # as text, as True equals 1, and NaN does not equal itself
                parts.append(repr(leaf))
            else:
                return f"that hold a {type(leaf).__name__}"
        return Signature(tuple(parts))

    def make(self, shape: Signature, batch: object) -> object:
        """A buffer with a copy of each tensor of a batch."""
        return change_tensors(batch, lambda tensor: tensor.detach().clone())

    def fill(self, buffer: object, batch: object) -> object:
        """Copy a batch into a buffer of its signature, which is returned; nothing waits."""
        for target, source in zip(tensors_of(buffer), tensors_of(batch), strict=True):
            target.copy_(source)
        return buffer

    def release(self, buffer: object) -> None:
        """Do nothing: a buffer keeps no batch."""

    def count_tokens(
        self, shapes: Sequence[Signature], batches: Sequence[object]
    ) -> tuple[int, int]:
        """As many as there are batches, as nothing is padded."""
        return len(batches), len(batches)


def leaves_of(value: object) -> Iterator[object]:
    """Tensors and values in their order; a container gives its type first, and its keys."""
    if isinstance(value, Mapping):
        yield type(value)
        for key, part in value.items():
            yield key
            yield from leaves_of(part)
    elif isinstance(value, list | tuple):
        yield type(value)
        yield len(value)
        for part in value:
            yield from leaves_of(part)
    elif is_dataclass(value) and not isinstance(value, type):
        yield type(value)
        for field in fields(value):
            yield from leaves_of(getattr(value, field.name))
    else:
        yield value


def tensors_of(value: object) -> list[Tensor]:
    """All tensors of a batch, in order."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def change_tensors(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """The same containers with other tensors."""
    return cast(T, _change(value, change))


def _change(value: object, change: Callable[[Tensor], Tensor]) -> object:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        # a copy keeps its class, such as that of a tokenizer's batch, which can be written to
        copied = cast(MutableMapping[object, object], copy.copy(value))
        for key, part in value.items():
            copied[key] = _change(part, change)
        return copied
    if isinstance(value, list | tuple):
        parts = [_change(part, change) for part in value]
        kind: Callable[..., object] = type(value)
        # a named tuple takes its parts one by one
        return kind(*parts) if hasattr(value, "_fields") else kind(parts)
    if is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in fields(value):
            # past `__setattr__`, which a frozen one refuses
            object.__setattr__(changed, field.name, _change(getattr(value, field.name), change))
        return changed
    return value
