"""Curves of the card and of the machine: a thread samples them each second, so no step waits for a
driver or a file.

A flush takes the means since the last one; `summary` gives medians over the whole training. On the
first rank only. The machine's figures come from psutil and from the files of control groups: a
machine's own promise too much.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
from lightning.pytorch.trainer.states import TrainerStatus

from flatout.callbacks.curve_source import CurveSource
from flatout.callbacks.gpu import Card, watched_card
from flatout.distributed.limits import cpu_periods, processor_seconds
from flatout.engine.lightning_internals import is_second
from flatout.errors import require
from flatout.run_log import Say


class Host:
    """Rates since the last sample, and memory in use; the first sample counts from the
    construction.
    """

    name = "host"

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.process = psutil.Process()
        self._before = self._counters()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy counts for the process that it is made in."""
        return type(self), (self.root,)

    def sample(self) -> dict[str, float]:
        now = self._counters()
        before = self._before
        self._before = now
        seconds = max(now["seconds"] - before["seconds"], 1e-9)
        gone = {name: now[name] - before[name] for name in now.keys() & before.keys()}
        found = {
            "host/process_cpu_cores": max(0.0, gone["process_cpu_s"]) / seconds,
            "host/machine_cpu_share": gone["busy_s"] / max(gone["busy_s"] + gone["idle_s"], 1e-9),
            "host/process_memory_gb": self.process.memory_info().rss / 1e9,
            "host/available_memory_gb": psutil.virtual_memory().available / 1e9,
            "host/swap_in_mb_per_s": gone["swap_in"] / seconds / 1e6,
            "host/swap_out_mb_per_s": gone["swap_out"] / seconds / 1e6,
        }
        if "disk_read" in gone:
            found["host/disk_read_mb_per_s"] = gone["disk_read"] / seconds / 1e6
        if gone.get("nr_periods"):
            found["host/cpu_held_back_share"] = gone["nr_throttled"] / gone["nr_periods"]
        return found

    def facts(self) -> dict[str, object]:
        return {}

    def _counters(self) -> dict[str, float]:
        """What only ever grows."""
        cores = psutil.cpu_times()
        swap = psutil.swap_memory()
        disk = psutil.disk_io_counters()
        # Guests' time is in the users' already; a host that takes the cores away leaves them
        # neither busy nor idle.
        parts = {
            name: value
            for name, value in cores._asdict().items()
            if name not in ("guest", "guest_nice", "steal")
        }
        idle = parts.get("idle", 0.0) + parts.get("iowait", 0.0)
        found = {
            "seconds": time.perf_counter(),
            "process_cpu_s": processor_seconds(self.process),
            "busy_s": sum(parts.values()) - idle,
            "idle_s": idle,
            "swap_in": float(swap.sin),
            "swap_out": float(swap.sout),
        }
        if disk is not None:  # some containers show none
            found["disk_read"] = float(disk.read_bytes)
        return found | cpu_periods(self.root)


# what is asked for its numbers now, by curve name, and for facts that are no curve
Source = Host | Card


class Watch:
    """A thread that samples its sources from entering to leaving; without any source there is no
    thread.
    """

    def __init__(self, sources: Sequence[Source], say: Say = print, every_s: float = 1.0) -> None:
        self.sources = list(sources)
        self.say = say
        self.every_s = every_s
        self._answering = list(sources)
        self._all: dict[str, list[float]] = {}
        self._taken: dict[str, int] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        # whether to go on: an error may end training unheard
        self.is_needed: Callable[[], bool] = lambda: True

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has what was sampled, and neither thread nor sources: some are handles of a
        driver.
        """
        return type(self), ([], self.say, self.every_s), {"_all": self._all, "_taken": self._taken}

    def __enter__(self) -> Watch:
        if self._answering:
            self._end.clear()
            self._thread = threading.Thread(target=self._sample_on, name="watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread is not None:
            # a driver that hangs is not waited for: the thread is a daemon
            self._thread.join(self.every_s)
            self._thread = None

    def take(self) -> dict[str, float]:
        """Means of the samples since the last time, by curve name."""
        with self._lock:
            fresh = {name: seen[self._taken.get(name, 0) :] for name, seen in self._all.items()}
            self._taken = {name: len(seen) for name, seen in self._all.items()}
        return {name: statistics.fmean(values) for name, values in fresh.items() if values}

    def summary(self) -> dict[str, dict[str, object]]:
        """Medians of all samples, and the facts, source by source; empty where there are no
        samples.
        """
        with self._lock:
            seen = {name: statistics.median(values) for name, values in self._all.items()}
        found: dict[str, dict[str, object]] = {}
        for source in self.sources:
            prefix = f"{source.name}/"
            own = {
                name.removeprefix(prefix): value
                for name, value in seen.items()
                if name.startswith(prefix)
            }
            if own:
                found[source.name] = own | source.facts()
        return found

    def look(self) -> None:
        for source in list(self._answering):
            try:
                seen = source.sample()
            except Exception as error:
                # each driver raises its own classes, and a monitor must not end training
                self._answering.remove(source)
                self.say(f"{source.name}: no longer watched ({error}); training continues")
                continue
            with self._lock:
                for name, value in seen.items():
                    self._all.setdefault(name, []).append(value)

    def _sample_on(self) -> None:
        while self._answering and not self._end.wait(self.every_s) and self.is_needed():
            self.look()


class HardwareMonitor(CurveSource):
    """Curves of the GPU (by NVML) and of the host (by psutil and control groups)."""

    def __init__(
        self,
        every_n_steps: int = 50,
        *,
        every_s: float = 1.0,
        sources: Sequence[Source] | None = None,
        say: Say = print,
    ) -> None:
        """`sources`: what to sample; None: this machine, and the card of the Trainer."""
        super().__init__(every_n_steps)
        require(every_s > 0, "every_s", f"{every_s:g}", allowed="more than 0")
        self.sources = sources
        self.every_s = every_s
        self.say = say
        self.watch = Watch(sources or [], say, every_s)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self.end()  # the thread of a search or a training before, which an error ended
        if is_second(self, trainer):
            self.say("HardwareMonitor: another one watches already; this one logs nothing")
            return
        here = (
            hardware_of(trainer.strategy.root_device)
            if trainer.is_global_zero and self.sources is None
            else []
        )
        if self.sources is None or not self.watch.sources:  # a copy's watch has none
            self.watch = Watch(self.sources or here, self.say, self.every_s)
        self.watch.is_needed = lambda: trainer.state.status == TrainerStatus.RUNNING
        self.watch.__enter__()

    def end(self) -> None:
        self.watch.__exit__()

    def take(self, trainer: L.Trainer) -> dict[str, float]:
        return self.watch.take()

    def summary(self) -> dict[str, dict[str, Any]]:
        """Medians over the training, and facts such as reasons for throttling, for each source."""
        return self.watch.summary()


def hardware_of(device: torch.device) -> list[Source]:
    """This machine, and the card behind a CUDA device where the driver knows it."""
    card = watched_card(device)
    return [Host()] if card is None else [Host(), card]
