"""Limits of this machine and its container: cores, memory, and how malloc keeps freed memory.

Limits of a container are read from the files of control groups, version 2 or 1. On a CPU freed
memory should stay with the process. By default glibc returns large blocks to the system, and gets
new, zeroed pages for the gradients and activations of the next step. A BiLSTM of seven million
parameters trains about a quarter faster when glibc keeps them. The process then holds its peak
until it ends; where that matters, set MALLOC_TRIM_THRESHOLD_ yourself.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

# Bytes. Version 1 writes "no limit" as the largest multiple of a page, which is above this.
_NO_LIMIT = 1 << 60
# Parameters of mallopt (malloc.h), and the largest value of each, in bytes.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = 2**31 - 1
_LARGEST = 2**30


@dataclass(frozen=True, slots=True)
class Limits:
    """What control groups allow this process; None for no limit."""

    cores: float | None
    memory_bytes: int | None

    def facts(self) -> dict[str, float | None]:
        """The limits under the keys of `summary.json`."""
        memory_gb = None if self.memory_bytes is None else round(self.memory_bytes / 1e9, 1)
        return {"cores_allowed": self.cores, "memory_allowed_gb": memory_gb}


def limits(root: Path = Path("/")) -> Limits:
    """The tightest limits of this process's control group and of the groups around it."""
    cores = [limit for limit in map(_cores, _groups(root, "cpu")) if limit is not None]
    memory = []
    for group in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # of version 2 and of version 1
            text = _read(group / name).strip()
            if text.isdigit() and int(text) < _NO_LIMIT:
                memory.append(int(text))
    return Limits(min(cores, default=None), min(memory, default=None))


def free_bytes() -> int:
    """Memory that this process may still take, by the machine and by its container."""
    free = int(psutil.virtual_memory().available)
    allowed = limits().memory_bytes
    if allowed is None:
        return free
    return min(free, max(0, allowed - int(psutil.Process().memory_info().rss)))


def processor_name() -> str:
    """The processor's name, or its architecture if the system has no name."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def processor_seconds(process: psutil.Process) -> float:
    """Processor time of a process and its children so far, also of children that have ended."""
    seconds = 0.0
    for relative in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended meanwhile
            times = relative.cpu_times()._asdict()
            for name in ("user", "system", "children_user", "children_system"):
                seconds += times.get(name, 0.0)
    return seconds


def cpu_periods(root: Path = Path("/")) -> dict[str, float]:
    """Scheduling periods so far (`nr_periods`), and those cut short by a limit (`nr_throttled`).

    Of the innermost control group with a limit of cores; empty if there is none.
    """
    for group in _groups(root, "cpu"):
        if _cores(group) is not None:
            counters = {}
            for line in _read(group / "cpu.stat").splitlines():
                name, _, number = line.partition(" ")
                if name in ("nr_periods", "nr_throttled"):
                    counters[name] = float(number)
            return counters
    return {}


def _groups(root: Path, controller: str) -> list[Path]:
    """Folders of this process's control group and those around it, the innermost first.

    A line of `/proc/self/cgroup` is "4:cpu,cpuacct:/docker/ab" in version 1, "0::/docker/ab" in
    version 2.
    """
    mount = root / "sys/fs/cgroup"
    is_version_2 = (mount / "cgroup.controllers").is_file()
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if is_version_2 and number == "0":
            top = mount
        elif not is_version_2 and controller in controllers.split(","):
            # The folder has the names of all its controllers ("cpu,cpuacct"), or just this one.
            folders = [mount / controllers, mount / controller]
            top = next(filter(Path.is_dir, folders), mount)
        else:
            continue
        # In a container the path may be the host's, which does not exist here. What is mounted is
        # the group itself then.
        inner = top / path.strip("/")
        group = inner if inner.is_dir() and ".." not in inner.parts else top
        return [folder for folder in (group, *group.parents) if folder.is_relative_to(top)]
    return []


def _cores(group: Path) -> float | None:
    """Cores that a control group allows; None for no limit. "150000 100000" is 1.5 cores."""
    quota, _, period = _read(group / "cpu.max").strip().partition(" ")
    if not quota:  # version 1 has two files
        quota = _read(group / "cpu.cfs_quota_us").strip()
        period = _read(group / "cpu.cfs_period_us").strip()
    has_limit = quota.isdigit() and period.isdigit() and int(period)
    return int(quota) / int(period) if has_limit else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def keep_freed_memory() -> bool:
    """Make malloc keep freed blocks for this process; return whether it does now.

    Environment variables that you have set for malloc stay in force.
    """
    is_set = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    if is_set or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # a C library without it, such as musl
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST) and mallopt(_M_TRIM_THRESHOLD, _NEVER))


def give_back_freed_memory() -> None:
    """Make malloc return freed blocks to the system, after work that will not be repeated."""
    if sys.platform.startswith("linux") and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def let_segments_grow() -> bool:
    """Make torch allocate a GPU's memory in segments that can grow; return whether it does.

    Batches of varying size then leave fewer gaps. Your own setting of torch's allocator stays.
    """
    if not sys.platform.startswith("linux") or "PYTORCH_CUDA_ALLOC_CONF" in os.environ:
        return False
    growing = "expandable_segments:True"
    return os.environ.setdefault("PYTORCH_ALLOC_CONF", growing) == growing
