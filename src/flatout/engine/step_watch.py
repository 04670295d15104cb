"""What a `training_step` of any module does that a replay of its kernels would forget.

A replay runs no Python. It repeats the plain numbers of the captured step, and reads the addresses
that this one has read. So some plain steps are watched first. A training is left plain if one of
them

- reads a number of the device, or copies from or to the host;
- reads a counter, a rate or a logger of the Trainer, or the number of the batch;
- changes an attribute of its module, a tensor that is neither weight nor buffer, or its batch;
- draws random numbers on the host;
- gives an operator another plain number than the step before, for a batch of equal shapes.

Each reason names what it was and where. What cannot be seen is what a step does elsewhere: in
global variables, in files, in objects that the module does not hold. Values of `self.log` are kept:
a replay logs those that it has computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn, cast

import lightning as L
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.data.batches.signatures import leaves_of, tensors_of
from flatout.distributed.both_lightnings import PACKAGES
from flatout.engine import lightning_internals as internals
from flatout.engine.host_state import (
    State,
    first_difference,
    state_of_module,
    state_of_random_numbers,
)

_STAYS_EQUAL = frozenset(
    (
        *("training", "validating", "testing", "predicting", "sanity_checking", "barebones"),
        *("world_size", "global_rank", "local_rank", "node_rank", "num_nodes", "num_devices"),
        *("is_global_zero", "max_epochs", "min_epochs", "max_steps", "min_steps", "max_time"),
        *("num_training_batches", "estimated_stepping_batches", "accumulate_grad_batches"),
        *("gradient_clip_val", "gradient_clip_algorithm", "precision", "datamodule"),
        *("log_every_n_steps", "default_root_dir", "lightning_module", "model", "state"),
    )
)
"""What a step may read of its Trainer."""
_LIBRARIES = (
    "/torch/",
    *(f"/{package}/" for package in PACKAGES),
    "/lightning_utilities/",
    "/torchmetrics/",
    "/flatout/engine/",
    "contextlib.py",
)
_NUMBERS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_RETURNED = (Tensor, bool, int, float, str, type(None), type)


@dataclass(slots=True)
class Logged:
    """A call of `self.log`."""

    name: str
    value: Tensor
    arguments: tuple[object, ...]
    named: dict[str, object]


@dataclass(slots=True)
class AskedOperator:
    """A call of an operator: its name, what it got beside tensors, and the line that asked."""

    name: str
    numbers: object
    place: str


class Notes:
    """What is found in one step."""

    def __init__(self) -> None:
        self.operators: list[AskedOperator] = []
        self.reason = ""  # why a replay would differ; the first that was found
        self.are_taken = True  # False while Lightning runs within the step

    def add(self, reason: str) -> None:
        if self.are_taken and not self.reason:
            self.reason = reason


class StepWatch:
    """Watches the plain steps of a module, and keeps what it logs in steps that are tried."""

    def __init__(self, module: L.LightningModule, *, has_replayed: bool) -> None:
        """`has_replayed`: whether the training is resumed, and has replayed steps."""
        self._module = module
        self.has_replayed = has_replayed
        self.reason = ""  # why no step may be replayed; empty: nothing was found
        # Operators of the last watched step of each signature.
        self._operators: dict[Hashable, list[AskedOperator]] = {}

    def forget(self) -> None:
        """Compare later steps with none of those before: the module has changed."""
        self._operators.clear()

    def watch_next(self, signature: Hashable) -> None:
        """Watch the next call of `training_step`, whose batch has this signature."""
        module = self._module
        before = internals.unset_method(module, "training_step")

        def watch_step(batch: object, *others: object) -> object:
            internals.unset_method(module, "training_step")
            if before is not None:
                internals.set_method(module, "training_step", before)
            return self._watch_step(signature, batch, others)

        internals.set_method(module, "training_step", watch_step)

    def _watch_step(self, signature: Hashable, batch: object, others: tuple[object, ...]) -> object:
        module = self._module
        notes = Notes()
        known = [*module.parameters(), *module.buffers(), *tensors_of(batch)]
        state_before = _state_around(module, batch)

        def log(name: str, value: object, *arguments: object, **named: object) -> None:
            notes.add(_reason_against_logging(name, value, module.device))
            notes.operators.append(AskedOperator(f"self.log({name!r})", repr(named), _place()))
            notes.are_taken = False
            plain_log(name, value, *arguments, **named)
            notes.are_taken = True

        plain_log: Callable[..., None] = module.log
        with _attached(module, notes), _replaced(module, "log", log), OperatorList(notes, known):
            output = module.training_step(batch, *others)
        changed = first_difference(state_before, _state_around(module, batch))
        if changed:  # says more than the operators that have done it
            notes.reason = f"training_step changes {changed}"
        notes.add(_reason_against_output(output))
        earlier = self._operators.get(signature)
        # What is made at the first need is there after the first step, which is not judged.
        if earlier is not None:
            notes.add(find_other_number(earlier, notes.operators))
            self.reason = self.reason or notes.reason
        self._operators[signature] = notes.operators
        return output

    @contextmanager
    def trying(self) -> Iterator[list[Logged]]:
        """Context manager for steps that are tried or captured; yields what they log.

        Nothing is logged yet. The number of the batch is not known in them.
        """
        module = self._module
        logged = list[Logged]()

        def log(name: str, value: Tensor, *arguments: object, **named: object) -> None:
            logged.append(Logged(name, value.detach(), arguments, named))

        def training_step(batch: object, *others: object) -> object:
            return plain_step(batch, *(_BatchNumber(self) for _ in others))

        plain_step = module.training_step
        with _replaced(module, "log", log), _replaced(module, "training_step", training_step):
            try:
                yield logged
            except TypeError as error:  # an operator got it in place of a number
                if _BatchNumber.__name__ in str(error):
                    self.reason = _BatchNumber.reason
                raise

    def log(self, trainer: L.Trainer, calls: Sequence[Logged]) -> None:
        """Log what a replay has computed, as `training_step` does."""
        module = self._module
        log: Callable[..., None] = module.log

        def training_step() -> None:
            for call in calls:
                # a copy, as the next replay writes to the same address
                log(call.name, call.value.clone(), *call.arguments, **call.named)

        if calls:
            with _replaced(module, "training_step", training_step):
                internals.call_module_hook(trainer, "training_step")


class OperatorList(TorchDispatchMode):
    """Notes the operators of a step, and which of them a captured step could not repeat."""

    def __init__(self, notes: Notes, known: Sequence[Tensor]) -> None:
        """`known`: tensors that lie where they are for the whole training."""
        super().__init__()
        self._notes = notes
        self._known = {_address_of(tensor) for tensor in known}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        named = kwargs or {}
        result = func(*args, **named)
        name = func._schema.name.partition("::")[2]
        outputs = tensors_of(result)
        if self._notes.are_taken:
            place = _place()
            self._notes.operators.append(AskedOperator(name, numbers_of([args, named]), place))
            reason = self._reason_against(func, tensors_of([args, named]), outputs)
            self._notes.add(f"{reason} at {place}" if reason else "")
        self._known.update(_address_of(tensor) for tensor in outputs)
        return result

    def _reason_against(self, func: OpOverload, inputs: list[Tensor], outputs: list[Tensor]) -> str:
        on_device = [tensor for tensor in inputs if not tensor.is_cpu]
        are_on_host = bool(outputs) and all(tensor.is_cpu for tensor in outputs)
        if on_device and (_asks_for_numbers(func, inputs) or are_on_host):
            return "the host reads a number of the device"
        if torch.Tag.nondeterministic_seeded in func.tags and are_on_host:
            return "the host draws random numbers"
        # `torch.tensor(0.5, device=...)` is seen as a fresh tensor on the device
        is_fresh = func is torch.ops.aten.lift_fresh.default and bool(on_device)
        is_copied = bool(inputs) and not on_device and bool(outputs) and not are_on_host
        if is_fresh or is_copied or _copies_from_host(func, inputs):
            return "numbers of the host are copied to the device"
        for tensor in on_device:
            if tensor.numel() and _address_of(tensor) not in self._known:
                return "a tensor that is neither weight nor buffer is read"
        return ""


class _NotingTrainer:
    """A Trainer for a module in one step; notes what is read that may be other in the next."""

    _trainer: L.Trainer
    _notes: Notes

    def __init__(self, trainer: L.Trainer, notes: Notes) -> None:
        self.__dict__.update(_trainer=trainer, _notes=notes)

    def __getattr__(self, name: str) -> object:
        if name not in _STAYS_EQUAL:
            self._notes.add(f"training_step reads {name} of the Trainer at {_place()}")
        return getattr(self._trainer, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._notes.add(f"training_step sets {name} of the Trainer at {_place()}")
        setattr(self._trainer, name, value)


class _BatchNumber:
    """Stands for the number of a batch in steps that are tried, and refuses each use."""

    reason = "training_step uses the number of its batch"

    def __init__(self, watch: StepWatch) -> None:
        self._watch = watch


def _refuse(number: _BatchNumber, *others: object) -> NoReturn:
    number._watch.reason = number.reason
    raise RuntimeError(number.reason)


# Whatever a plain number can do, but to be an object.
for _name in set(dir(int)) - set(dir(object)) | {"__eq__", "__str__", "__format__", "__hash__"}:
    setattr(_BatchNumber, _name, _refuse)


@contextmanager
def _attached(module: L.LightningModule, notes: Notes) -> Iterator[None]:
    """What the module asks of its Trainer is noted."""
    before = module.trainer
    module.trainer = cast("L.Trainer", _NotingTrainer(before, notes))
    try:
        yield
    finally:
        module.trainer = before


@contextmanager
def _replaced(
    module: L.LightningModule, name: str, method: Callable[..., object]
) -> Iterator[None]:
    """The module has another method."""
    before = internals.unset_method(module, name)
    internals.set_method(module, name, method)
    try:
        yield
    finally:
        internals.unset_method(module, name)
        if before is not None:
            internals.set_method(module, name, before)


def _state_around(module: L.LightningModule, batch: object) -> State:
    """What a step must not change: its module's attributes, its batch, random numbers."""
    parts = list[Hashable]()
    for leaf in leaves_of(batch):
        if isinstance(leaf, Tensor):
            parts.append((id(leaf), leaf._version, leaf.requires_grad))
        else:
            parts.append(repr(leaf))
    return {**state_of_module(module), **state_of_random_numbers(), "its batch": tuple(parts)}


