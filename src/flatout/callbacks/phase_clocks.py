"""Time of each phase of a batch, by events on the device or by Lightning's hooks on the host."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flatout.callbacks.clock import Clock
from flatout.engine.lightning_internals import PHASES


@dataclass(slots=True)
class _BatchEvents:
    """The events of one batch that the device will have passed some time."""

    events: list[Any]
    # where it ends a step: seconds since the one before that belong to no step
    outside_s: float | None = None


class DevicePhaseClock:
    """Phases and steps between events on the device, read only when the device has passed them."""

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        self._make = make_event or partial(torch.cuda.Event, enable_timing=True)
        self._free: list[Any] = []
        self._open: list[Any] = []
        self._passing: deque[_BatchEvents] = deque()
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
            self._passing.append(_BatchEvents(self._open))
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


class HookPhaseClock:
    """Phases of a batch between Lightning's hooks; the wait, all between two batches, has
    Lightning's work in it.
    """

    _PARTS = ("wait", *PHASES)

    def __init__(self, clock: Clock, device_times: DevicePhaseClock | None = None) -> None:
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
