"""The clocks of a training: phases and lengths of steps without a wait for the device, and what
lies between steps.

Between steps are logging, checkpoints, validations, and others' callbacks.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import lightning as L
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.engine.lightning_internals import PHASES, overrides

BETWEEN_STEPS = ("logging", "checkpoint", "validation")
# `other` is what is left: the framework
PARTS = ("wait", "transfer", *PHASES, "callbacks", *BETWEEN_STEPS, "other")
# steps in which the reads of a callback are counted; counting takes time itself
_LOOK_CLOSELY_AT = range(20, 23)
_HOOKS = {
    **dict.fromkeys(("on_train_epoch_start", "on_train_batch_start", "on_train_epoch_end"), ""),
    **dict.fromkeys(("on_before_backward", "on_after_backward", "on_before_zero_grad"), "backward"),
    "on_before_optimizer_step": "optimizer",
    "on_train_batch_end": "after the optimizer",
}  # of each step and epoch, and the phase that they lie in
FIRST_STEPS = 5  # optimizer steps that warm up whatever needs it; they are counted apart
_NAMES = ("now", "total", "first")
Kind = TypeVar("Kind", bound="Sums")


class Clock:
    """Counts what each part takes that is no phase of a step, and what each watched
    callback takes.
    """

    def __init__(self) -> None:
        self.spent = dict.fromkeys((*BETWEEN_STEPS, "callbacks"), 0.0)
        self.outside_s = 0.0  # seconds of it between two steps
        # seconds of the callbacks inside each phase
        self.inside_s = {"backward": 0.0, "optimizer": 0.0}
        # told where the optimizer ends, before callbacks that wait
        self.edge: Callable[[int], None] | None = None
        self.callbacks: dict[str, float] = {}  # seconds of each watched callback
        # how often each made the host wait for the device, in steps looked at closely
        self.reads: dict[str, int] = {}
        # number of flushes, checkpoints and validations
        self.counts = dict.fromkeys(BETWEEN_STEPS, 0)
        self.looks_closely = False
        # what torch.compile had done after the first few steps, in which it must
        self.compiled: dict[str, float] = {}
        # object, name, what was set, and what it had before
        self._planted: list[tuple[Any, str, Any, Any]] = []
        self._is_spending = False

    @property
    def aside_s(self) -> float:
        """All seconds counted here, which no phase may count too."""
        return self.outside_s + self.spent["callbacks"]

    def spend(self, part: str, seconds: float) -> None:
        self.spent[part] += seconds
        self.counts[part] += 1
        self.outside_s += seconds

    @contextmanager
    def spending(self, part: str) -> Iterator[None]:
        """Count a block; a block inside of another counts once."""
        if self._is_spending:
            yield
            return
        self._is_spending = True
        began = time.perf_counter()
        try:
            yield
        finally:
            self._is_spending = False
            self.spend(part, time.perf_counter() - began)

    def look(self, step: int) -> None:
        """A step has ended; 0 is the start of training."""
        self.looks_closely = step in _LOOK_CLOSELY_AT
        if step == _LOOK_CLOSELY_AT[0]:
            self.reads.clear()  # of a training before
        if step in (0, FIRST_STEPS):
            self.compiled = compiled_so_far()

    def plant(self, part: Any, name: str, value: Any) -> None:
        """Set a method, or a partial of one, on an object over its class's until training ends;
        both can be pickled.
        """
        self._planted.append((part, name, value, vars(part).get(name)))
        vars(part)[name] = value

    def watch(self, callbacks: Mapping[str, L.Callback]) -> None:
        """Time the hooks of these callbacks that Lightning calls every step or epoch."""
        self.leave()
        for name, callback in callbacks.items():
            self.callbacks.setdefault(name, 0.0)
            for hook, phase in _HOOKS.items():
                if overrides(callback, hook, L.Callback):
                    self.plant(
                        callback,
                        hook,
                        partial(self._run_timed, name, getattr(callback, hook), phase),
                    )

    def leave(self) -> None:
        """Put back what was there before."""
        for part, name, value, before in self._planted:
            if vars(part).get(name) is value:  # who has set it since keeps it
                del vars(part)[name]
                if before is not None:
                    vars(part)[name] = before
        self._planted = []
        self.edge = None

    def _run_timed(
        self, name: str, hook: Callable[..., Any], phase: str, *args: Any, **kwargs: Any
    ) -> Any:
        if self.edge is not None and phase == "after the optimizer":
            self.edge(3)
        began = time.perf_counter()
        outside_s = self.outside_s
        try:
            if not self.looks_closely:
                return hook(*args, **kwargs)
            with _Reads() as reads:
                answer = hook(*args, **kwargs)
            self.reads[name] = self.reads.get(name, 0) + reads.count
            return answer
        finally:
            # it may have saved a checkpoint
            seconds = time.perf_counter() - began - (self.outside_s - outside_s)
            if not self.looks_closely:
                self.callbacks[name] += seconds
                self.spent["callbacks"] += seconds
                if phase in self.inside_s:
                    self.inside_s[phase] += seconds

    @property
    def reads_a_step(self) -> dict[str, float]:
        return {name: count / len(_LOOK_CLOSELY_AT) for name, count in self.reads.items() if count}


def compiled_so_far() -> dict[str, float]:
    """Graphs that torch.compile has made in this process, and the seconds it took; empty where it
    never ran.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None or not (graphs := float(dynamo.counters["stats"].get("unique_graphs", 0))):
        return {}
    return {
        "graphs": graphs,
        "seconds": dynamo.cumulative_time_spent_ns.get("entire_frame_compile", 0.0) / 1e9,
    }


