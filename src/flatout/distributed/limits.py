"""How much of the machine a container lets this process use, and which memory a process keeps for
itself.

Cores and memory come from the files of control groups. On a CPU freed memory should stay with the
process: glibc hands large freed blocks straight back to the system and fetches fresh, zeroed pages
for the next step's gradients and activations. A BiLSTM of seven million parameters trains about a
quarter faster when glibc keeps them. The process then holds its peak until it ends; where that
matters, set MALLOC_TRIM_THRESHOLD_ yourself.
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

_NO_LIMIT = 1 << 60  # version 1 writes "none" as the largest multiple of a page
# parameters of mallopt, and the largest value of each
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = 2**31 - 1
_LARGEST = 2**30


@dataclass(frozen=True, slots=True)
class Limits:
    """What control groups allow; None where they set no limit."""

    cores: float | None
    memory_bytes: int | None

    def facts(self) -> dict[str, float | None]:
        """Under the keys of `summary.json`."""
        memory_gb = None if self.memory_bytes is None else round(self.memory_bytes / 1e9, 1)
        return {"cores_allowed": self.cores, "memory_allowed_gb": memory_gb}


def limits(root: Path = Path("/")) -> Limits:
    """The tightest limits of this process's control groups and of those around them, version 2 or
    1.
    """
    cores = [found for group in _groups(root, "cpu") if (found := _cores(group)) is not None]
    files = (
        group / name
        for group in _groups(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    )
    memory = [
        int(text) for text in map(_read, files) if text.strip().isdigit() and int(text) < _NO_LIMIT
    ]
    return Limits(min(cores, default=None), min(memory, default=None))


def free_bytes() -> int:
    """Memory that this process may still take, by the machine and by its container."""
    free = int(psutil.virtual_memory().available)
    allowed = limits().memory_bytes
    return (
        free
        if allowed is None
        else min(free, max(0, allowed - int(psutil.Process().memory_info().rss)))
    )


def processor_name() -> str:
    """The processor's name, as far as the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def processor_seconds(process: psutil.Process) -> float:
    """Processor time of a process and of its children so far, those that have ended included."""
    taken = 0.0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended meanwhile
            times = each.cpu_times()._asdict()
            taken += sum(
                times.get(name, 0.0)
                for name in ("user", "system", "children_user", "children_system")
            )
    return taken


def cpu_periods(root: Path = Path("/")) -> dict[str, float]:
    """Count the scheduling periods of this process's own group, and those throttled; empty where it
    has no limit.
    """
    for group in _groups(root, "cpu"):
        if _cores(group) is not None:
            pairs = (line.split() for line in _read(group / "cpu.stat").splitlines())
            found = {pair[0]: float(pair[1]) for pair in pairs if len(pair) == 2}
            return {name: found[name] for name in ("nr_periods", "nr_throttled") if name in found}
    return {}


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
            top = next(
                (each for name in (controllers, controller) if (each := mount / name).is_dir()),
                mount,
            )
        else:
            continue
        inner = top / path.strip("/")
        # In a container the path may be the host's, which is not there: then what is mounted is the
        # group itself.
        group = inner if inner.is_dir() and ".." not in inner.parts else top
        return [each for each in (group, *group.parents) if each.is_relative_to(top)]
    return []


def _cores(group: Path) -> float | None:
    quota, _, period = _read(group / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = (
            _read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
        )
    return (
        int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def keep_freed_memory() -> bool:
    """Ask the C library to keep freed blocks; whether it could be asked.

    Your own setting stands.
    """
    if (
        not sys.platform.startswith("linux")
        or {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # a C library without it, such as musl
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST) and mallopt(_M_TRIM_THRESHOLD, _NEVER))


def give_back_freed_memory() -> None:
    """Ask the C library to give freed blocks back, after work that does not come again."""
    if sys.platform.startswith("linux") and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def let_segments_grow() -> bool:
    """Have torch take a GPU's memory in segments that grow, as batches vary; whether your own
    setting leaves it to.
    """
    if not sys.platform.startswith("linux") or "PYTORCH_CUDA_ALLOC_CONF" in os.environ:
        return False
    growing = "expandable_segments:True"
    return os.environ.setdefault("PYTORCH_ALLOC_CONF", growing) == growing
