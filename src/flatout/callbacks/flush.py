"""What training says while it runs: every n steps the losses come over in one transfer and go to all who listen.

Between two flushes a step adds four host numbers; nothing waits for the device. Each flush is one row of `metrics.csv`,
one point of each TensorBoard curve and one turn of the progress line.
"""

from __future__ import annotations

import copy
import csv
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from flatout.callbacks.gpu import GPU_CURVES
from flatout.callbacks.hardware import Watch
from flatout.callbacks.host import HOST_CURVES
from flatout.callbacks.step_timer import FIRST_STEPS, PARTS, Clock, DeviceTimes, StepTimes, compiled_so_far
from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.engine.fast_loop import PHASES, edge_on_host, fast_loop_of
from flatout.engine.peaks import Peak
from flatout.tasks.task import Task

COLUMNS = {
    "train/loss": "mean loss of the steps since the last flush",
    "train/gradient_norm": "mean length of the gradient before clipping",
    "train/lr": "learning rate of the last step",
    "speed/rows_per_s": "rows trained a second since the last flush, over all ranks",
    "speed/tokens_per_s": "real tokens (padding not counted) a second",
    "speed/padding_share": "share of computed tokens that were padding",
    "speed/mfu": "share of the device's peak that real tokens took (on GPUs whose peak is known)",
    "time/wait_ms": "a batch's wait for data",
    "time/transfer_ms": "a batch's way to the device, where training waits for it",
    "time/forward_ms": "a batch's forward pass and loss",
    "time/backward_ms": "a batch's backward pass",
    "time/optimizer_ms": "clipping and optimizer step, over all batches",
    "time/callbacks_ms": "callbacks of your own, over all batches",
    "time/logging_ms": "writing these curves, over all batches",
    "time/checkpoint_ms": "checkpoints, over all batches",
    "time/validation_ms": "validations, over all batches",
    "time/other_ms": "what is left: the framework itself",
    "time/p50_ms": "half of all optimizer steps so far were quicker, logging, checkpoints and validations not counted",
    "time/p99_ms": "99 of 100 optimizer steps so far were quicker",
    **GPU_CURVES,
    **HOST_CURVES,
}
"""Every curve of training, and what it shows."""
_EARLY = 40
"""Steps after which there is something to tell."""
_KEPT = ("counts", "callbacks", "reads")
"""What a checkpoint holds of the clock."""
_COUNTED = [part for part in PARTS if part != "other"]


class Listener(Protocol):
    """Somebody who is told of each flush and each validation."""

    def on_flush(self, step: int, epoch: float, values: dict[str, float]) -> None: ...

    def on_validation(self, step: int, epoch: float, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Counts:
    """What is counted between two flushes, and over the whole run."""

    batches: int = 0
    rows: int = 0
    tokens: int = 0
    computed: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    """Of training, validations not counted."""
    parts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0.0))

    def add(self, other: Counts, sign: int = 1) -> None:
        for name in ("batches", "rows", "tokens", "computed", "flops", "seconds"):
            setattr(self, name, getattr(self, name) + sign * getattr(other, name))
        for part in _COUNTED:
            self.parts_s[part] += sign * other.parts_s[part]

    def split(self) -> dict[str, float]:
        """Seconds of each part, what is left among them."""
        parts = dict(self.parts_s)
        # While a device computes what was enqueued, callbacks and waiting for data cost nothing.
        work = sum(parts[name] for name in _COUNTED if name not in ("wait", "callbacks", "validation"))
        parts["callbacks"] = min(parts["callbacks"], max(0.0, self.seconds - work))
        busy = work + parts["callbacks"]
        parts["wait"] = min(parts["wait"], max(0.0, self.seconds - busy))
        return parts | {"other": max(0.0, self.seconds - busy - parts["wait"])}

    def values(self) -> dict[str, float]:
        """Rates and times a batch, under their curve names."""
        seconds, batches = max(self.seconds, 1e-9), max(self.batches, 1)
        return {
            "speed/rows_per_s": self.rows / seconds,
            "speed/tokens_per_s": self.tokens / seconds,
            "speed/padding_share": 1 - self.tokens / max(self.computed, 1),
            **{f"time/{part}_ms": 1000 * spent / batches for part, spent in self.split().items()},
        }


