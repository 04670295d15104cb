"""Splits the time of training into parts, such as waiting for data, forward and backward pass.

It costs a few microseconds a step and never waits for the device. On a CPU the host's clock times
the phases, on a GPU events do (`phase_clocks.py`). The fast loop marks the edges of the phases;
without it, Lightning's hooks do. `clock.py` times the callbacks of others by name, and logging,
validations and checkpoints.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from flatout.callbacks.clock import FIRST_STEPS, PARTS, Clock
from flatout.callbacks.curve_source import CurveSource, fast_steps_of
from flatout.callbacks.phase_clocks import DevicePhaseClock, HookPhaseClock
from flatout.callbacks.running_sums import RunningSums, Sums
from flatout.callbacks.step_times import StepTimes
from flatout.distributed.both_lightnings import either
from flatout.engine.lightning_internals import PHASES, callbacks_of

_COUNTED = [part for part in PARTS if part != "other"]
_SAVED_OF_CLOCK = ("counts", "callbacks", "reads")


@dataclass(slots=True)
class Split(Sums):
    """The time of some batches, part by part."""

    seconds: float = 0.0  # of training without validations
    parts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0.0))

    def split(self) -> dict[str, float]:
        """Seconds of each part, `other` among them."""
        parts = dict(self.parts_s)
        # While a device still computes, callbacks and waiting for data cost no time of training.
        # They count only as far as the other parts leave time: of 2.0 s with 1.8 s of device work,
        # 0.6 s of callbacks count as 0.2 s.
        work = sum(
            parts[name] for name in _COUNTED if name not in ("wait", "callbacks", "validation")
        )
        parts["callbacks"] = min(parts["callbacks"], max(0.0, self.seconds - work))
        busy = work + parts["callbacks"]
        parts["wait"] = min(parts["wait"], max(0.0, self.seconds - busy))
        return parts | {"other": max(0.0, self.seconds - busy - parts["wait"])}

    def values(self) -> dict[str, float]:
        """Milliseconds of each part for each batch, under their curve names."""
        batches = max(self.batches, 1)
        return {f"time/{part}_ms": 1000 * spent / batches for part, spent in self.split().items()}


class StepTimer(CurveSource):
    """Curves of how the time of a step splits into parts, and percentiles of step times."""

    def __init__(
        self, every_n_steps: int = 50, *, callbacks: Mapping[str, L.Callback] | None = None
    ) -> None:
        """`callbacks`: those to time, by name; None: all but flatout's and those that save."""
        super().__init__(every_n_steps)
        self.clock = Clock()
        self.callbacks = callbacks
        self.times = RunningSums(Split)
        self.step_times = StepTimes()
        self.seconds_to_first_step: float | None = None
        """From the construction of this callback to the end of the first batch."""
        self._phase_s = dict.fromkeys(PHASES, 0.0)
        self._device_times: DevicePhaseClock | None = None
        self._hook_times: HookPhaseClock | None = None
        # The training's loader if it measures its own waits, as flatout's feeds do; else None.
        self._loader: Any = None
        self._is_fast = True
        self._made = time.perf_counter()
        self._since = self._made
        self._before = self._spent()
        self._step_since = self._since
        self._outside_before = 0.0
        self._steps_s: list[float] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":  # not later: the fast loop looks for overridden hooks in `on_fit_start`
            self.clock.watch(_others(trainer) if self.callbacks is None else self.callbacks)

    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Every checkpoint is timed, also those of Lightning's own callbacks.
        self.clock.replace_method(
            trainer, "save_checkpoint", partial(_timed_save, self.clock, trainer.save_checkpoint)
        )
        loader = trainer.train_dataloader
        device = trainer.strategy.root_device.type
        self._loader = loader if hasattr(loader, "wait_s") else None
        self._device_times = DevicePhaseClock() if device == "cuda" else None
        fast = fast_steps_of(trainer)
        self._is_fast = fast is not None
        self._phase_s = dict.fromkeys(PHASES, 0.0)
        if fast is None or self._loader is None:
            self._time_by_hooks(trainer)
        if fast is not None and self._device_times is not None:
            self.clock.replace_method(fast, "edge", self._device_times.edge)
        elif fast is not None and device == "cpu":
            # Elsewhere the host knows only how long enqueuing takes.
            self._phase_s = fast.phase_s
        self.clock.note_step(0)
        self._start_clock()
        self._step_since = time.perf_counter()
        self._outside_before = self.clock.outside_s

    def _time_by_hooks(self, trainer: L.Trainer) -> None:
        """Time phases by Lightning's hooks; with a fast loop, only the wait for data.

        Lightning calls hooks of the trainer's callbacks only. If this timer is a part of one of
        them (`RunCurves`), the hooks are set on that one.
        """
        carrier: CurveSource = self
        for callback in callbacks_of(trainer):
            if isinstance(callback, CurveSource) and self in callback.parts:
                carrier = callback
                break
        self._hook_times = HookPhaseClock(self.clock, None if self._is_fast else self._device_times)
        # Set on the object, not defined in the class: with a fast loop Lightning then has no hooks
        # of the backward pass to call.
        phases = {} if self._is_fast else {"on_before_backward": 1, "on_after_backward": 2}
        for name, edge in {"on_train_batch_start": 0, **phases}.items():
            self.clock.replace_method(carrier, name, partial(self._hook_times.edge, edge))
        if not self._is_fast:
            self._phase_s = self._hook_times.spent

    def count(self, batch: object) -> None:
        if self._hook_times is not None:
            self._hook_times.edge(3)
        self.times.now.batches += 1
        if self.seconds_to_first_step is None:
            self.seconds_to_first_step = time.perf_counter() - self._made

    def count_stretch(self, batches: Sequence[object]) -> None:
        """Each step of a stretch counts with the same share of its time."""
        self.times.now.batches += len(batches)
        self._end_steps(len(batches))

    def end_step(self, step: int) -> None:
        """Note the step's time, without what lay between it and the step before."""
        self._end_steps(1)
        self.clock.note_step(step)
        if step == FIRST_STEPS:
            self.close()
            self.times.mark_first()

    def _end_steps(self, steps: int) -> None:
        now = time.perf_counter()
        outside = self.clock.outside_s
        outside_s = outside - self._outside_before
        if self._device_times is None:
            seconds = now - self._step_since - outside_s
            self._steps_s += [seconds / steps] * steps
        else:  # the host has only enqueued the step
            self._device_times.end_step(outside_s, steps)
        self._step_since = now
        self._outside_before = outside

    def leave_out(self, seconds: float, *, is_validation: bool = False) -> None:
        self._since += seconds
        if is_validation:
            self.clock.spend("validation", seconds)
        else:
            self.clock.outside_s += seconds

    def settle(self) -> None:
        self.close()
        self.times.flush()

    def end(self) -> None:
        self.clock.restore_methods()

    def take(self, trainer: L.Trainer) -> dict[str, float]:
        self.close()
        values = self.times.flush().values()
        if self._loader is None:  # the transfer to the device is part of the wait then
            values.pop("time/transfer_ms")
        for percent in (50, 99):
            seconds = self.step_times.percentile(percent / 100)
            if seconds is not None:
                values[f"time/p{percent}_ms"] = 1000 * seconds
        return values

    def state_dict(self) -> dict[str, Any]:
        self.close()
        clock = {name: dict(getattr(self.clock, name)) for name in _SAVED_OF_CLOCK}
        return (
            self.times.state_dict()
            | {"step_times": self.step_times.state_dict(), "clock": clock}
            | self.distance()
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.times.load_state_dict(state_dict)
        self.step_times.load_state_dict(state_dict["step_times"])
        for name in _SAVED_OF_CLOCK:
            getattr(self.clock, name).update(state_dict["clock"][name])
        self.restore_distance(state_dict)

    def close(self) -> None:
        """Add what all clocks have counted to the sums since the last flush; restart the clocks."""
        now = self.times.now
        now.seconds += time.perf_counter() - self._since
        if self._device_times is not None:
            phase_s, steps_s = self._device_times.take()
            self._phase_s.update(phase_s)
            self._steps_s += steps_s
        for part, seconds in self._spent().items():
            now.parts_s[part] += seconds - self._before[part]
        self.step_times.add(self._steps_s)
        self._steps_s = []
        self._start_clock()

    def _spent(self) -> dict[str, float]:
        """Readings of all clocks, in seconds by part; callers take differences of two."""
        wait_s = 0.0 if self._hook_times is None else self._hook_times.spent["wait"]
        spent = self._phase_s | self.clock.spent | {"wait": wait_s, "transfer": 0.0}
        loader = self._loader
        if loader is not None:
            spent |= {"wait": loader.wait_s - loader.transfer_s, "transfer": loader.transfer_s}
        if self._device_times is None and self._is_fast:
            # The fast loop's phases contain the callbacks that it calls within them.
            for phase, seconds in self.clock.inside_s.items():
                spent[phase] -= seconds
        return spent

    def _start_clock(self) -> None:
        self._phase_s.update(dict.fromkeys(PHASES, 0.0))
        self._before = self._spent()
        self._since = time.perf_counter()


def _timed_save(clock: Clock, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    with clock.spending("checkpoint"):
        save(*args, **kwargs)


def _others(trainer: L.Trainer) -> dict[str, L.Callback]:
    """Callbacks that are not flatout's, by class name; the second of a class is "Name 2".

    Without those that save checkpoints: saving is a part of its own.
    """
    others = dict[str, L.Callback]()
    count = Counter[str]()
    for callback in callbacks_of(trainer):
        is_of_flatout = type(callback).__module__.startswith("flatout.")
        if is_of_flatout or isinstance(callback, either(Checkpoint)):
            continue
        name = type(callback).__name__
        count[name] += 1
        key = name if count[name] == 1 else f"{name} {count[name]}"
        others[key] = callback
    return others
