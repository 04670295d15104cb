"""Seconds of a training that belong to no phase of a step: logging, checkpoints, validations, and others' callbacks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import lightning as L
import torch
from torch.utils._python_dispatch import TorchDispatchMode

BETWEEN_STEPS = ("logging", "checkpoint", "validation")
_LOOK_CLOSELY_AT = range(20, 23)
"""Steps in which the reads of a callback are counted; counting takes time itself."""
_INSIDE_A_STEP = {
    "on_before_backward": "backward",
    "on_after_backward": "backward",
    "on_before_zero_grad": "backward",
    "on_before_optimizer_step": "optimizer",
}
_BESIDE_A_STEP = ("on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end")


class Clock:
    """Counts what each part takes that is no phase of a step, and what each watched callback takes."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys((*BETWEEN_STEPS, "callbacks"), 0.0)
        self.outside_s = 0.0
        """Seconds of it between two steps."""
        self.inside_s = dict.fromkeys(set(_INSIDE_A_STEP.values()), 0.0)
        """Seconds of the callbacks inside each phase."""
        self.callbacks: dict[str, float] = {}
        """Seconds of each watched callback."""
        self.reads: dict[str, int] = {}
        """How often each of them made the host wait for a number of the device, in the steps looked at closely."""
        self.counts = dict.fromkeys(BETWEEN_STEPS, 0)
        """Number of flushes, checkpoints and validations."""
        self.looks_closely = False
        self.compiled: dict[str, float] = {}
        """What torch.compile had done after the first few steps, in which it must."""
        self._wrapped: list[tuple[L.Callback, str]] = []
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
        self._is_spending, began = True, time.perf_counter()
        try:
            yield
        finally:
            self._is_spending = False
            self.spend(part, time.perf_counter() - began)

    def look(self, step: int) -> None:
        self.looks_closely = step in _LOOK_CLOSELY_AT

    def watch(self, callbacks: Mapping[str, L.Callback]) -> None:
        """Time the hooks of these callbacks that Lightning calls every step or epoch."""
        for name, callback in callbacks.items():
            self.callbacks.setdefault(name, 0.0)
            for hook in (*_BESIDE_A_STEP, *_INSIDE_A_STEP):
                if getattr(type(callback), hook) is not getattr(L.Callback, hook):
                    setattr(callback, hook, self._timed(name, getattr(callback, hook), _INSIDE_A_STEP.get(hook)))
                    self._wrapped.append((callback, hook))

    def leave(self) -> None:
        """Put the hooks of the watched callbacks back."""
        for callback, hook in self._wrapped:
            delattr(callback, hook)
        self._wrapped = []

    def _timed(self, name: str, hook: Callable[..., Any], phase: str | None) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began, outside_s = time.perf_counter(), self.outside_s
            try:
                if not self.looks_closely:
                    return hook(*args, **kwargs)
                with _Reads() as reads:
                    answer = hook(*args, **kwargs)
                self.reads[name] = self.reads.get(name, 0) + reads.count
                return answer
            finally:
                seconds = time.perf_counter() - began - (self.outside_s - outside_s)  # it may have saved a checkpoint
                if not self.looks_closely:
                    self.callbacks[name] += seconds
                    self.spent["callbacks"] += seconds
                    if phase is not None:
                        self.inside_s[phase] += seconds

        return timed

    @property
    def reads_a_step(self) -> dict[str, float]:
        return {name: count / len(_LOOK_CLOSELY_AT) for name, count in self.reads.items() if count}


def compiled_so_far() -> dict[str, float]:
    """Graphs that torch.compile has made in this process, and the seconds it took; empty where it never ran."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    graphs = 0.0 if dynamo is None else float(dynamo.counters["stats"].get("unique_graphs", 0))
    if dynamo is None or not graphs:
        return {}
    return {"graphs": graphs, "seconds": dynamo.cumulative_time_spent_ns.get("entire_frame_compile", 0.0) / 1e9}


class _Reads(TorchDispatchMode):
    """Counts the reads of numbers from the device: at each the host waits for all that it has enqueued."""

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