class Flush(Callback):
    """Counts each step on the host and flushes every `every` optimizer steps and at the end of each epoch."""

    def __init__(
        self,
        feed: Feed,
        listeners: list[Listener],
        every: int,
        watch: Watch | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.feed, self.listeners, self.every = feed, listeners, every
        self._validation_since = 0.0
        self.watch, self.clock = watch or Watch([]), clock or Clock()
        self.peak: Peak | None = None
        """Of one device, where it is known before training; a CPU's is measured afterwards."""
        self.total, self.first = Counts(), Counts()
        """All that was counted, and of it the first few steps."""
        self.step_times = StepTimes()
        self.steps, self.epochs = 0, 0
        self.seconds_to_first_step: float | None = None
        self._now = Counts()
        self._phase_s = dict.fromkeys(PHASES, 0.0)
        self._device_times: DeviceTimes | None = None
        self.tell_early: Callable[[], None] = lambda: None
        """Called once, when some dozens of steps are counted."""
        self._is_early = True
        self._fit_started = self._since = time.perf_counter()
        self._before = self._spent()
        self._step_since, self._outside_before = self._since, 0.0
        self._steps_s: list[float] = []
        self._steps_since = 0
        self._lengths: list[Tensor] = []
        self._count_flops: Callable[[Any], float | None] | None = None

    def counted(self) -> Counts:
        """All that is counted so far, without the first few steps where there were more."""
        found = copy.deepcopy(self.total)
        found.add(self._now)
        if found.batches > self.first.batches:
            found.add(self.first, sign=-1)
        return found

    def mfu(self, counts: Counts) -> float | None:
        """Share of all devices' peak that the real tokens of these counts took; None where either is not known."""
        if self.peak is None or not counts.flops or not counts.seconds:
            return None
        return counts.flops / counts.seconds / (self.peak.tflops * 1e12 * self.feed.plan.world)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Task)
        loop = fast_loop_of(trainer)
        assert loop is not None
        self._loop = loop
        if pl_module.device.type in ("cpu", "cuda"):  # of others only the host's time to enqueue is known
            self._phase_s = loop.phase_s
        self._count_flops = getattr(pl_module.model, "training_flops", None)
        if pl_module.device.type == "cuda":
            self._device_times = DeviceTimes()
            loop.edge = self._device_times.edge
        self.clock.compiled = compiled_so_far()
        self._start_clock()
        self._step_since, self._outside_before = time.perf_counter(), self.clock.outside_s

    def state_dict(self) -> dict[str, Any]:
        """What is counted and not told yet, and what was told so far."""
        self.take_times()
        return {
            "now": asdict(self._now),
            "total": asdict(self.total),
            "first": asdict(self.first),
            "step_times": self.step_times.state_dict(),
            "clock": {name: dict(getattr(self.clock, name)) for name in _KEPT},
            "steps_since": self._steps_since,
            "files": [listener.size() for listener in self.listeners if isinstance(listener, MetricsFile)],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._now, self.total = Counts(**state_dict["now"]), Counts(**state_dict["total"])
        self.first = Counts(**state_dict["first"])
        self.step_times.load_state_dict(state_dict["step_times"])
        for name in _KEPT:
            getattr(self.clock, name).update(state_dict["clock"][name])
        self._steps_since = state_dict["steps_since"]
        files = [listener for listener in self.listeners if isinstance(listener, MetricsFile)]
        for file, size in zip(files, state_dict["files"], strict=False):
            file.cut(size)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: FlatBatch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Task)
        now = self._now
        ranks = self.feed.plan.world  # each counts its own; the plan balances rows and tokens
        now.batches += 1
        now.rows += ranks * batch.num_real
        now.tokens += ranks * batch.num_tokens
        now.computed += ranks * pl_module.computed_tokens(batch)
        is_whole = batch.num_real == batch.num_rows
        self._lengths.append(batch.lengths if is_whole else batch.lengths[: batch.num_real])
        if self.seconds_to_first_step is None:
            self.seconds_to_first_step = time.perf_counter() - self._fit_started
        if batch.ends_step:
            self.end_step(trainer.global_step)
            if self._steps_since >= self.every:
                self._flush(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._flush(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._flush(trainer, pl_module)
            self._validation_since = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        assert isinstance(pl_module, Task)
        values = {f"val/{name}": value for name, value in pl_module.results.items()}
        for listener in self.listeners:
            self._tell(listener, "on_validation", trainer, values)
        seconds = time.perf_counter() - self._validation_since
        self.clock.spend("validation", seconds)
        self._since += seconds

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.steps, self.epochs = trainer.global_step, trainer.current_epoch
        assert isinstance(pl_module, Task)
        self._flush(trainer, pl_module)
        self.take_times()  # a validation and a checkpoint may have come after the last batch
        self.total.add(self._now)
        self._now = Counts()
        self._loop.edge = edge_on_host

    def leave_out(self, seconds: float) -> None:
        """Not count seconds that were spent just now on something that is of no step."""
        self._since += seconds
        self.clock.outside_s += seconds

    def end_step(self, step: int) -> None:
        """Write down how long it took, without what was done between it and the one before."""
        self._steps_since += 1
        now, outside = time.perf_counter(), self.clock.outside_s
        outside_s = outside - self._outside_before
        if self._device_times is None:
            self._steps_s.append(now - self._step_since - outside_s)
        else:  # the host only enqueues them
            self._device_times.end_step(outside_s)
        self._step_since, self._outside_before = now, outside
        self.clock.look(step)
        if step == FIRST_STEPS:
            self.clock.compiled = compiled_so_far()
            self.take_times()
            self.first = copy.deepcopy(self.total)
            self.first.add(self._now)

    def _flush(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Task)
        if not self._now.batches:
            return
        asked = time.perf_counter()
        losses, norms = self._loop.take_losses()
        if self._device_times is not None:  # what was waited for was the device's own work
            asked = time.perf_counter()
        self.take_times()
        now, self._now = self._now, Counts()
        self.total.add(now)
        values = now.values() | self.watch.take()
        for percent in (50, 99):
            if (quicker := self.step_times.percentile(percent / 100)) is not None:
                values[f"time/p{percent}_ms"] = 1000 * quicker
        if (share := self.mfu(now)) is not None:
            values["speed/mfu"] = share
        if losses:
            values["train/loss"] = sum(losses) / len(losses)
        if norms:
            values["train/gradient_norm"] = sum(norms) / len(norms)
        values["train/lr"] = self._loop.rate
        self._steps_since = 0
        for listener in self.listeners:
            self._tell(listener, "on_flush", trainer, values)
        self.clock.spend("logging", time.perf_counter() - asked)
        if self._is_early and trainer.global_step >= _EARLY:
            self._is_early = False
            self.tell_early()

    def _tell(self, listener: Listener, event: str, trainer: L.Trainer, values: dict[str, float]) -> None:
        """Tell a listener; one that cannot write any more is let go, and training goes on."""
        try:
            getattr(listener, event)(trainer.global_step, _epoch(trainer), values)
        except OSError as error:
            self.listeners = [each for each in self.listeners if each is not listener]
            warnings.warn(f"{type(listener).__name__} ends here: {error}", RuntimeWarning, stacklevel=2)

    def _take_flops(self) -> float:
        """Operations of the batches since the last look, as the model's own shape tells; 0 where it does not.

        Layers that thawed in between are counted as if they had been trained since the last flush.
        """
        lengths, self._lengths = self._lengths, []
        return float(self._count_flops(torch.cat(lengths).numpy()) or 0.0) if self._count_flops and lengths else 0.0

    def take_times(self) -> None:
        """Add what the clocks have counted, and start them anew."""
        now = self._now
        now.flops += self.feed.plan.world * self._take_flops()
        now.seconds += time.perf_counter() - self._since
        if self._device_times is not None:
            self._phase_s.update(self._device_times.take())
            self._steps_s += self._device_times.take_steps()
        for part, seconds in self._spent().items():
            now.parts_s[part] += seconds - self._before[part]
        self.step_times.add(self._steps_s)
        self._steps_s = []
        self._start_clock()

    def _spent(self) -> dict[str, float]:
        """Seconds of each part so far, as its own clock counts them."""
        feed, clock = self.feed, self.clock
        spent = {"wait": feed.wait_s - feed.transfer_s, "transfer": feed.transfer_s, **self._phase_s, **clock.spent}
        if self._device_times is None:
            for phase, seconds in clock.inside_s.items():
                spent[phase] -= seconds
        return spent

    def _start_clock(self) -> None:
        self._phase_s.update(dict.fromkeys(PHASES, 0.0))
        self._before = self._spent()
        self._since = time.perf_counter()


def _epoch(trainer: L.Trainer) -> float:
    """Epochs done, with the share of the present one."""
    batches = int(trainer.num_training_batches) or 1
    return min(
        trainer.current_epoch + (trainer.fit_loop.epoch_loop.batch_idx + 1) / batches, float(trainer.max_epochs or 1e9)
    )


class MetricsFile:
    """`metrics.csv`: one row a flush or a validation, in long-lived columns, readable while the run goes on."""

    def __init__(self, path: Path, metrics: list[str], *, is_afresh: bool = True) -> None:
        """`is_afresh` false: what a run that goes on has written is kept."""
        self.columns = ["step", "epoch", *COLUMNS, *(f"val/{name}" for name in metrics)]
        self._file: TextIO = path.open("w" if is_afresh else "a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, self.columns, extrasaction="ignore")
        if self._file.tell() == 0:
            self._writer.writeheader()

    def on_flush(self, step: int, epoch: float, values: dict[str, float]) -> None:
        row = {name: f"{value:.6g}" for name, value in values.items()}
        self._writer.writerow({"step": step, "epoch": f"{epoch:.4f}", **row})
        self._file.flush()

    on_validation = on_flush

    def size(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def cut(self, size: int) -> None:
        """Take away rows that were written after a checkpoint: they will be written again."""
        if self._file.seek(0, os.SEEK_END) > size:
            self._file.truncate(size)
            self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._file.close()


class Curves:
    """TensorBoard's event file in the run folder."""

    def __init__(self, folder: Path, after: int | None = None, charts: dict[str, dict[str, list[Any]]] | None = None):
        """`after`: the step a run goes on from; what was written beyond it counts no more. `charts`: their layout."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=None if after is None else after + 1)
        if charts is not None:
            self.writer.add_custom_scalars(charts)

    def on_flush(self, step: int, epoch: float, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    on_validation = on_flush

    def text(self, name: str, text: str, step: int) -> None:
        """A text in markdown, on the page of texts."""
        self.writer.add_text(name, text, step)

    def close(self) -> None:
        self.writer.close()