class _Reads(TorchDispatchMode):
    """Counts the reads of numbers from the device: at each the host waits for all that it has
    enqueued.
    """

    _ASKING: ClassVar = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
    _COPYING: ClassVar = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        comes_over = (
            func in self._COPYING and answer.device.type == "cpu" and args[-1].device.type != "cpu"
        )
        self.count += func in self._ASKING or comes_over
        return answer


@dataclass(slots=True)
class Sums:
    """Numbers, and mappings of numbers, that add up."""

    batches: int = 0  # of one rank

    def add(self, other: Sums, sign: int = 1) -> None:
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, dict):
                mine.update({name: mine[name] + sign * value for name, value in theirs.items()})
            else:
                setattr(self, each.name, mine + sign * theirs)


class Stretches(Generic[Kind]):
    """`now` since the last flush, `total` up to it, `first` of the first few steps."""

    def __init__(self, make: Callable[..., Kind]) -> None:
        self._make = make
        self.now = make()
        self.total = make()
        self.first = make()

    def flush(self) -> Kind:
        """The counts since the last flush; they are part of the total from now on."""
        now, self.now = self.now, self._make()
        self.total.add(now)
        return now

    def mark_first(self) -> None:
        """The first few steps end here."""
        self.first = copy.deepcopy(self.total)
        self.first.add(self.now)

    def counted(self) -> Kind:
        """All counts so far, without the first few steps where there were more."""
        found = copy.deepcopy(self.total)
        found.add(self.now)
        if found.batches > self.first.batches:
            found.add(self.first, sign=-1)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {name: asdict(getattr(self, name)) for name in _NAMES}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _NAMES:
            setattr(self, name, self._make(**state[name]))


