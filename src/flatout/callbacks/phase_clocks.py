"""Time of each phase of a batch, by events on the device or by Lightning's hooks on the host.

A batch has four edges, which both clocks count alike:

    edge   0          1           2            3
           | forward  | backward  | optimizer  |

On a GPU the host only enqueues work, so its own clock shows nothing. `DevicePhaseClock` records an
event at each edge and reads it later, when the device has passed it: no step waits. Where no fast
loop marks the edges, `HookPhaseClock` gets them from Lightning's hooks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

# Those of `lightning_internals`, which is not imported: transformers' Trainer needs no Lightning.
PHASES = ("forward", "backward", "optimizer")


class OutsideClock(Protocol):
    """Adds up seconds that belong to no phase, such as logging."""

    edge: Callable[[int], None] | None

    @property
    def not_in_phases_s(self) -> float: ...


@dataclass(slots=True)
class _BatchEvents:
    """The events of one batch, one an edge, which the device may not have passed yet."""

    events: list[torch.cuda.Event]
    # None if the batch ends no optimizer step. Else the seconds between the step before and this
    # one that belong to neither, such as a validation.
    outside_s: float | None = None
    steps: int = 1  # more where these were taken at once


class DevicePhaseClock:
    """Seconds of phases and of optimizer steps on the device, without waiting for it."""

    def __init__(self, make_event: Callable[[], torch.cuda.Event] | None = None) -> None:
        self._make = make_event or partial(torch.cuda.Event, enable_timing=True)
        self._free: list[torch.cuda.Event] = []  # read, and used again: making one takes time
        self._open: list[torch.cuda.Event] = []  # of the batch that is under way
        self._unread: deque[_BatchEvents] = deque()
        self._end_of_last_step: torch.cuda.Event | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without events: they belong to this process and its device."""
        return type(self), (self._make,)

    def edge(self, number: int) -> float:
        """Record an event at an edge of the batch; return the host's clock.

        A batch that runs in several pieces passes edge 1 several times; the first one counts.
        """
        if number == 0:
            # A batch whose last edge never came, after an error, is dropped.
            self._free += self._open
            self._open = []
        elif number != len(self._open):
            return time.perf_counter()
        event = self._free.pop() if self._free else self._make()
        event.record()
        self._open.append(event)
        if len(self._open) > len(PHASES):
            self._unread.append(_BatchEvents(self._open))
            self._open = []
        return time.perf_counter()

    def end_step(self, outside_s: float, steps: int = 1) -> None:
        """Note that the latest batch ends optimizer steps, `outside_s` after the one before."""
        # The latest batch may have no events, as it missed an edge. Its step is then measured
        # together with the next one.
        if self._unread and self._unread[-1].outside_s is None:
            self._unread[-1].outside_s = outside_s
            self._unread[-1].steps = steps

    def take(self) -> tuple[dict[str, float], list[float]]:
        """Seconds since the last call: of each phase, added up, and of each optimizer step.

        Only batches that the device has finished are counted; the others stay for the next call.
        """
        seconds = dict.fromkeys(PHASES, 0.0)
        steps_s = list[float]()
        while self._unread and self._unread[0].events[-1].query():
            batch = self._unread.popleft()
            events = batch.events
            for phase, before, after in zip(PHASES, events, events[1:], strict=False):
                seconds[phase] += before.elapsed_time(after) / 1000
            if batch.outside_s is not None:
                seconds_of_all = self._measure_step(events, batch.outside_s)
                steps_s += [seconds_of_all / batch.steps] * batch.steps
            self._free += events
        return seconds, steps_s

    def _measure_step(self, events: list[torch.cuda.Event], outside_s: float) -> float:
        """Seconds from the end of the step before to the last of `events`, which is removed.

        The first step has none before it: its last batch alone is measured.
        """
        seconds = events[0].elapsed_time(events[-1]) / 1000
        before = self._end_of_last_step
        if before is not None:
            seconds = max(seconds, before.elapsed_time(events[-1]) / 1000 - outside_s)
            self._free.append(before)
        self._end_of_last_step = events.pop()
        return seconds


class HookPhaseClock:
    """Host seconds of each phase between Lightning's hooks, in `spent`.

    All between two batches counts as `wait`: waiting for data, and Lightning's own work.
    """

    # the part that ends at each edge
    _PARTS = ("wait", *PHASES)

    def __init__(self, clock: OutsideClock, device_times: DevicePhaseClock | None = None) -> None:
        self.clock = clock
        self.spent = dict.fromkeys(self._PARTS, 0.0)
        self._device_edge = None if device_times is None else device_times.edge
        self._last_edge = 3
        self._since = time.perf_counter()
        self._not_in_phases_s = clock.not_in_phases_s
        clock.edge = self.edge

    def edge(self, number: int, *_: Any) -> None:
        """Add the time since the last edge to the part that ends here.

        Further arguments are those of the hook that it stands for.
        """
        now = time.perf_counter()
        not_in_phases_s = self.clock.not_in_phases_s
        counted_elsewhere_s = not_in_phases_s - self._not_in_phases_s
        # From edge 0 to 3 at once: the batch had no backward pass, so all of it was forward.
        is_forward_only = number == 3 and self._last_edge == 0
        part = self._PARTS[1 if is_forward_only else number]
        self.spent[part] += max(0.0, now - self._since - counted_elsewhere_s)
        self._since = now
        self._not_in_phases_s = not_in_phases_s
        self._last_edge = number
        if self._device_edge is not None:
            self._device_edge(number)
