"""What a module holds on the host, as values that can be compared: flags, counters, lists, tensors.

A captured step has fixed all of it. So a step that changes it, or a callback that does between two
steps, is found by comparing two of these states. Names are those of Python:

    beta = 0.5, layer.p = 0.1  ->  {"self": {"beta": "0.5"}, "self.layer": {"p": "0.1"}}

Known by their identity only are objects of torch and Lightning, and what lies within more than
three containers. Of a list of more than 128 values the length is known, too.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import numpy as np
from torch import Tensor, nn

from flatout.distributed.both_lightnings import PACKAGES

State = dict[str, object]

_PLAIN = (bool, int, str, bytes, type(None))
_MOST_VALUES = 128  # of a list, mapping or array that is compared by value
_DEEPEST = 3  # containers and objects within each other
_LEFT_OUT = frozenset((*nn.Module().__dict__, "_trainer", "_fabric"))
"""Attributes of any module, and what holds a module of Lightning. Its parts are named below."""
_LIBRARIES = ("torch", *PACKAGES, "numpy", "builtins")


def state_of_module(module: nn.Module) -> State:
    """The state of a module and of all within it, each by its name."""
    states: State = {}
    for path, part in module.named_modules():
        # the module itself has no path
        states[f"self.{path}".removesuffix(".")] = _state_of_part(part)
    return states


def _state_of_part(part: nn.Module) -> State:
    state: State = {"training": part.training}
    # The numbers of these may change, as they lie at fixed addresses.
    for kept in (part._parameters, part._buffers, part._modules):
        for name, value in kept.items():
            state[name] = id(value)
    for name, value in part.__dict__.items():
        if name not in _LEFT_OUT:
            state[name] = _state_of(value, 0)
    state["its hooks"] = len(part._forward_hooks) + len(part._forward_pre_hooks)
    return state


def state_of_random_numbers() -> State:
    """The state of the generators of Python and of numpy."""
    # the generator's name, 624 numbers, and where it stands among them
    _, key, place, *_ = np.random.get_state(legacy=True)
    return {
        "the random numbers of Python": random.getstate(),
        "the random numbers of numpy": (np.asarray(key).tobytes(), int(place)),
    }


def first_difference(before: State, now: State) -> str:
    """The name of what is not equal any more; empty if all is."""
    if before == now:
        return ""
    for name in {**now, **before}:
        earlier = before.get(name)
        later = now.get(name)
        if earlier == later:
            continue
        if isinstance(earlier, dict) and isinstance(later, dict):
            return f"{name}.{first_difference(earlier, later)}"
        return name
    return "an attribute"


def _state_of(value: object, depth: int) -> object:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, float):
        return repr(value)  # NaN does not equal itself
    if isinstance(value, nn.Parameter):
        return id(value)  # an LSTM lists its weights again
    if isinstance(value, Tensor):
        # neither weight nor buffer: nothing would restore its numbers after a trial
        return (id(value), value.requires_grad, value._version)
    if isinstance(value, np.ndarray):
        is_small = value.size <= _MOST_VALUES and value.dtype != object
        return (id(value), value.tobytes() if is_small else b"")
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if depth == _DEEPEST:
        return id(value)
    if isinstance(value, Mapping):
        return _state_of_values([*value.keys(), *value.values()], value, depth)
    if isinstance(value, list | tuple | deque | AbstractSet):
        return _state_of_values(list(value), value, depth)
    return _state_of_object(value, depth)


def _state_of_values(values: list[object], container: object, depth: int) -> object:
    if len(values) > _MOST_VALUES:
        return (id(container), len(values))
    return (type(container), tuple(_state_of(value, depth + 1) for value in values))


def _state_of_object(value: object, depth: int) -> object:
    """The identity of an object, and what it holds if its class is of no library."""
    library = type(value).__module__.partition(".")[0]
    is_opaque = library in _LIBRARIES or callable(value) or not hasattr(value, "__dict__")
    if is_opaque:
        return id(value)
    return (id(value), _state_of(value.__dict__, depth + 1))