class StepTimes:
    """Lengths of steps: their distribution in little memory, and the first few one by one."""

    _FINENESS = 1.04
    _SHORTEST_S = 1e-6

    def __init__(self) -> None:
        self.counts = np.zeros(round(math.log(1e10) / math.log(self._FINENESS)), np.int64)
        """Steps by length; each bin is 4 % longer than the one before."""
        self.first: list[float] = []

    def add(self, seconds: list[float]) -> None:
        apart = FIRST_STEPS - len(self.first)
        self.first += seconds[: max(0, apart)]
        rest = np.asarray(seconds[max(0, apart) :])
        if len(rest):
            places = np.log(np.maximum(rest, self._SHORTEST_S) / self._SHORTEST_S) / math.log(
                self._FINENESS
            )
            places = places.astype(np.int64).clip(0, len(self.counts) - 1)
            self.counts += np.bincount(places, minlength=len(self.counts))

    def percentile(self, share: float) -> float | None:
        """Seconds that this share of all steps after the first few stayed below; None before there
        are any.
        """
        total = int(self.counts.sum())
        if not total:
            return None
        place = int(np.searchsorted(np.cumsum(self.counts), share * total))
        return self._SHORTEST_S * self._FINENESS ** (min(place, len(self.counts) - 1) + 0.5)

    def state_dict(self) -> dict[str, Any]:
        places = np.nonzero(self.counts)[0]
        return {
            "first": self.first,
            "counts": [[int(place), int(self.counts[place])] for place in places],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first = list(state["first"])
        self.counts[:] = 0
        for place, count in state["counts"]:
            self.counts[place] = count


@dataclass(slots=True)
class _Passing:
    """The events of one batch that the device will have passed some time."""

    events: list[Any]
    # where it ends a step: seconds since the one before that belong to no step
    outside_s: float | None = None


class DeviceTimes:
    """Phases and steps between events on the device, read only when the device has passed them."""

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        self._make = make_event or partial(torch.cuda.Event, enable_timing=True)
        self._free: list[Any] = []
        self._open: list[Any] = []
        self._passing: deque[_Passing] = deque()
        self._last: Any = None  # event at the end of the step before

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy begins without events: they belong to this process and its device."""
        return type(self), (self._make,)

    def edge(self, number: int) -> float:
        """The host's clock at the edge of a phase: 0 begins a batch, 1 to 3 end its phases, of
        pieces the first's.
        """
        if number == 0:
            self._free += self._open
            self._open = []
        elif number != len(self._open):
            return time.perf_counter()
        event = self._free.pop() if self._free else self._make()
        event.record()
        self._open.append(event)
        if len(self._open) > len(PHASES):
            self._passing.append(_Passing(self._open))
            self._open = []
        return time.perf_counter()

    def end_step(self, outside_s: float) -> None:
        """The last batch ends an optimizer step; one that was not counted leaves it to the next."""
        if self._passing and self._passing[-1].outside_s is None:
            self._passing[-1].outside_s = outside_s

    def take(self) -> tuple[dict[str, float], list[float]]:
        """Seconds of each phase in the batches that the device has finished, and of each optimizer
        step among them.
        """
        seconds = dict.fromkeys(PHASES, 0.0)
        steps_s = []
        while self._passing and self._passing[0].events[-1].query():
            batch = self._passing.popleft()
            events = batch.events
            for phase, before, after in zip(PHASES, events, events[1:], strict=False):
                seconds[phase] += before.elapsed_time(after) / 1000
            if batch.outside_s is not None:
                steps_s.append(self._end_step(events, batch.outside_s))
            self._free += events
        return seconds, steps_s

    def _end_step(self, events: list[Any], outside_s: float) -> float:
        """Seconds of a step that ends with these events, of which it keeps the last; of the first,
        of this batch.
        """
        seconds = events[0].elapsed_time(events[-1]) / 1000
        if self._last is not None:
            seconds = max(seconds, self._last.elapsed_time(events[-1]) / 1000 - outside_s)
            self._free.append(self._last)
        self._last = events.pop()
        return seconds


class HookTimes:
    """Phases of a batch between Lightning's hooks; the wait, all between two batches, has
    Lightning's work in it.
    """

    _PARTS = ("wait", *PHASES)

    def __init__(self, clock: Clock, device_times: DeviceTimes | None = None) -> None:
        self.clock = clock
        self.spent = dict.fromkeys(self._PARTS, 0.0)
        self._device_edge = None if device_times is None else device_times.edge
        self._last = 3
        self._at = time.perf_counter()
        self._aside = clock.aside_s
        clock.edge = self.edge

    def edge(self, number: int, *_: Any) -> None:
        """The beginning of a batch is 0, the ends of its phases are 1 to 3."""
        now = time.perf_counter()
        aside = self.clock.aside_s
        part = 1 if (number, self._last) == (3, 0) else number  # a batch without a backward pass
        self.spent[self._PARTS[part]] += max(0.0, now - self._at - (aside - self._aside))
        self._at = now
        self._aside = aside
        self._last = number
        if self._device_edge is not None:
            self._device_edge(number)
