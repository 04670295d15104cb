"""Seconds of a training that belong to no phase of a step: logging, checkpoints, validations, and
the callbacks of others.

`Clock` adds them up. To time a callback it replaces the callback's hooks on the object, until
training ends. In three steps it also counts how often each callback reads a number from the device.
Open this file to time one more thing between steps; phases of a step are in `phase_clocks.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L

from flatout.callbacks.device_reads import DeviceReads
from flatout.engine.lightning_internals import PHASES, overrides, set_method, unset_method

BETWEEN_STEPS = ("logging", "checkpoint", "validation")
# All parts of the time of a step; `other` is what none of them explains: the framework's own work.
PARTS = ("wait", "transfer", *PHASES, "callbacks", *BETWEEN_STEPS, "other")
# Steps in which a callback's reads are counted. Counting takes time, so these steps are not timed.
_STEPS_THAT_COUNT_READS = range(20, 23)
# Hooks that Lightning calls in each step or epoch, and the phase that each lies in ("": in none).
_HOOKS = {
    **dict.fromkeys(("on_train_epoch_start", "on_train_batch_start", "on_train_epoch_end"), ""),
    **dict.fromkeys(("on_before_backward", "on_after_backward", "on_before_zero_grad"), "backward"),
    "on_before_optimizer_step": "optimizer",
    "on_train_batch_end": "after the optimizer",
}
FIRST_STEPS = 5  # optimizer steps that warm up caches and compilers; they are counted apart


class Clock:
    """Adds up the seconds between steps by part, and the seconds of each watched callback."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys((*BETWEEN_STEPS, "callbacks"), 0.0)
        # Seconds between two steps. Callbacks that are timed by name are not among them.
        self.outside_s = 0.0
        # Seconds that callbacks take within a phase; the phase's own time is without them.
        self.inside_s = {"backward": 0.0, "optimizer": 0.0}
        # Called with 3, the end of the optimizer, before a callback that may wait for the device.
        self.edge: Callable[[int], None] | None = None
        self.callbacks: dict[str, float] = {}  # seconds of each watched callback
        # How often each callback made the host wait for the device, in the steps that count reads.
        self.reads: dict[str, int] = {}
        # How many flushes, checkpoints and validations there were.
        self.counts = dict.fromkeys(BETWEEN_STEPS, 0)
        self.counts_reads = False
        # What torch.compile had done by the end of the first few steps. Compiling later is a waste.
        self.compiled: dict[str, float] = {}
        self._replaced: list[_ReplacedMethod] = []
        self._is_spending = False

    @property
    def not_in_phases_s(self) -> float:
        """All seconds counted here. A phase that they fall into subtracts them."""
        return self.outside_s + self.spent["callbacks"]

    def spend(self, part: str, seconds: float) -> None:
        """Add one logging, checkpoint or validation that took `seconds`."""
        self.spent[part] += seconds
        self.counts[part] += 1
        self.outside_s += seconds

    @contextmanager
    def spending(self, part: str) -> Iterator[None]:
        """Context manager: time its block and add it to `part`.

        A block within another block is part of the outer one and does not count twice.
        """
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

    def note_step(self, step: int) -> None:
        """Prepare for the next step; `step` is how many have ended, 0 at the start of training."""
        self.counts_reads = step in _STEPS_THAT_COUNT_READS
        if step == _STEPS_THAT_COUNT_READS[0]:
            self.reads.clear()  # a resumed training brings counts along
        if step in (0, FIRST_STEPS):
            self.compiled = compiled_so_far()

    def replace_method(self, owner: object, name: str, method: Callable[..., Any]) -> None:
        """Set `method` on the object itself, in front of its class's, until `restore_methods`.

        A bound method or a `partial` of one can be pickled; a function within a function cannot.
        """
        before = unset_method(owner, name)
        self._replaced.append(_ReplacedMethod(owner, name, method, before))
        set_method(owner, name, method)

    def watch(self, callbacks: Mapping[str, L.Callback]) -> None:
        """Time the hooks of these callbacks that Lightning calls every step or epoch.

        `callbacks` are by the name under which their seconds are counted.
        """
        self.restore_methods()
        for name, callback in callbacks.items():
            self.callbacks.setdefault(name, 0.0)
            for hook, phase in _HOOKS.items():
                if overrides(callback, hook, L.Callback):
                    timed = partial(self._run_timed, name, getattr(callback, hook), phase)
                    self.replace_method(callback, hook, timed)

    def restore_methods(self) -> None:
        """Undo every `replace_method`."""
        for replaced in self._replaced:
            current = unset_method(replaced.owner, replaced.name)
            # Other code may have set another method since; that one stays.
            restored = replaced.before if current is replaced.method else current
            if restored is not None:
                set_method(replaced.owner, replaced.name, restored)
        self._replaced = []
        self.edge = None

    def _run_timed(
        self, name: str, hook: Callable[..., Any], phase: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a callback's hook, and count its seconds or its reads under the callback's name."""
        if self.edge is not None and phase == "after the optimizer":
            self.edge(3)
        began = time.perf_counter()
        outside_s = self.outside_s
        try:
            if not self.counts_reads:
                return hook(*args, **kwargs)
            with DeviceReads() as reads:
                answer = hook(*args, **kwargs)
            self.reads[name] = self.reads.get(name, 0) + reads.count
            return answer
        finally:
            # The hook may have saved a checkpoint, which has been counted already.
            seconds = time.perf_counter() - began - (self.outside_s - outside_s)
            if not self.counts_reads:
                self.callbacks[name] += seconds
                self.spent["callbacks"] += seconds
                if phase in self.inside_s:
                    self.inside_s[phase] += seconds

    @property
    def reads_a_step(self) -> dict[str, float]:
        """How often each callback reads from the device in a step, of those that ever do."""
        steps = len(_STEPS_THAT_COUNT_READS)
        return {name: count / steps for name, count in self.reads.items() if count}


@dataclass(frozen=True, slots=True)
class _ReplacedMethod:
    """A method set on an object, and what the object itself (not its class) had before."""

    owner: object
    name: str
    method: Callable[..., Any]
    before: Callable[..., Any] | None


def find_clock(callbacks: Iterable[L.Callback]) -> Clock | None:
    """The clock of the first callback that has one."""
    clocks = (getattr(callback, "clock", None) for callback in callbacks)
    return next((clock for clock in clocks if isinstance(clock, Clock)), None)


def compiled_so_far() -> dict[str, float]:
    """`graphs` that torch.compile has made in this process, and the `seconds` it took.

    Empty if it never ran.
    """
    # Importing dynamo takes a second: where nobody has imported it, nothing was compiled.
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return {}
    graphs = float(dynamo.counters["stats"].get("unique_graphs", 0))
    if not graphs:
        return {}
    nanoseconds = dynamo.cumulative_time_spent_ns.get("entire_frame_compile", 0.0)
    return {"graphs": graphs, "seconds": nanoseconds / 1e9}
