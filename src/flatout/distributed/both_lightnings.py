"""One place that knows both packages of Lightning: `lightning` and `pytorch_lightning`.

The same sources are installed under two names, so each class exists twice, and an `isinstance` of
one is false for an object of the other. flatout imports `lightning`. Objects of `pytorch_lightning`
come from scripts that have imported it themselves: only then are its classes looked up.
"""

from __future__ import annotations

import sys
from inspect import getmembers, isfunction
from types import MethodType
from typing import TypeVar

from torch import nn

Part = TypeVar("Part")
_OTHER_NAMES = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}
PACKAGES = ("lightning", *_OTHER_NAMES.values())


def either(kind: type[Part]) -> tuple[type[Part], ...]:
    """A class of `lightning`, and the class of the same name in `pytorch_lightning`.

    Without the second if no one has imported `pytorch_lightning`. For `isinstance`.
    """
    # lightning.pytorch.strategies.ddp.DDPStrategy -> pytorch_lightning.strategies.ddp.DDPStrategy
    for name, other_name in _OTHER_NAMES.items():
        if kind.__module__.startswith(f"{name}."):
            module = sys.modules.get(kind.__module__.replace(name, other_name, 1))
            if hasattr(module, kind.__name__):
                return kind, getattr(module, kind.__name__)
    return (kind,)


def in_package_of(trainer: object, kind: type[Part]) -> type[Part]:
    """The class of this name in the package of a Trainer."""
    package = type(trainer).__module__.partition(".")[0]
    kinds = either(kind)
    return next((each for each in kinds if each.__module__.startswith(f"{package}.")), kind)


class InBothLightnings:
    """First base of a class whose objects Trainers of both packages take.

    A Trainer asks whether a module, a DataModule or a checkpoint callback is of its own package.
    So when an object is made and `pytorch_lightning` is there, its class becomes one of both. Not
    when the class is defined: `pytorch_lightning` is usually imported later than flatout.
    """

    def __new__(cls, *_: object, **__: object) -> InBothLightnings:
        for part in cls.__mro__:
            if InBothLightnings not in part.__bases__:
                continue
            bases = list[type]()
            for base in part.__bases__:
                packages: tuple[type, ...] = either(base)
                bases += [kind for kind in packages if kind not in bases]
            if len(bases) > len(part.__bases__):
                part.__bases__ = tuple(bases)
        return super().__new__(cls)


def adopt_hooks(module: nn.Module, base: type, trainer: object) -> None:
    """Let hooks that a module does not override be those of its Trainer's package.

    `base`: LightningModule of `lightning`. The Trainer takes any other function for an override.
    """
    other: type = either(base)[-1]
    own_base: type = in_package_of(trainer, base)
    for name, usual in getmembers(base, isfunction):
        # Lightning compares the compiled code, which is equal where a hook is empty.
        is_other = usual.__code__ != getattr(other, name).__code__
        if is_other and getattr(type(module), name) is usual:
            setattr(module, name, MethodType(getattr(own_base, name), module))