def _reason_against_logging(name: str, value: object, device: torch.device) -> str:
    if not isinstance(value, Tensor):
        kind = "plain number" if isinstance(value, int | float) else type(value).__name__
        return f"self.log({name!r}) gets a {kind} at {_place()}"
    is_there = value.device.type == device.type
    return "" if is_there else f"self.log({name!r}) gets a number of the host at {_place()}"


def _reason_against_output(output: object) -> str:
    """Why a replay cannot return what a step has returned."""
    if output is None:
        return "training_step returns no loss"
    for leaf in leaves_of(output):
        if not isinstance(leaf, _RETURNED):
            return f"training_step returns a {type(leaf).__name__}"
    return ""


def find_other_number(earlier: list[AskedOperator], later: list[AskedOperator]) -> str:
    """Where two steps on batches of equal shapes ask the device for different things."""
    for before, now in zip(earlier, later, strict=False):
        if before.name != now.name:
            return f"steps differ: {before.name} at {before.place}, then {now.name} at {now.place}"
        if before.numbers != now.numbers:
            return f"{now.name} gets another plain number in each step at {now.place}"
    if len(earlier) != len(later):
        return f"steps differ: {len(earlier)} operators, then {len(later)}"
    return ""


def numbers_of(value: object) -> object:
    """What an operator gets, with shapes and types in place of tensors."""
    if isinstance(value, Tensor):
        if value.is_cpu and value.numel() == 1:
            return repr(value.item())  # a captured kernel has it as a plain number
        return (tuple(value.shape), value.dtype)
    if isinstance(value, Mapping):
        return tuple((name, numbers_of(part)) for name, part in value.items())
    if isinstance(value, list | tuple):
        return tuple(numbers_of(part) for part in value)
    # handles of other kinds are another object in each step
    return repr(value) if isinstance(value, _NUMBERS) else type(value)


def _asks_for_numbers(func: OpOverload, inputs: list[Tensor]) -> bool:
    """Whether a result, or its shape, depends on numbers, for which the host would wait."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if "index" in func._schema.name:
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in inputs[1:])
    return torch.Tag.dynamic_output_shape in func.tags


def _copies_from_host(func: OpOverload, inputs: list[Tensor]) -> bool:
    is_copy = func._schema.name == "aten::copy_"
    return is_copy and not inputs[0].is_cpu and inputs[1].is_cpu


def _address_of(tensor: Tensor) -> int:
    """Where a tensor's memory begins; views have one address. 0 for those without memory."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _place() -> str:
    """The file and line that asked, outside of libraries and of the engine.

    Backward passes run in a thread of torch's, where no line is known.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not any(part in file for part in _LIBRARIES):
            path = Path(file)
            return f"{path.parent.name}/{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "a line of the backward pass"
