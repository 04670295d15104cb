"""Clocks of a step: the phases of each batch and the length of each optimizer step, without a wait for the device."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flatout.callbacks.clock import Clock
from flatout.callbacks.sums import FIRST_STEPS

PHASES = ("forward", "backward", "optimizer")


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
    """Where it ends an optimizer step: seconds since the one before that belong to no step."""


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

        Of a batch that goes through in pieces only the first forward pass counts as forward. A batch without an end
        of its forward pass is not counted.
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

    def take(self) -> dict[str, float]:
        """Seconds of each phase in the batches that the device has finished; the others come later."""
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
        """Of the very first step only its last batch counts."""
        own_s = events[0].elapsed_time(events[-1]) / 1000
        whole_s = own_s if self._last is None else self._last.elapsed_time(events[-1]) / 1000 - outside_s
        self._steps_s.append(max(own_s, whole_s))
        if self._last is not None:
            self._free.append(self._last)
        self._last = events.pop()


class HookTimes:
    """Phases of a batch between Lightning's hooks, on the host's clock, without what the clock counts by itself.

    The wait is all that lies between two batches: fetching, transfer, and Lightning's own work there. In manual
    optimization all work before a backward pass counts as forward.
    """

    _PARTS = ("wait", *PHASES)

    def __init__(self, clock: Clock, device_times: DeviceTimes | None = None) -> None:
        self.clock = clock
        self.spent = dict.fromkeys(self._PARTS, 0.0)
        self._device_edge = None if device_times is None else device_times.edge
        self._last = 3
        self._at, self._aside = time.perf_counter(), clock.aside_s

    def hooks(self, *, wait_only: bool) -> dict[str, Callable[..., None]]:
        """The hooks of Lightning that are edges, without the end of a batch; `wait_only`: without the phases."""
        start: dict[str, Callable[..., None]] = {"on_train_batch_start": lambda *_: self.edge(0)}
        backward: dict[str, Callable[..., None]] = {
            "on_before_backward": lambda *_: self.edge(1),
            "on_after_backward": lambda *_: self.edge(2),
        }
        return start if wait_only else start | backward

    def edge(self, number: int) -> None:
        """The beginning of a batch is 0, the ends of its phases are 1 to 3."""
        now, aside = time.perf_counter(), self.clock.aside_s
        part = 1 if (number, self._last) == (3, 0) else number  # a batch without a backward pass
        self.spent[self._PARTS[part]] += max(0.0, now - self._at - (aside - self._aside))
        self._at, self._aside, self._last = now, aside, number
        if self._device_edge is not None:
            self._device_edge(number)
