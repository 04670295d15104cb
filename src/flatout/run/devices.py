"""Which devices of this machine a run trains on, by `trainer.accelerator` and `trainer.devices`.

What the machine lacks is refused, with what it has. Without either setting a run takes one device:
the first GPU, or the CPU. On a CPU the numbers only count processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flatout.distributed.ranks import Ranks, cores_here, why_no_gpu
from flatout.errors import require

_KEY = "trainer.devices"


@dataclass(frozen=True, slots=True)
class _Machine:
    num_gpus: int  # that may be used; 0: the CPU trains
    num_devices: int  # GPUs, or cores
    words: str  # what the machine has, for messages


def choose_devices(trainer: Mapping[str, Any]) -> list[int]:
    """Numbers of the devices that these settings ask for: `[0]`, `[0, 1, 2]`.

    `trainer.devices` is a number, `auto` (all GPUs, or one CPU), or a list of numbers, which may be
    typed as a text: `"0,2"`.
    """
    machine = _inspect_machine(str(trainer.get("accelerator", "auto")))
    devices = trainer.get("devices")
    if isinstance(devices, str) and devices != "auto":
        devices = _parse_devices(devices)
    # One by default: a script that asks for nothing should not start processes.
    if devices is None:
        return [0]
    if devices in ("auto", -1):
        return list(range(max(1, machine.num_gpus)))
    # `true` would count as one device
    if isinstance(devices, int) and not isinstance(devices, bool):
        return _count_devices(devices, machine)
    is_list = isinstance(devices, list | tuple)
    is_list = is_list and all(isinstance(number, int) for number in devices)
    require(is_list, _KEY, f"{devices!r}", allowed="a number, auto, or a list of numbers")
    return _check_numbers(devices, machine)


def _inspect_machine(accelerator: str) -> _Machine:
    """What this machine has for an accelerator; says so where `auto` finds a GPU it cannot use."""
    may_be_gpu = accelerator in ("auto", "gpu", "cuda")
    num_gpus = torch.cuda.device_count() if may_be_gpu else 0
    if num_gpus:
        words = f"this machine has {num_gpus} GPU{'s' if num_gpus > 1 else ''}"
        if "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
            words = "CUDA gives a process one slice of a MIG card"
        return _Machine(num_gpus, num_gpus, words)
    why, remedy = why_no_gpu()
    require(
        accelerator not in ("gpu", "cuda"),
        "trainer.accelerator",
        f"{accelerator}, but {why}",
        hint=remedy or "Set trainer=cpu, or leave it out.",
    )
    if accelerator == "auto" and remedy and Ranks.here().is_first:
        print(f"devices: the CPU, as {why}. {remedy}", flush=True)
    num_cores = len(cores_here())
    return _Machine(
        0, num_cores, f"this machine has {num_cores} core{'s' if num_cores > 1 else ''}"
    )


def _parse_devices(text: str) -> Any:
    """`"2"` → 2, `"0,2"` → [0, 2]; a word that is no number stays a word."""
    numbers = []
    for word in text.split(","):
        word = word.strip()
        numbers.append(int(word) if word.isdecimal() else word)
    return numbers if "," in text else numbers[0]


def _count_devices(count: int, machine: _Machine) -> list[int]:
    require(count >= 1, _KEY, f"{count}", allowed="1 or more, or auto")
    most = machine.num_devices
    require(count <= most, _KEY, f"{count}", allowed=f"at most {most}: {machine.words}")
    return list(range(count))


def _check_numbers(numbers: Sequence[int], machine: _Machine) -> list[int]:
    is_distinct = bool(numbers) and len(set(numbers)) == len(numbers)
    require(is_distinct, _KEY, f"{numbers}", allowed="each number once")
    for number in numbers:
        require(
            0 <= number < machine.num_devices,
            _KEY,
            f"no device {number}",
            allowed=f"0 to {machine.num_devices - 1}: {machine.words}",
        )
    return list(numbers)
