"""Load of the machine and of this process: processor, memory, swap, disk, and the limit of a container.

Read from psutil, and from the files of control groups: in a container the machine's own figures promise cores and
memory that the process may never have.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil

from flatout.engine.limits import cpu_periods

HOST_CURVES = {
    "host/process_cpu_cores": "cores' worth of processor time that this process and its children took",
    "host/machine_cpu_share": "fraction of all cores' time in use, by any process",
    "host/process_memory_gb": "memory that this process holds",
    "host/available_memory_gb": "memory of the machine that is free without swapping",
    "host/swap_in_mb_per_s": "read back from swap, by any process",
    "host/swap_out_mb_per_s": "moved out to swap, by any process",
    "host/disk_read_mb_per_s": "read from disks, by any process",
    "host/cpu_held_back_share": "fraction of a container's periods in which its limit stopped this process",
}
"""Every curve of the machine, and what it shows."""


class Host:
    """Rates since the last sample, and memory in use; the first sample counts from the construction."""

    name = "host"

    def __init__(self, root: Path = Path("/")) -> None:
        self.root, self.process = root, psutil.Process()
        self._before = self._counters()

    def sample(self) -> dict[str, float]:
        now, before = self._counters(), self._before
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

    def _own_s(self) -> float:
        """Seconds of processor time of this process and of its children, those that have ended included."""
        taken = 0.0
        for process in (self.process, *self.process.children(recursive=True)):
            with suppress(psutil.Error):  # it has ended meanwhile
                times = process.cpu_times()
                taken += times.user + times.system
                taken += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
        return taken

    def _counters(self) -> dict[str, float]:
        """What only ever grows."""
        cores, swap, disk = psutil.cpu_times(), psutil.swap_memory(), psutil.disk_io_counters()
        # Guests' time is in the users' already; a host that takes the cores away leaves them neither busy nor idle.
        parts = {name: value for name, value in cores._asdict().items() if name not in ("guest", "guest_nice", "steal")}
        idle = parts.get("idle", 0.0) + parts.get("iowait", 0.0)
        found = {
            "seconds": time.perf_counter(),
            "process_cpu_s": self._own_s(),
            "busy_s": sum(parts.values()) - idle,
            "idle_s": idle,
            "swap_in": float(swap.sin),
            "swap_out": float(swap.sout),
        }
        if disk is not None:  # some containers show none
            found["disk_read"] = float(disk.read_bytes)
        return found | cpu_periods(self.root)
