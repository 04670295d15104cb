"""What the machine and this process are busy with, and how much of it a container lets them use.

Read from psutil, and from the files of control groups: in a container the machine's own figures promise cores and
memory that the process may never have.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

HOST_CURVES = {
    "host/process_cpu_cores": "cores' worth of processor time that this process and those it started took",
    "host/machine_cpu_share": "share of all cores' time that was used, by whomever",
    "host/process_memory_gb": "memory that this process holds",
    "host/available_memory_gb": "memory of the machine that is still to be had without swapping",
    "host/swap_in_mb_per_s": "read back from swap, by whomever",
    "host/swap_out_mb_per_s": "moved out to swap, by whomever",
    "host/disk_read_mb_per_s": "read from disks, by whomever",
    "host/cpu_held_back_share": "share of a container's periods in which its limit stopped this process",
}
"""Every curve of the machine, and what it shows."""


class Host:
    """Rates since the last sample, and how much memory is in use; the first sample is since its making."""

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
        """Seconds of processor time of this process and of those it started, as far as they are there."""
        taken = 0.0
        for process in (self.process, *self.process.children(recursive=True)):
            with suppress(psutil.Error):  # it has ended meanwhile
                times = process.cpu_times()
                taken += times.user + times.system
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


@dataclass(frozen=True, slots=True)
class Limits:
    """What control groups allow; None where they set no limit."""

    cores: float | None
    memory_bytes: int | None

    def facts(self) -> dict[str, float | None]:
        """In the words of `summary.json`."""
        memory_gb = None if self.memory_bytes is None else round(self.memory_bytes / 1e9, 1)
        return {"cores_allowed": self.cores, "memory_allowed_gb": memory_gb}


def limits(root: Path = Path("/")) -> Limits:
    """The tightest limits of this process's control groups and of those around them, version 2 or 1."""
    cores = [_cores(group) for group in _groups(root, "cpu")]
    memory = [_memory(group) for group in _groups(root, "memory")]
    return Limits(
        min((each for each in cores if each is not None), default=None),
        min((each for each in memory if each is not None), default=None),
    )


def free_bytes() -> int:
    """Memory that this process may still take, by the machine and by its container."""
    free, allowed = int(psutil.virtual_memory().available), limits().memory_bytes
    return free if allowed is None else min(free, max(0, allowed - int(psutil.Process().memory_info().rss)))


def cpu_periods(root: Path = Path("/")) -> dict[str, float]:
    """How many periods this process's own group has seen and was held back in; empty where it has no limit."""
    for group in _groups(root, "cpu"):
        if _cores(group) is not None:
            pairs = (line.split() for line in _read(group / "cpu.stat").splitlines())
            found = {pair[0]: float(pair[1]) for pair in pairs if len(pair) == 2}
            return {name: found[name] for name in ("nr_periods", "nr_throttled") if name in found}
    return {}


_NO_LIMIT = 1 << 60
"""Version 1 writes "none" as the largest multiple of a page."""


def _groups(root: Path, controller: str) -> list[Path]:
    """Folders of this process's control group, the innermost first, where its limits stand."""
    mount = root / "sys/fs/cgroup"
    is_second = (mount / "cgroup.controllers").is_file()
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if is_second and number == "0":
            top = mount
        elif not is_second and controller in controllers.split(","):
            # Mounted under all its names or under its own.
            top = next((each for name in (controllers, controller) if (each := mount / name).is_dir()), mount)
        else:
            continue
        inner = top / path.strip("/")
        # In a container the path may be the host's, which is not there: then what is mounted is the group itself.
        group = inner if inner.is_dir() and ".." not in inner.parts else top
        return [each for each in (group, *group.parents) if each.is_relative_to(top)]
    return []


def _cores(group: Path) -> float | None:
    quota, _, period = _read(group / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = (_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _memory(group: Path) -> int | None:
    text = (_read(group / "memory.max") or _read(group / "memory.limit_in_bytes")).strip()
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
