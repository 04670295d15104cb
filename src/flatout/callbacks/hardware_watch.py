"""Samples of the machine and its card, taken by a thread; no Lightning is needed.

`HardwareMonitor` makes curves of them in a Trainer of Lightning. The verdict of a training by
transformers' Trainer reads their medians.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from flatout.callbacks.gpu import Card, watched_card
from flatout.distributed.limits import cpu_periods, processor_seconds
from flatout.run_log import Say


class Host:
    """Samples the machine: memory in use, and rates since the last sample.

    The first sample counts from the construction.
    """

    name = "host"

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.process = psutil.Process()
        self._before = self._counters()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a new one, which samples the process that it is made in."""
        return type(self), (self.root,)

    def sample(self) -> dict[str, float]:
        now = self._counters()
        before = self._before
        self._before = now
        seconds = max(now["seconds"] - before["seconds"], 1e-9)
        grown = {name: now[name] - before[name] for name in now.keys() & before.keys()}
        cores_s = max(grown["busy_s"] + grown["idle_s"], 1e-9)
        figures = {
            "host/process_cpu_cores": max(0.0, grown["process_cpu_s"]) / seconds,
            "host/machine_cpu_share": grown["busy_s"] / cores_s,
            "host/process_memory_gb": self.process.memory_info().rss / 1e9,
            "host/available_memory_gb": psutil.virtual_memory().available / 1e9,
            "host/swap_in_mb_per_s": grown["swap_in"] / seconds / 1e6,
            "host/swap_out_mb_per_s": grown["swap_out"] / seconds / 1e6,
        }
        if "disk_read" in grown:
            figures["host/disk_read_mb_per_s"] = grown["disk_read"] / seconds / 1e6
        if grown.get("nr_periods"):
            figures["host/cpu_held_back_share"] = grown["nr_throttled"] / grown["nr_periods"]
        return figures

    def facts(self) -> dict[str, object]:
        return {}

    def _counters(self) -> dict[str, float]:
        """Readings of counters that only grow."""
        cores = psutil.cpu_times()._asdict()
        swap = psutil.swap_memory()
        disk = psutil.disk_io_counters()
        # Time of guests is part of the users' time. A core whose time the host of a virtual machine
        # takes ("steal") is neither busy nor idle.
        for name in ("guest", "guest_nice", "steal"):
            cores.pop(name, None)
        idle = cores.get("idle", 0.0) + cores.get("iowait", 0.0)
        counters = {
            "seconds": time.perf_counter(),
            "process_cpu_s": processor_seconds(self.process),
            "busy_s": sum(cores.values()) - idle,
            "idle_s": idle,
            "swap_in": float(swap.sin),
            "swap_out": float(swap.sout),
        }
        if disk is not None:  # some containers show none
            counters["disk_read"] = float(disk.read_bytes)
        return counters | cpu_periods(self.root)


# Both have `sample`, figures by curve name, and `facts` that are no curve.
Source = Host | Card


class Watch:
    """Context manager in which a thread samples the sources, if there are any."""

    def __init__(self, sources: Sequence[Source], say: Say = print, every_s: float = 1.0) -> None:
        self.sources = list(sources)
        self.say = say
        self.every_s = every_s
        self._answering = list(sources)  # those that have not failed
        self._samples: dict[str, list[float]] = {}  # all so far, by curve name
        self._num_taken: dict[str, int] = {}  # how many of them `take` has returned
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        # Whether to continue. An error may end training without a call of `__exit__`.
        self.is_needed: Callable[[], bool] = lambda: True

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle with the samples, but without the thread and the sources.

        Some sources hold handles of a driver.
        """
        state = {"_samples": self._samples, "_num_taken": self._num_taken}
        return type(self), ([], self.say, self.every_s), state

    def __enter__(self) -> Watch:
        if self._answering:
            self._end.clear()
            self._thread = threading.Thread(target=self._sample_on, name="watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread is not None:
            # Not longer, as a driver may hang; the thread is a daemon.
            self._thread.join(self.every_s)
            self._thread = None

    def take(self) -> dict[str, float]:
        """Means of the samples since the last call, by curve name."""
        means = {}
        with self._lock:
            for name, samples in self._samples.items():
                if new := samples[self._num_taken.get(name, 0) :]:
                    means[name] = statistics.fmean(new)
                self._num_taken[name] = len(samples)
        return means

    def summary(self) -> dict[str, dict[str, object]]:
        """Medians of all samples, and the facts, of each source that has samples."""
        summaries: dict[str, dict[str, object]] = {}
        with self._lock:
            for name, samples in self._samples.items():
                source_name, _, figure = name.partition("/")
                summaries.setdefault(source_name, {})[figure] = statistics.median(samples)
        return {
            source.name: summaries[source.name] | source.facts()
            for source in self.sources
            if source.name in summaries
        }

    def look(self) -> None:
        """Sample each source once; a source that fails is dropped."""
        for source in list(self._answering):
            try:
                sample = source.sample()
            except Exception as error:
                # Each driver raises classes of its own, and a monitor must not end training.
                self._answering.remove(source)
                self.say(f"{source.name}: no longer watched ({error}); training continues")
                continue
            with self._lock:
                for name, value in sample.items():
                    self._samples.setdefault(name, []).append(value)

    def _sample_on(self) -> None:
        while self._answering and not self._end.wait(self.every_s) and self.is_needed():
            self.look()


def hardware_of(device: torch.device) -> list[Source]:
    """Sources to sample: this machine, and the card behind a CUDA device if the driver knows it."""
    card = watched_card(device)
    return [Host()] if card is None else [Host(), card]
