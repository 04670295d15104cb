"""Deep copies that share large arrays and tables, for tries of other ways to train.

Of a module, its optimizers and its data that is copied which a step or a read may change. No
Lightning is needed. Where something cannot be copied, `Refused` says so in one sentence.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flatout.engine.random_state import random_state, restore_random_state
from flatout.errors import first_line
from flatout.perf.verdict.ways import Refused

# Packages whose objects are shared, not copied: some would copy a whole table.
_TABLES = ("pandas", "pyarrow", "polars", "datasets", "h5py", "zarr")
_MANY = 10_000  # items; longer containers are shared
_LARGE_BYTES = 1 << 16  # larger arrays are shared
_MOST_OBJECTS = 300_000  # a data set of more objects is not searched for large ones


@contextmanager
def nothing_stays(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Context manager that puts back what tries inside it change in the whole process.

    That is the gradients and buffers of `module`, random numbers, threads and logging. What is
    printed, logged or warned inside is dropped.
    """
    random = random_state(device)
    threads = torch.get_num_threads()
    logged = logging.root.manager.disable
    gradients = [(weight, weight.grad) for weight in module.parameters()]
    statistics = [(buffer, buffer._version, buffer.clone()) for buffer in module.buffers()]
    for weight, _ in gradients:
        weight.grad = None
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
            yield
    finally:
        logging.disable(logged)
        for weight, gradient in gradients:
            weight.grad = gradient
        for buffer, version, before in statistics:
            if buffer._version != version:
                buffer.data.copy_(before)
        torch.set_num_threads(threads)
        restore_random_state(random, device)


def copy_deeply(name: str, part: object, memo: dict[int, Any] | None = None) -> Any:
    """A deep copy; objects in `memo` (by their id) are shared instead.

    `Refused` if it cannot be copied; `name` names the part in the message.
    """
    try:
        with _copied_graphs():
            return copy.deepcopy(part, memo)
    except Exception as error:
        # Your own __deepcopy__ or __reduce__ may raise anything. The run itself must not fail.
        is_once = name == "loader" and isinstance(error, TypeError) and "generator" in str(error)
        why = "can be read once" if is_once else f"cannot be copied ({first_line(error)})"
        raise Refused(f"its {name} {why}") from None


@contextmanager
def _copied_graphs() -> Iterator[None]:
    """Context manager in which tensors of a graph can be copied, without their graph.

    Some modules keep such a tensor of their last step, and torch refuses to copy it.
    """
    usual = Tensor.__deepcopy__

    def copy_tensor(tensor: Tensor, memo: dict[int, Any]) -> Any:
        if tensor.is_leaf or id(tensor) in memo:
            return usual(tensor, memo)
        memo[id(tensor)] = tensor.detach().clone()
        return memo[id(tensor)]

    setattr(Tensor, "__deepcopy__", copy_tensor)  # noqa: B010  # mypy refuses a method
    try:
        yield
    finally:
        setattr(Tensor, "__deepcopy__", usual)  # noqa: B010  # mypy refuses a method


def large_below(root: object) -> list[Any]:
    """Arrays, tables, long containers and started workers that an object holds, however deep."""
    seen: dict[int, Any] = {}
    large = list[Any]()
    unvisited = [root]
    while unvisited:
        thing = unvisited.pop()
        if id(thing) in seen or isinstance(thing, type | ModuleType | FunctionType):
            continue
        seen[id(thing)] = thing
        if len(seen) > _MOST_OBJECTS:
            raise Refused("its data set has too many objects to copy them")
        if _is_large(thing):
            large.append(thing)
        else:
            unvisited += gc.get_referents(thing)
    return large


def _is_large(thing: object) -> bool:
    if isinstance(thing, str | bytes | list | tuple | dict | set):
        return len(thing) > _MANY
    if isinstance(thing, Tensor | np.ndarray):
        return thing.nbytes > _LARGE_BYTES
    package = type(thing).__module__.partition(".")[0]
    return isinstance(thing, _BaseDataLoaderIter) or package in _TABLES


def complete_optimizer(copied: torch.optim.Optimizer, original: torch.optim.Optimizer) -> None:
    """Give a copied optimizer what copying leaves out, move it to the device, and stop its
    learning.
    """
    # Copying an optimizer keeps torch's own attributes only, not those that a subclass adds.
    attributes = vars(original)
    for name in attributes.keys() - vars(copied).keys():
        if not callable(attributes[name]):
            setattr(copied, name, attributes[name])
    copied.load_state_dict(copied.state_dict())  # moves it to the device
    for group in copied.param_groups:
        group["lr"] = 0.0
