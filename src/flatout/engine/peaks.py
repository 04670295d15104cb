"""What a device could do at most: the roof that MFU is measured against.

For GPUs in the table it is the vendor's figure for *dense* products with fp32 sums, never the
doubled one for sparse matrices. For every other device, and for every CPU, a product of matrices is
timed here. Both are of one device. A measured roof is what the library reaches, not what the
silicon could, so it is a little low and says so by its source. On a CPU that others use as well,
threads wait for each other. Then one thread is timed, times the cores.
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

_SMALLEST = 512
_LARGEST = 4096
# so long a product is not all overheads; a longer one is disturbed by what else runs
_LONG_ENOUGH_S = 1e-3
_BUDGET_S = 0.02
_MOST_S = 0.08
_TIMES = 10
# below this share of one thread's rate times their number, threads were kept from running together
_BUSY = 0.6


@dataclass(frozen=True, slots=True)
class Peak:
    """Most operations a second of one device, and where that is known from."""

    tflops: float
    source: str


_CARDS: list[dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text("utf-8")
)["cards"]


def arithmetic_of(precision: str) -> Precision | None:
    """What Lightning's precision multiplies with, by its name and as torch is set; None for unknown
    kinds.
    """
    if precision.startswith("bf16"):
        return Precision.bf16
    if precision.startswith("16"):
        return Precision.fp16
    if not precision.startswith("32"):
        return None
    return Precision.fp32 if fp32_products("cuda") == "highest" else Precision.tf32


def listed_peak(name: str, arithmetic: Precision | None) -> Peak | None:
    """The table's figure for a GPU of this name; None for one that is not in it, and for slices of
    one.
    """
    short = re.sub(r"^(NVIDIA |Tesla |GeForce )*", "", name).strip()
    card = next((each for each in _CARDS if re.fullmatch(each["names"], short)), None)
    if card is None or arithmetic is None:
        return None
    # A card without TF32 makes plain fp32 products of them.
    tflops = card.get(arithmetic, card["fp32"] if arithmetic is Precision.tf32 else None)
    return None if tflops is None else Peak(tflops, f"{card['source']}, dense {arithmetic}")


def known_peak(device: torch.device, precision: str) -> Peak | None:
    """What is known of a device without trying it: nothing of a CPU."""
    return (
        listed_peak(torch.cuda.get_device_name(device), arithmetic_of(precision))
        if device.type == "cuda"
        else None
    )


def measured_peak(device: torch.device, precision: str) -> Peak | None:
    """The best of some products of matrices, timed here with the run's threads; draws from a
    generator of its own.
    """
    arithmetic = arithmetic_of(precision)
    if arithmetic is None or device.type not in ("cpu", "cuda"):
        return None
    dtype = product_type(arithmetic)
    words = f"{str(dtype).removeprefix('torch.')} product"
    rate, size = _fastest(device, dtype)
    threads = torch.get_num_threads()
    if device.type == "cpu" and threads > 1:
        cores = min(threads, len(cores_here()), limits().cores or threads)
        with one_thread():
            alone, small = _fastest(device, dtype)
        if rate < _BUSY * cores * alone:
            source = (
                f"measured on a busy machine: {small} x {small} {words} of one thread, times"
                f" {cores:g}"
            )
            return Peak(cores * alone / 1e12, source)
    on = f", {threads} thread{'s'[: threads - 1]}" if device.type == "cpu" else ""
    return Peak(rate / 1e12, f"measured: {size} x {size} {words}{on}")


def _fastest(device: torch.device, dtype: torch.dtype) -> tuple[float, int]:
    """Most operations a second of some products, and the size of the fastest."""
    size = _SMALLEST
    fastest = 0.0
    found = _SMALLEST
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        while True:
            own = torch.Generator(device).manual_seed(0)
            left, right = (
                torch.randn(size, size, generator=own, device=device).to(dtype) for _ in range(2)
            )
            seconds = _best_s(partial(torch.mm, left, right, out=torch.empty_like(left)), device)
            if 2 * size**3 / seconds > fastest:
                fastest = 2 * size**3 / seconds
                found = size
            if seconds >= _LONG_ENOUGH_S or size >= _LARGEST:
                return fastest, found
            size *= 2


def _best_s(act: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of many calls, as others' work leaves only some in peace; the first is
    not counted.
    """
    wait: Callable[[], None] = (
        (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    )
    act()
    wait()
    now = time.perf_counter()
    began = now
    best = float("inf")
    times = 0
    while times == 0 or now - began < (_BUDGET_S if times >= _TIMES else _MOST_S):
        act()
        wait()  # to time it is what this is for
        before, now = now, time.perf_counter()
        best = min(best, now - before)
        times = times + 1
    return best
