"""The clocks of a training: phases and lengths of steps without a wait for the device, and what
lies between steps.

Between steps are logging, checkpoints, validations, and others' callbacks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning as L

from flatout.callbacks.device_reads import DeviceReads
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
            with DeviceReads() as reads:
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
