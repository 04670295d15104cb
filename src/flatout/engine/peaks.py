"""What a device could do at most: the roof that MFU is measured against.

For GPUs in the table it is the vendor's figure for *dense* products with fp32 sums, never the doubled one for sparse
matrices. For every other device, and for every CPU, a product of matrices is timed here. Both are of one device. A
measured roof is what the library reaches, not what the silicon could, so it is a little low and says so by its source.
On a CPU that others use as well, threads wait for each other. Then one thread is timed, times the cores.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from flatout.distributed.limits import limits
from flatout.distributed.ranks import cores_here
from flatout.engine.precision import Precision, fp32_products, one_thread, product_type

_SMALLEST, _LARGEST = 512, 4096
_LONG_ENOUGH_S = 1e-3  # so long a product is not all overheads; a longer one is disturbed by what else runs
_BUDGET_S, _MOST_S = 0.02, 0.08
_TIMES = 10
_BUSY = 0.6  # below this share of one thread's rate times their number, threads were kept from running together


@dataclass(frozen=True, slots=True)
class Peak:
    """Most operations a second of one device, and where that is known from."""

    tflops: float
    source: str


@dataclass(frozen=True, slots=True)
class _Card:
    """TFLOP/s of dense products; None where the card has no such arithmetic."""

    names: str  # a pattern for all that `torch.cuda.get_device_name` says, without the maker and the series
    source: str
    fp32: float
    tf32: float | None
    bf16: float | None
    fp16: float


# Sheets print tensor cores' figures "with sparsity", which is twice the dense one: halved here where no other is given.
_CARDS = (
    # Pascal has no tensor cores: fp16 is twice fp32, on the same units.
    _Card("P100-PCIE-(12|16)GB", "Tesla P100 data sheet", 9.3, None, None, 18.7),
    _Card("P100-SXM2-16GB", "Tesla P100 data sheet", 10.6, None, None, 21.2),
    _Card("V100-PCIE-(16|32)GB", "Tesla V100 data sheet", 14.0, None, None, 112.0),
    _Card("V100-SXM2-(16|32)GB", "Tesla V100 data sheet", 15.7, None, None, 125.0),
    _Card("T4", "Tesla T4 data sheet", 8.1, None, None, 65.0),
    # GeForce cards sum in fp32 at half the rate of fp16 sums; the reference card, 53.8, not the Founders' one, 56.9.
    _Card("RTX 2080 Ti", "Turing architecture whitepaper", 13.4, None, None, 53.8),
    _Card("A16", "A16 data sheet, one GPU of four", 4.5, 9.0, 17.9, 17.9),
    _Card("A2", "A2 data sheet", 4.5, 9.0, 18.0, 18.0),
    _Card("A10", "A10 data sheet", 31.2, 62.5, 125.0, 125.0),
    _Card("A30", "A30 data sheet", 10.3, 82.0, 165.0, 165.0),
    _Card("A40", "A40 data sheet", 37.4, 74.8, 149.7, 149.7),
    _Card("RTX 3090", "GA102 architecture whitepaper", 35.6, 35.6, 71.0, 71.0),
    _Card("A100-(SXM4|PCIE)-(40|80)GB|A100 80GB PCIe", "A100 data sheet", 19.5, 156.0, 312.0, 312.0),
    _Card("L4", "L4 data sheet", 30.3, 60.0, 121.0, 121.0),
    _Card("L40", "L40 data sheet", 90.5, 90.5, 181.0, 181.0),
    _Card("L40S", "L40S data sheet", 91.6, 183.0, 362.0, 362.0),
    _Card("RTX 4090", "Ada architecture whitepaper", 82.6, 82.6, 165.2, 165.2),
    _Card("RTX 6000 Ada Generation", "Ada architecture whitepaper", 91.1, 182.1, 364.2, 364.2),
    _Card("H100 PCIe", "H100 data sheet", 51.0, 378.0, 756.0, 756.0),
    _Card("H100 80GB HBM3", "H100 data sheet, SXM", 67.0, 494.5, 989.0, 989.0),
    _Card("H100 NVL", "H100 data sheet, NVL", 60.0, 417.5, 835.5, 835.5),
    _Card("H200", "H200 data sheet, SXM", 67.0, 494.5, 989.0, 989.0),
    _Card("H200 NVL", "H200 data sheet, NVL", 60.0, 417.5, 835.5, 835.5),
    _Card("B200", "HGX B200 data sheet", 75.0, 1100.0, 2250.0, 2250.0),
)


def arithmetic_of(precision: str) -> Precision | None:
    """What Lightning's precision multiplies with, by its name and as torch is set; None for unknown kinds."""
    if precision.startswith("bf16"):
        return Precision.bf16
    if precision.startswith("16"):
        return Precision.fp16
    if not precision.startswith("32"):
        return None
    return Precision.fp32 if fp32_products("cuda") == "highest" else Precision.tf32


def listed_peak(name: str, arithmetic: Precision | None) -> Peak | None:
    """The table's figure for a GPU of this name; None for one that is not in it, and for slices of one."""
    short = re.sub(r"^(NVIDIA |Tesla |GeForce )*", "", name).strip()
    card = next((each for each in _CARDS if re.fullmatch(each.names, short)), None)
    if card is None or arithmetic is None:
        return None
    tflops = getattr(card, arithmetic)
    if tflops is None and arithmetic is Precision.tf32:
        tflops = card.fp32  # a card without TF32 makes plain fp32 products of them
    return None if tflops is None else Peak(tflops, f"{card.source}, dense {arithmetic}")


def known_peak(device: torch.device, precision: str) -> Peak | None:
    """What is known of a device without trying it: nothing of a CPU."""
    return listed_peak(torch.cuda.get_device_name(device), arithmetic_of(precision)) if device.type == "cuda" else None


def measured_peak(device: torch.device, precision: str) -> Peak | None:
    """The best of some products of matrices, timed here with the run's threads; draws from a generator of its own."""
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
            source = f"measured on a busy machine: {small} x {small} {words} of one thread, times {cores:g}"
            return Peak(cores * alone / 1e12, source)
    on = f", {threads} thread{'s'[: threads - 1]}" if device.type == "cpu" else ""
    return Peak(rate / 1e12, f"measured: {size} x {size} {words}{on}")


def _fastest(device: torch.device, dtype: torch.dtype) -> tuple[float, int]:
    """Most operations a second of some products, and the size of the fastest."""
    size, fastest, found = _SMALLEST, 0.0, _SMALLEST
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        while True:
            own = torch.Generator(device).manual_seed(0)
            left, right = (torch.randn(size, size, generator=own, device=device).to(dtype) for _ in range(2))
            seconds = _best_s(partial(torch.mm, left, right, out=torch.empty_like(left)), device)
            if 2 * size**3 / seconds > fastest:
                fastest, found = 2 * size**3 / seconds, size
            if seconds >= _LONG_ENOUGH_S or size >= _LARGEST:
                return fastest, found
            size *= 2


def _best_s(act: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of many calls, as others' work leaves only some in peace; the first is not counted."""
    wait: Callable[[], None] = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    act()
    wait()
    began = now = time.perf_counter()
    best, times = float("inf"), 0
    while times == 0 or now - began < (_BUDGET_S if times >= _TIMES else _MOST_S):
        act()
        wait()  # to time it is what this is for
        before, now = now, time.perf_counter()
        best, times = min(best, now - before), times + 1
    return best
