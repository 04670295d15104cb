"""torch's profiler over one window of steps: the operators of a step, and the time of each.

The window has some steps to warm up, then those that are kept: as a trace for Perfetto
(ui.perfetto.dev) and as a table of the slowest operators. Weights and losses are those of a run
without it. It lies between two validations.
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
from flatout.engine.lightning_internals import is_second
from flatout.errors import check_settings, setting
from flatout.files import write_table
from flatout.run_log import Say

TRACE = "trace.json.gz"
TABLE = "operators.csv"
_MOST_OPERATORS = 10
_ENDLESS = 1 << 62
# hooks that Lightning passes over after the window
_LEFT_OUT = ("on_train_batch_end", "on_train_end", "on_exception")
_MOST_PLACES = 64  # stretches between two validations to search for one that is long enough


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """Which steps are profiled; monitor=profile switches it on."""

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
    """Where the profiler looks, of steps `done` to `total`; `next_break`: the first step after the
    next pause.
    """
    wanted = config.warmup + config.active
    first = min(done + config.wait, total)

    def places_from(place: int) -> list[int]:
        places = [place]
        while len(places) < _MOST_PLACES and (place := next_break(place)) < total:
            places.append(place)
        return places

    def length(place: int) -> int:
        return min(wanted, next_break(place) - place, total - place)

    best = max(
        [*places_from(first), max(done, min(first, total - wanted)), *places_from(done)], key=length
    )
    steps = length(best)
    if steps < 1:
        return None
    active = min(config.active, max(1, steps - max(1, min(config.warmup, steps // 3))))
    return Window(best, steps - active, active)


class ProfileSteps(Callback):
    """Profiles one window of steps; afterwards it costs nothing. On the first rank only."""

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
        self._done = 0
        self._seen = 0
        self._kept = 0
        self._has_written = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for hook in _LEFT_OUT:  # of a training before
            vars(self).pop(hook, None)
        self._has_written = False
        log_dir = trainer.log_dir if self.folder is None else None  # all ranks ask for it, or none
        if not trainer.is_global_zero or is_second(self, trainer):
            self._leave()
            return
        self._trainer = trainer
        self._done = trainer.global_step
        self._seen = trainer.global_step
        if self.folder is None:
            self.folder = Path(log_dir or trainer.default_root_dir)
        self.window = window(self.config, self._done, *_steps_and_breaks(trainer))
        if self.window is None:
            self.say("profile: no step is left to profile")
            self._leave()
        elif self.window.start == self._done:
            self._begin(self.window)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == self._seen or self.window is None:
            return
        # a step of several optimizers is one
        self._seen = trainer.global_step
        self._done = self._done + 1
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

    def _begin(self, at: Window) -> None:
        # Its library announces each start and stop on stderr, at the highest of its levels.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_cuda else [])]
        with warnings.catch_warnings():  # a run of one step has none to warm up in
            warnings.filterwarnings("ignore", message="Profiler won't be using warmup")
            steps = schedule(wait=0, warmup=at.warmup, active=at.active, repeat=1)
        started = time.perf_counter()
        # There is one cycle, so no events pile up; without the word, torch 2.11 warns that they do
        # not.
        profiler = profile(
            activities=activities, schedule=steps, on_trace_ready=self._write, acc_events=True
        )
        profiler.start()
        # not before: torch 2.11 crashes where a profiler that failed to start is stopped
        self._profiler = profiler
        leave_out(self._trainer, time.perf_counter() - started)

    def _close(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
        if not self._has_written:
            self.say("profile: training ended before a step was kept")
        self._leave()

    def _leave(self) -> None:
        """Lightning passes over hooks that are None."""
        for hook in _LEFT_OUT:
            setattr(self, hook, None)

    def _write(self, done: profile) -> None:
        if not self._kept or self.window is None or self.folder is None:
            return
        self._has_written = True
        started = time.perf_counter()
        first = self.window.start + self.window.warmup + 1
        wanted = "" if self._kept == self.config.active else f" of {self.config.active}"
        beside = self.folder / f".new-{TRACE}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            done.export_chrome_trace(str(beside))
            beside.replace(self.folder / TRACE)
            averages = done.key_averages()
            has_kernels = self._is_cuda and any(each.self_device_time_total for each in averages)
            found = slowest(averages, self._kept, on_device=has_kernels)
            rows = [[name, calls, f"{ms:.6g}", f"{share:.4f}"] for name, calls, ms, share in found]
            write_table(self.folder / TABLE, [Operator._fields, *rows])
        except OSError as error:
            self.say(f"profile: cannot be written ({error}); training continues")
            beside.unlink(missing_ok=True)
            return
        last = first + self._kept - 1
        self.say(
            f"profile: {self._kept}{wanted} steps, {first} to {last}: {TRACE} for ui.perfetto.dev,"
            f" {TABLE}"
        )
        if self._is_cuda and not has_kernels:
            self.say("profile: the driver has no times of kernels; these are the host's")
        table = as_lines(found)
        for line in table:
            self.say(line)
        text = "\n".join(
            [
                f"The slowest operators of steps {first} to {last}",
                "",
                *(f"    {line}" for line in table),
            ]
        )
        for logger in self._trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("profile/operators", text, last)
        leave_out(self._trainer, time.perf_counter() - started)

    @property
    def _is_cuda(self) -> bool:
        return self._trainer.strategy.root_device.type == "cuda"


def _steps_and_breaks(trainer: L.Trainer) -> tuple[int, Callable[[int], int]]:
    """Optimizer steps of the whole training, and for a step the next one with a validation or an
    epoch's end.
    """
    batches = int(min(trainer.num_training_batches, _ENDLESS))  # of a stream nobody knows
    accumulate = getattr(
        getattr(trainer.train_dataloader, "plan", None),
        "accumulate",
        trainer.accumulate_grad_batches,
    )
    asked = trainer.val_check_batch
    epoch = max(1, -(-batches // accumulate))
    between = epoch if asked is None else max(1, int(min(asked, batches)) // accumulate)
    limits = [trainer.max_steps if trainer.max_steps != -1 else _ENDLESS]
    limits += [epoch * trainer.max_epochs] if trainer.max_epochs not in (None, -1) else []

    def next_break(step: int) -> int:
        begun, at = step - step % epoch, step % epoch
        return begun + min(epoch, (at // between + 1) * between)

    return min(limits), next_break


def slowest(averages: Iterable[Any], steps: int, *, on_device: bool) -> list[Operator]:
    """Operators with the most self time, without that of operators they call; on a GPU, of their
    kernels.
    """
    time_of = attrgetter("self_device_time_total" if on_device else "self_cpu_time_total")
    # Kernels are listed again, as such.
    operators = [
        each
        for each in averages
        if each.device_type == DeviceType.CPU and not each.is_user_annotation
    ]
    total = sum(map(time_of, operators)) or 1.0
    ordered = sorted(operators, key=time_of, reverse=True)[:_MOST_OPERATORS]
    return [
        Operator(each.key, each.count, time_of(each) / 1000 / steps, time_of(each) / total)
        for each in ordered
    ]


def as_lines(operators: list[Operator]) -> list[str]:
    """The table in even columns."""
    width = max((len(each.operator) for each in operators), default=0)
    lines = [f"  {'operator':<{width}}  {'calls':>8}  {'ms a step':>10}  {'share':>6}"]
    lines += [
        f"  {name:<{width}}  {calls:>8,}  {ms:>10.3f}  {share:>6.1%}"
        for name, calls, ms, share in operators
    ]
    return lines
