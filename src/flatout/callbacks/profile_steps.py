"""Runs torch's profiler over a few steps: which operators a step runs, and how long each takes.

A window of steps lies between two validations. In its first steps the profiler warms up. The others
are saved as a trace for Perfetto (ui.perfetto.dev) and as a table of the slowest operators. Weights
and losses are those of a run without it.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from flatout.callbacks.curve_source import leave_out
from flatout.data.batches.feed import Feed
from flatout.distributed.both_lightnings import either
from flatout.engine.lightning_internals import is_second, unset_method
from flatout.errors import check_settings, setting
from flatout.files import write_table
from flatout.run_log import Say

TRACE = "trace.json.gz"
TABLE = "operators.csv"
_MOST_OPERATORS = 10  # rows of the table
_ENDLESS = 1 << 62  # steps of a training that has no limit
# Hooks that are set to None after the window, so that Lightning does not call them.
_HOOKS = ("on_train_batch_end", "on_train_end", "on_exception")
_MOST_STARTS = 64  # pauses between validations that are searched for a long enough one


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """Which steps are profiled. The override `monitor=profile` switches it on."""

    enabled: bool = setting(
        False, "Whether some steps are profiled, into trace and table.", example="monitor=profile"
    )
    wait: int = setting(20, "Optimizer steps before the profiler starts.", least=0)
    warmup: int = setting(3, "Steps that the profiler runs for but does not keep.", least=1)
    active: int = setting(
        8, "Steps that are kept.", least=1, most=1000, hint="A trace of more is large."
    )

    def __post_init__(self) -> None:
        check_settings(self, "monitor.profile")


@dataclass(frozen=True, slots=True)
class Window:
    """Steps counted from the beginning of training: the profiler starts after `start` of them."""

    start: int
    warmup: int
    active: int

    @property
    def stop(self) -> int:
        return self.start + self.warmup + self.active


class Operator(NamedTuple):
    operator: str
    calls: int
    self_ms_per_step: float
    share: float


def window(
    config: ProfileConfig, done: int, total: int, next_break: Callable[[int], int]
) -> Window | None:
    """Choose which of the steps from `done` to `total` are profiled; None if no step is left.

    `next_break` gives for a step the next one that follows a validation or the start of an epoch.
    The window must not reach over such a break. Example: 20 steps to wait, 3 to warm up, 8 to keep,
    and a break every 25 steps. From step 20 on only 5 would fit, so the window is steps 25 to 36.
    Where no stretch between two breaks is long enough, the longest is taken.
    """
    wanted = config.warmup + config.active
    first = min(done + config.wait, total)

    def starts_from(step: int) -> list[int]:
        starts = [step]
        while len(starts) < _MOST_STARTS and (step := next_break(step)) < total:
            starts.append(step)
        return starts

    def length(start: int) -> int:
        return min(wanted, next_break(start) - start, total - start)

    # In the order of preference: after the wait, at the very end, without any wait.
    last = max(done, min(first, total - wanted))
    best = max([*starts_from(first), last, *starts_from(done)], key=length)
    steps = length(best)
    if steps < 1:
        return None
    # A short window warms up for a third of its steps at most.
    warmup = max(1, min(config.warmup, steps // 3))
    active = min(config.active, max(1, steps - warmup))
    return Window(best, steps - active, active)


class ProfileSteps(Callback):
    """Profiles one window of steps on the first rank; after it the callback costs nothing."""

    _trainer: L.Trainer  # the one whose steps are profiled

    def __init__(
        self,
        *,
        wait: int = 20,
        warmup: int = 3,
        active: int = 8,
        folder: str | Path | None = None,
        say: Say = print,
    ) -> None:
        """`folder`: where the trace and the table go; None: the folder of the Trainer's logger."""
        self.config = ProfileConfig(enabled=True, wait=wait, warmup=warmup, active=active)
        self.folder = None if folder is None else Path(folder)
        self.say = say
        self.window: Window | None = None
        self._profiler: profile | None = None
        self._done = 0  # optimizer steps so far; one in which several optimizers step counts once
        self._global_step = 0  # Lightning's count at the last step, which counts each optimizer
        self._kept = 0  # steps of the window after the warm-up, so far
        self._has_written = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for hook in _HOOKS:  # an earlier training has set them to None
            unset_method(self, hook)
        self._has_written = False
        # `log_dir` is a collective: all ranks ask for it, or none.
        log_dir = trainer.log_dir if self.folder is None else None
        if not trainer.is_global_zero or is_second(self, trainer):
            self._leave()
            return
        self._trainer = trainer
        self._done = trainer.global_step
        self._global_step = trainer.global_step
        if self.folder is None:
            self.folder = Path(log_dir or trainer.default_root_dir)
        self.window = window(self.config, self._done, *_steps_and_breaks(trainer))
        if self.window is None:
            self.say("profile: no step is left to profile")
            self._leave()
        elif self.window.start == self._done:
            self._begin(self.window)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == self._global_step or self.window is None:
            return
        self._global_step = trainer.global_step
        self._done += 1
        if self._profiler is not None:
            self._kept = max(0, self._done - self.window.start - self.window.warmup)
            self._profiler.step()
            if self._done == self.window.stop:
                self._close()
        elif self._done == self.window.start:
            self._begin(self.window)

    def on_train_end(self, *_: Any) -> None:
        self._close()

    def on_exception(self, *_: Any) -> None:
        self._close()

    def _begin(self, window: Window) -> None:
        """Start torch's profiler for these steps, which come next."""
        # Else the profiler's library prints each start and stop on stderr.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_cuda else [])]
        with warnings.catch_warnings():  # a run of one step has none to warm up in
            warnings.filterwarnings("ignore", message="Profiler won't be using warmup")
            steps = schedule(wait=0, warmup=window.warmup, active=window.active, repeat=1)
        started = time.perf_counter()
        # `acc_events` changes nothing in one cycle, but without it torch 2.11 warns.
        profiler = profile(
            activities=activities, schedule=steps, on_trace_ready=self._write, acc_events=True
        )
        profiler.start()
        # Not earlier: torch 2.11 crashes when a profiler is stopped that failed to start.
        self._profiler = profiler
        leave_out(self._trainer, time.perf_counter() - started)

    def _close(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
        if not self._has_written:
            self.say("profile: training ended before the first step of the profile")
        self._leave()

    def _leave(self) -> None:
        """Cost nothing from now on: Lightning skips hooks that are None."""
        for hook in _HOOKS:
            setattr(self, hook, None)

    def _write(self, profiler: profile) -> None:
        """Write the trace and the table; print the table, and show it in TensorBoard."""
        if not self._kept or self.window is None or self.folder is None:
            return
        self._has_written = True
        started = time.perf_counter()
        first = self.window.start + self.window.warmup + 1
        wanted = "" if self._kept == self.config.active else f" of {self.config.active}"
        unfinished = self.folder / f".new-{TRACE}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(unfinished))
            unfinished.replace(self.folder / TRACE)
            averages = profiler.key_averages()
            has_kernels = self._is_cuda and any(event.self_device_time_total for event in averages)
            operators = slowest_operators(averages, self._kept, on_device=has_kernels)
            rows = [
                [name, calls, f"{ms:.6g}", f"{share:.4f}"] for name, calls, ms, share in operators
            ]
            write_table(self.folder / TABLE, [Operator._fields, *rows])
        except OSError as error:
            self.say(f"profile: cannot be written ({error}); training continues")
            unfinished.unlink(missing_ok=True)
            return
        last = first + self._kept - 1
        self.say(
            f"profile: {self._kept}{wanted} steps, {first} to {last}: {TRACE} for ui.perfetto.dev,"
            f" {TABLE}"
        )
        if self._is_cuda and not has_kernels:
            self.say("profile: the driver reports no times of kernels; these are the host's times")
        text = f"The slowest operators of steps {first} to {last}\n"
        for line in as_lines(operators):
            self.say(line)
            text += f"\n    {line}"
        for logger in self._trainer.loggers:
            if isinstance(logger, either(TensorBoardLogger)):
                logger.experiment.add_text("profile/operators", text, last)
        leave_out(self._trainer, time.perf_counter() - started)

    @property
    def _is_cuda(self) -> bool:
        return self._trainer.strategy.root_device.type == "cuda"


def _steps_and_breaks(trainer: L.Trainer) -> tuple[int, Callable[[int], int]]:
    """Optimizer steps of the whole training, and `next_break` for `window`.

    Example: 10 steps an epoch, a validation every 4. After step 5 the next break is 8. After step 8
    it is 10, the end of the epoch.
    """
    batches = int(min(trainer.num_training_batches, _ENDLESS))  # a stream's number is infinite
    loader = trainer.train_dataloader
    accumulate = trainer.accumulate_grad_batches
    if isinstance(loader, Feed):  # its plan decides where steps end
        accumulate = loader.plan.accumulate
    val_every = trainer.val_check_batch  # batches; None: at the end of an epoch only
    epoch = max(1, -(-batches // accumulate))
    between = epoch if val_every is None else max(1, int(min(val_every, batches)) // accumulate)
    limits = [trainer.max_steps if trainer.max_steps != -1 else _ENDLESS]
    if trainer.max_epochs not in (None, -1):
        limits.append(epoch * trainer.max_epochs)

    def next_break(step: int) -> int:
        in_epoch = step % epoch
        return step - in_epoch + min(epoch, (in_epoch // between + 1) * between)

    return min(limits), next_break


def slowest_operators(averages: Iterable[Any], steps: int, *, on_device: bool) -> list[Operator]:
    """Operators with the most time of their own: without the operators that they call.

    `averages`: events of torch's profiler over `steps`. `on_device`: count the time of an
    operator's kernels instead of the host's.
    """
    time_of = attrgetter("self_device_time_total" if on_device else "self_cpu_time_total")
    # Kernels are events too, but their operators contain their time already.
    events = [
        event
        for event in averages
        if event.device_type == DeviceType.CPU and not event.is_user_annotation
    ]
    total_us = sum(map(time_of, events)) or 1.0
    operators = []
    for event in sorted(events, key=time_of, reverse=True)[:_MOST_OPERATORS]:
        own_us = time_of(event)
        operators.append(Operator(event.key, event.count, own_us / 1000 / steps, own_us / total_us))
    return operators


def as_lines(operators: list[Operator]) -> list[str]:
    """The table as text, in aligned columns."""
    width = max((len(operator.operator) for operator in operators), default=0)
    lines = [f"  {'operator':<{width}}  {'calls':>8}  {'ms a step':>10}  {'share':>6}"]
    lines += [
        f"  {name:<{width}}  {calls:>8,}  {ms:>10.3f}  {share:>6.1%}"
        for name, calls, ms, share in operators
    ]
    return lines
