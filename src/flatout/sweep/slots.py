"""Where trials run: the machine's GPUs, or its cores, dealt out to as many as run at once."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from flatout.distributed.ranks import cores_here
from flatout.errors import require


@dataclass(frozen=True, slots=True)
class Slot:
    """One share of the machine."""

    cores: list[int]
    gpus: list[str]
    """As CUDA_VISIBLE_DEVICES names them."""

    def take(self) -> None:
        """Keep this process to its share, before it computes anything."""
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.cores)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(len(self.cores))

    def environment(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}


def slots(parallel: int) -> list[Slot]:
    """Equal shares; what does not divide evenly is left to the system."""
    cores, gpus = cores_here(), _gpus()
    most = max(len(cores), len(gpus))
    require(
        1 <= parallel <= most, "launcher.parallel", f"{parallel}", allowed=f"1 to {most} here: one for each GPU or core"
    )
    return [Slot(_share(cores, number, parallel), _share(gpus, number, parallel)) for number in range(parallel)]


def _share(things: list, number: int, parallel: int) -> list:
    """The share of that number; where there are fewer things than shares, several get the same one."""
    if not things:
        return []
    size = len(things) // parallel
    return things[number * size : (number + 1) * size] if size else [things[number % len(things)]]


def _gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [str(number) for number in range(torch.cuda.device_count())]
