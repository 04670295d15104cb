"""What a CUDA graph does, for the device elsewhere: operators are recorded with their tensors and
plain numbers, and computed again into the same tensors.

While it records, it refuses what a CUDA graph refuses: reads of the device, copies from the host,
locked pages, the random state, and events of a clock.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.engine import captures
from flatout.engine.step_watch import AskedOperator, numbers_of
from tests.elsewhere import device
from tests.elsewhere.device import NAME, There

# Operators that a replay leaves out: they only say where a number lies.
_REFUSED = device._WAITS | {"_copy_from"}


class CaptureError(RuntimeError):
    """A CUDA graph would not have captured this."""


class Recording(TorchDispatchMode):
    """The operators of a function, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.asked: list[AskedOperator] = []  # views, too, which may be cut by plain numbers
        self.read: dict[int, str] = {}  # addresses of what was there before, and who has read it
        self._made: set[int] = set()
        # results keep the memory of views alive
        self._views: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        name = func._schema.name.partition("::")[2]
        inputs = list(tensors_of([args, named]))
        are_of_host = bool(inputs) and not any(isinstance(tensor, There) for tensor in inputs)
        is_of_host = are_of_host and torch.device(named.get("device") or "cpu").type != NAME
        if not is_of_host:
            refuse(name, inputs)
            place = place_in_package()
            self.asked.append(AskedOperator(name, numbers_of([args, named]), place))
            there = [tensor for tensor in inputs if isinstance(tensor, There) and tensor.numel()]
            for address in {address_of(tensor) for tensor in there} - self._made:
                self.read.setdefault(address, place)
        result = func(*args, **named)
        self._made.update(address_of(tensor) for tensor in tensors_of(result))
        if is_view(func):
            self._views.append(result)
        elif not is_of_host:
            self.operators.append((func, args, named, result))
        return result

    def replay(self) -> None:
        # Below autograd, as all gradients were computed by recorded operators.
        with torch._C._AutoDispatchBelowAutograd():
            for func, args, named, result in self.operators:
                again = func(*args, **named)
                if func._schema.is_mutable and not has_new_results(func):
                    continue
                for before, now in zip(tensors_of(result), tensors_of(again), strict=True):
                    if address_of(before) != address_of(now) and before.numel():
                        before.copy_(now)


def place_in_package() -> str:
    """The innermost line of the package, or of a plant, that asks for an operator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "flatout" in path.parts or path.name == "graphs.py":
            return f"{path.parent.name}/{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"


def refuse(name: str, inputs: list[Tensor]) -> None:
    """Raise where a CUDA graph would."""
    if name in _REFUSED:
        raise CaptureError(f"{name} while capturing: the host would wait for the device")
    for tensor in inputs:
        if not isinstance(tensor, There) and tensor.dim():
            raise CaptureError(f"{name} while capturing: {list(tensor.shape)} comes from the host")


def is_view(func: Any) -> bool:
    returns = [result.alias_info for result in func._schema.returns]
    return bool(returns) and all(alias is not None and not alias.is_write for alias in returns)


def has_new_results(func: Any) -> bool:
    return any(result.alias_info is None for result in func._schema.returns)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_of(part)


def address_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


class Captured:
    """A recorded function."""

    def __init__(self, recording: Recording, capture: ElsewhereCapture) -> None:
        self.recording = recording
        self._capture = capture

    def replay(self) -> None:
        self.recording.replay()
        self._capture.replays += 1


class ElsewhereCapture:
    """Records functions of the device elsewhere."""

    made: ClassVar[list[ElsewhereCapture]] = []
    num_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self.captured: list[Captured] = []
        self.replays = 0
        self.made.append(self)

    def capture(self, function: Callable[[], None]) -> Captured:
        recording = Recording()
        with refusing_the_host(), recording:
            function()
        self.captured.append(Captured(recording, self))
        return self.captured[-1]

    def forget(self) -> None:
        return

    def seconds(self, function: Callable[[], object]) -> float:
        began = time.perf_counter()
        function()
        return time.perf_counter() - began


@contextmanager
def refusing_the_host() -> Iterator[None]:
    """What no operator shows: locked pages, the random state, and events of a clock.

    As on CUDA other threads may ask for them: they gather batches meanwhile.
    """
    capturing = threading.get_ident()

    def refusing(owner: Any, name: str) -> Any:
        plain = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            if threading.get_ident() == capturing:
                raise CaptureError(
                    "page-locked memory, the random state or an event is asked for while capturing"
                )
            return plain(*arguments, **named)

        return mock.patch.object(owner, name, call)

    with (
        refusing(Tensor, "pin_memory"),
        refusing(torch, "get_rng_state"),
        refusing(torch, "set_rng_state"),
        refusing(torch.cuda.Event, "record"),
        refusing(torch.cuda.Stream, "record_event"),
    ):
        yield


def add_capture() -> None:
    """Let steps elsewhere be captured."""
    ElsewhereCapture.made.clear()
    captures.CAPTURES[NAME] = ElsewhereCapture
