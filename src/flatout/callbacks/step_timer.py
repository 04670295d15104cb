"""Where the time of training goes, step by step, for a few microseconds a step and without ever waiting for a device.

On a CPU the host's clock tells it. Elsewhere the host only enqueues work: there events mark the edges of each phase on
the device itself, and they are read when it has long passed them. What callbacks of a person's own take is told apart
by their names; logging, validation and checkpoints tell what they took themselves.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning as L
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.engine.fast_loop import PHASES

PARTS = ("wait", "transfer", *PHASES, "callbacks", "logging", "checkpoint", "validation", "other")
"""What the time of training is divided into; `other` is what is left: the framework itself."""
_BETWEEN_STEPS = ("logging", "checkpoint", "validation")
FIRST_STEPS = 5
"""Steps that warm up whatever needs it; they are counted apart."""
_LOOK_CLOSELY_AT = range(20, 23)
"""Steps in which a callback's reads of the device are counted, which itself takes time."""
_INSIDE_A_STEP = {
    "on_before_backward": "backward",
    "on_after_backward": "backward",
    "on_before_zero_grad": "optimizer",
    "on_before_optimizer_step": "optimizer",
}
_BESIDE_A_STEP = ("on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end")


class StepTimes:
    """How long steps took: their spread in little memory, and the first few one by one."""

    _FINENESS = 1.04
    _SHORTEST_S = 1e-6

    def __init__(self) -> None:
        self.counts = np.zeros(round(math.log(1e10) / math.log(self._FINENESS)), np.int64)
        """Steps by length, each place 4 % longer than the one before."""
        self.first: list[float] = []

    def add(self, seconds: list[float]) -> None:
        apart = FIRST_STEPS - len(self.first)
        self.first += seconds[: max(0, apart)]
        rest = np.asarray(seconds[max(0, apart) :])
        if len(rest):
            places = np.log(np.maximum(rest, self._SHORTEST_S) / self._SHORTEST_S) / math.log(self._FINENESS)
            self.counts += np.bincount(
                places.astype(np.int64).clip(0, len(self.counts) - 1), minlength=len(self.counts)
            )

    def percentile(self, share: float) -> float | None:
        """Seconds that this share of all steps after the first few stayed below; None before there are any."""
        total = int(self.counts.sum())
        if not total:
            return None
        place = int(np.searchsorted(np.cumsum(self.counts), share * total))
        return self._SHORTEST_S * self._FINENESS ** (min(place, len(self.counts) - 1) + 0.5)

    def state_dict(self) -> dict[str, Any]:
        places = np.nonzero(self.counts)[0]
        return {"first": self.first, "counts": [[int(place), int(self.counts[place])] for place in places]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first = list(state["first"])
        self.counts[:] = 0
        for place, count in state["counts"]:
            self.counts[place] = count


@dataclass(slots=True)
class _Passing:
    """The events of one batch that the device will have passed some time."""

    events: list[Any]
    outside_s: float | None = None
    """Where it ends an optimizer step: what the host did between that and the one before, which is of no step."""


class DeviceTimes:
    """Phases and steps between events on the device, read only when the device has passed them."""

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        self._make = make_event or (lambda: torch.cuda.Event(enable_timing=True))
        self._free: list[Any] = []
        self._open: list[Any] = []
        self._passing: deque[_Passing] = deque()
        self._last: Any = None
        """Event at the end of the step before."""
        self._steps_s: list[float] = []

    def edge(self, number: int) -> float:
        """The host's clock at the edge of a phase: 0 is the beginning of a batch, 1 to 3 are the ends of its phases.

        Of a batch that goes through in pieces only the first forward pass is told from the backward passes; one whose
        forward pass failed is not told at all.
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
        """The batch that came last ends an optimizer step; one that was not told to its end leaves it to the next."""
        if self._passing and self._passing[-1].outside_s is None:
            self._passing[-1].outside_s = outside_s

    def take(self) -> dict[str, float]:
        """Seconds of each phase in the steps that the device has finished; those under way are left for later."""
        seconds = dict.fromkeys(PHASES, 0.0)
        while self._passing and self._passing[0].events[-1].query():
            batch = self._passing.popleft()
            events = batch.events
            for phase, before, after in zip(PHASES, events, events[1:], strict=False):
                seconds[phase] += before.elapsed_time(after) / 1000
            if batch.outside_s is not None:
                self._end_of_step(events, batch.outside_s)
            self._free += events
        return seconds

    def take_steps(self) -> list[float]:
        """Seconds of each optimizer step, from the end of the one before, that `take` has found finished."""
        steps, self._steps_s = self._steps_s, []
        return steps

    def _end_of_step(self, events: list[Any], outside_s: float) -> None:
        """Of the very first step only its last batch is told."""
        own_s = events[0].elapsed_time(events[-1]) / 1000
        whole_s = own_s if self._last is None else self._last.elapsed_time(events[-1]) / 1000 - outside_s
        self._steps_s.append(max(own_s, whole_s))
        if self._last is not None:
            self._free.append(self._last)
        self._last = events.pop()


def compiled_so_far() -> dict[str, float]:
    """Graphs that torch.compile has made in this process, and the seconds it took; empty where it was never asked."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    graphs = 0.0 if dynamo is None else float(dynamo.counters["stats"].get("unique_graphs", 0))
    if dynamo is None or not graphs:
        return {}
    return {"graphs": graphs, "seconds": dynamo.cumulative_time_spent_ns.get("entire_frame_compile", 0.0) / 1e9}


class Clock:
    """Seconds spent on what is no phase of a step, by whoever spent them; and the callbacks of a person's own."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys((*_BETWEEN_STEPS, "callbacks"), 0.0)
        self.outside_s = 0.0
        """What of it fell between two steps."""
        self.inside_s = dict.fromkeys(set(_INSIDE_A_STEP.values()), 0.0)
        """What of the callbacks' time fell inside a phase."""
        self.callbacks: dict[str, float] = {}
        """Seconds of each callback of a person's own."""
        self.reads: dict[str, int] = {}
        """How often each of them made the host wait for a number of the device, in the steps that were looked at."""
        self.counts = dict.fromkeys(_BETWEEN_STEPS, 0)
        """How often there was logging, a checkpoint, a validation."""
        self.looks_closely = False
        self.compiled: dict[str, float] = {}
        """What torch.compile had done after the first few steps, in which it must."""
        self._wrapped: list[tuple[L.Callback, str]] = []

    def spend(self, part: str, seconds: float) -> None:
        self.spent[part] += seconds
        self.counts[part] += 1
        self.outside_s += seconds

    @contextmanager
    def spending(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spend(part, time.perf_counter() - began)

    def look(self, step: int) -> None:
        self.looks_closely = step in _LOOK_CLOSELY_AT

    def watch(self, callbacks: Mapping[str, L.Callback]) -> None:
        """From now on tell what these take: each hook of theirs that training calls every step or epoch."""
        for name, callback in callbacks.items():
            self.callbacks.setdefault(name, 0.0)
            for hook in (*_BESIDE_A_STEP, *_INSIDE_A_STEP):
                if getattr(type(callback), hook) is not getattr(L.Callback, hook):
                    setattr(callback, hook, self._timed(name, getattr(callback, hook), _INSIDE_A_STEP.get(hook)))
                    self._wrapped.append((callback, hook))

    def leave(self) -> None:
        """Give callbacks back as they were."""
        for callback, hook in self._wrapped:
            delattr(callback, hook)
        self._wrapped = []

    def _timed(self, name: str, hook: Callable[..., Any], phase: str | None) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                if not self.looks_closely:
                    return hook(*args, **kwargs)
                with _Reads() as reads:
                    answer = hook(*args, **kwargs)
                self.reads[name] = self.reads.get(name, 0) + reads.count
                return answer
            finally:
                seconds = time.perf_counter() - began
                if not self.looks_closely:
                    self.callbacks[name] += seconds
                    self.spent["callbacks"] += seconds
                    if phase is not None:
                        self.inside_s[phase] += seconds

        return timed

    @property
    def reads_a_step(self) -> dict[str, float]:
        return {name: count / len(_LOOK_CLOSELY_AT) for name, count in self.reads.items() if count}


class _Reads(TorchDispatchMode):
    """Counts how often numbers are asked of the device: each time the host waits for all it has enqueued."""

    _ASKING: ClassVar = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
    _COPYING: ClassVar = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        comes_over = func in self._COPYING and answer.device.type == "cpu" and args[-1].device.type != "cpu"
        self.count += func in self._ASKING or comes_over
        return answer
