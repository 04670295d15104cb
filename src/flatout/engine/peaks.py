"""The most operations per second that a device can do: model FLOPs utilisation (MFU) is a fraction
of it.

For a GPU in the table `peaks.toml` it is the vendor's figure for *dense* products with fp32 sums,
not the doubled one for sparse matrices. For other devices, and every CPU, matrix products are timed
here. A measured peak is what the library reaches, a little less than the chip could; `Peak.source`
says which of the two it is. On a busy CPU threads wait for each other. There one thread is timed,
and multiplied by the number of cores.
"""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flatout.distributed.limits import limits
from flatout.distributed.ranks import cores_here
from flatout.engine.precision import Precision, fp32_products, one_thread, product_type

# Width of the square matrices that are multiplied: doubled until a product takes long enough.
_SMALLEST = 512
_LARGEST = 4096
# A shorter product is mostly overhead, a longer one is disturbed by other processes.
_LONG_ENOUGH_S = 1e-3
# Each size is timed at least `_TIMES` times and for `_BUDGET_S`, but no longer than `_MOST_S`.
_BUDGET_S = 0.02
_MOST_S = 0.08
_TIMES = 10
# Several threads below this fraction of one thread's rate times their number: the machine is busy.
_BUSY = 0.6


@dataclass(frozen=True, slots=True)
class Peak:
    """Most operations per second of one device."""

    tflops: float  # 1e12 operations a second
    source: str  # where the figure comes from: a data sheet, or "measured: …"


_CARDS: list[dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text("utf-8")
)["cards"]


def arithmetic_of(precision: str) -> Precision | None:
    """The format in which a GPU multiplies, for a precision of Lightning; None for unknown ones.

    "32-true" is tf32 where torch is set to it.
    """
    if precision.startswith("bf16"):
        return Precision.bf16
    if precision.startswith("16"):
        return Precision.fp16
    if not precision.startswith("32"):
        return None
    return Precision.fp32 if fp32_products("cuda") == "highest" else Precision.tf32


def listed_peak(name: str, arithmetic: Precision | None) -> Peak | None:
    """The table's figure for a GPU of this name; None for slices (MIG) and GPUs not in it."""
    short = re.sub(r"^(NVIDIA |Tesla |GeForce )*", "", name).strip()
    card = next((card for card in _CARDS if re.fullmatch(card["names"], short)), None)
    if card is None or arithmetic is None:
        return None
    # A card without TF32 multiplies in fp32 instead.
    tflops = card.get(arithmetic, card["fp32"] if arithmetic is Precision.tf32 else None)
    return None if tflops is None else Peak(tflops, f"{card['source']}, dense {arithmetic}")


def known_peak(device: torch.device, precision: str) -> Peak | None:
    """The peak of a device without measuring; None for a CPU and for GPUs not in the table.

    `precision`: Lightning's name.
    """
    if device.type != "cuda":
        return None
    return listed_peak(torch.cuda.get_device_name(device), arithmetic_of(precision))


def measured_peak(device: torch.device, precision: str) -> Peak | None:
    """Time matrix products of several sizes with the run's threads; the fastest is the peak.

    `precision`: Lightning's name; None for an unknown one. Torch's random numbers stay as they are.
    """
    arithmetic = arithmetic_of(precision)
    if arithmetic is None or device.type not in ("cpu", "cuda"):
        return None
    dtype = product_type(arithmetic)
    product = f"{str(dtype).removeprefix('torch.')} product"
    rate, size = _fastest_product(device, dtype)
    threads = torch.get_num_threads()
    if device.type == "cpu" and threads > 1:
        cores = min(threads, len(cores_here()), limits().cores or threads)
        with one_thread():
            one_rate, one_size = _fastest_product(device, dtype)
        if rate < _BUSY * cores * one_rate:
            source = f"{one_size} x {one_size} {product} of one thread, times {cores:g}"
            return Peak(cores * one_rate / 1e12, f"measured on a busy machine: {source}")
    source = f"measured: {size} x {size} {product}"
    if device.type == "cpu":
        source += f", {threads} thread{'' if threads == 1 else 's'}"
    return Peak(rate / 1e12, source)


def _fastest_product(device: torch.device, dtype: torch.dtype) -> tuple[float, int]:
    """Operations per second of the fastest of some matrix products, and its width."""
    size = _SMALLEST
    fastest = (0.0, size)
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        while True:
            random = torch.Generator(device).manual_seed(0)
            shape = (2, size, size)
            left, right = torch.randn(shape, generator=random, device=device).to(dtype)
            product = torch.empty_like(left)
            seconds = _fastest_s(partial(torch.mm, left, right, out=product), device)
            # Each of `size`² numbers is a sum of `size` products: 2 · size operations.
            fastest = max(fastest, (2 * size**3 / seconds, size))
            if seconds >= _LONG_ENOUGH_S or size >= _LARGEST:
                return fastest
            size *= 2


def _fastest_s(act: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of many calls: other processes disturb some. A first one warms up."""

    def run() -> float:
        began = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # waits on purpose: it is the device that is timed
        return time.perf_counter() - began

    run()
    times_s: list[float] = []
    began = time.perf_counter()
    while True:
        times_s.append(run())
        enough_s = _BUDGET_S if len(times_s) >= _TIMES else _MOST_S
        if time.perf_counter() - began >= enough_s:
            return min(times_s)
