"""The number format that a run computes in: fp32, tf32, bf16 or fp16, and the reason for it.

`choose_precision` takes 16-bit formats if the device multiplies them natively. On a CPU that is not
enough: AVX512_BF16 has such instructions, but is slower than fp32. So one matrix product is timed
in both formats, and the cache keeps the answer for this machine. `arithmetic` is the context in
which a model computes; its weights always stay in fp32. Some CPUs have two ways to multiply fp32,
and `fast_fp32_products` tries whether the faster one is exact.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import StrEnum
from functools import cache
from typing import Any, cast

import torch
from filelock import Timeout

from flatout.data.store.cache import default_cache_folder, recipe_key
from flatout.data.store.lock import acquire, file_lock
from flatout.distributed.limits import processor_name
from flatout.errors import UserError, require
from flatout.files import load_json, write_atomically
from flatout.run_log import Choice

_LARGEST_SHARE = 0.9  # time of a product in bf16 over that in fp32, up to which bf16 is chosen
# The product that is timed: a layer of BERT over 256 tokens.
_ROWS = 256
_WIDTH = 768
_TRIES = 24
_PAUSE_S = 0.01  # before each try
_PATIENCE_S = 30.0  # how long a run waits for another one that measures the same
_LARGEST_ERROR = 5e-6  # of the faster fp32 product, over the largest number of the exact one
# Values of ONEDNN_MAX_CPU_ISA that keep oneDNN from products of bf16.
_ISAS_WITHOUT_BF16 = {
    "SSE41",
    "AVX",
    "AVX2",
    "AVX2_VNNI",
    "AVX2_VNNI_2",
    "AVX512_CORE",
    "AVX512_CORE_VNNI",
}
# Number format of matrix products; weights stay in fp32.
Precision = StrEnum("Precision", "auto fp32 tf32 bf16 fp16")
LIGHTNING_NAMES = {
    Precision.fp32: "32-true",
    Precision.tf32: "32-true",
    Precision.bf16: "bf16-mixed",
    Precision.fp16: "16-mixed",
}
# The formats that torch computes in by autocast.
PRODUCT_TYPES = {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}


def product_type(precision: Precision) -> torch.dtype:
    return PRODUCT_TYPES.get(precision, torch.float32)


def by_lightning_name(name: str) -> Precision:
    """The precision that has this name in Lightning: `bf16-mixed` is bf16.

    StopIteration for other names, such as `64-true`, which no run has.
    """
    return next(precision for precision, theirs in LIGHTNING_NAMES.items() if theirs == name)


def choose_precision(
    asked: Precision, device: torch.device, before: str | None = None
) -> Choice[Precision]:
    """Choose what `asked` says; for auto bf16 if it is native and faster, else fp16 on a GPU, else
    fp32.

    `before`: the precision of a run that is resumed. On a CPU it is used again: a second
    measurement could differ.
    """
    if device.type == "cuda":
        _require_kernels(device)
    if asked is Precision.tf32 or (asked is Precision.bf16 and device.type == "cuda"):
        other = Precision.fp32 if asked is Precision.tf32 else Precision.fp16
        require(
            device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0),
            f"precision={asked}",
            "needs a GPU of compute capability 8.0 or later",
            hint=f"Set precision={other}, or leave it out.",
        )
    if asked is not Precision.auto:
        return Choice(asked, "asked for", f"precision={asked}")
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        evidence = f"compute capability {major}.{minor}"
        if major >= 8:
            return Choice(Precision.bf16, "bf16 is native on this GPU", evidence)
        return Choice(Precision.fp16, "bf16 is not native on this GPU, fp16 is", evidence)
    if device.type == "cpu" and bf16_is_native_on_cpu():
        if before in (Precision.bf16, Precision.fp32):
            return Choice(
                Precision(before), "as at the beginning of this run", f"precision={before} then"
            )
        share, source = kept_bf16_share()
        evidence = f"a matrix product in bf16 takes {share:.2f}× as long as in fp32, {source}"
        if share > _LARGEST_SHARE:  # as on processors with AVX512_BF16 and without AMX
            return Choice(Precision.fp32, "bf16 is native on this CPU, but not faster", evidence)
        return Choice(Precision.bf16, "bf16 is native on this CPU, and faster", evidence)
    return Choice(
        Precision.fp32, f"sixteen bits are not native on this {device.type}", "no native bf16"
    )


def _require_kernels(device: torch.device) -> None:
    """Refuse a GPU for which this build of torch has no kernels, before the first one fails."""
    # torch lists them as "sm_86" (compiled) and "compute_90" (compiled when it runs).
    names = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(torch.cuda.get_arch_list()))
    kernels = sorted(((int(major), int(minor)), kind) for kind, major, minor in names)
    if not kernels:
        return
    card = torch.cuda.get_device_capability(device)
    for built_for, kind in kernels:
        # A compiled kernel runs on later cards of the same major number, the other kind on all.
        if built_for <= card and (kind == "compute" or built_for[0] == card[0]):
            return
    capabilities = (card, kernels[0][0], kernels[-1][0])
    own, lowest, highest = (f"{major}.{minor}" for major, minor in capabilities)
    raise UserError(
        "trainer.accelerator",
        f"a GPU of compute capability {own}, but torch {torch.__version__} has kernels for {lowest}"
        f" to {highest}",
        hint="Install a build of torch for this GPU (pytorch.org), or set trainer=cpu.",
    )


def kept_bf16_share() -> tuple[float, str]:
    """`bf16_share`, measured once on this machine, and a phrase that says where it comes from.

    The cache keeps it for this machine, processor and version of torch. So a busy moment gives the
    next run no other answer, and trials that start together get the same one.
    """
    about = {"machine": platform.node(), "processor": processor_name(), "torch": torch.__version__}
    # Earlier versions measured with several threads.
    about |= {"instructions": os.environ.get("ONEDNN_MAX_CPU_ISA", ""), "threads": "1"}
    path = default_cache_folder() / "precision" / f"{recipe_key(about)}.json"
    with suppress(OSError, Timeout):  # if the cache cannot be written, each run measures
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = file_lock(path.with_suffix(".lock"))
        acquire(lock, _PATIENCE_S)
        try:
            # A damaged file is written again.
            with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
                saved = load_json(path)
                return float(saved["bf16_share"]), f"measured on {saved['date']} and kept in {path}"
            share = bf16_share()
            values = {**about, "date": time.strftime("%Y-%m-%d"), "bf16_share": share}
            write_atomically(path, json.dumps(values, indent=1))
            return share, f"measured now and kept in {path}"
        finally:
            lock.release()
    return bf16_share(), "measured"


@contextmanager
def one_thread() -> Iterator[None]:
    """Context manager: torch computes in a single thread.

    On a busy machine several threads rarely run all at once, and wait for each other. One does not.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@cache
def bf16_share() -> float:
    """Time of a matrix product in bf16 on this CPU over its time in fp32.

    Each format takes its fastest try. Tries of both take turns, with pauses, so that another
    process which computes for a moment slows down tries of both.
    """
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, _WIDTH, generator=random) for size in (_ROWS, _WIDTH))
    best_s: dict[torch.dtype, float] = {}
    with one_thread(), torch.no_grad(), fast_fp32_products(Precision.fp32, torch.device("cpu")):
        inputs = {kind: (left.to(kind), right.to(kind)) for kind in (torch.float32, torch.bfloat16)}
        for number in range(1 + _TRIES):
            for kind, (rows, weight) in inputs.items():
                time.sleep(_PAUSE_S)  # a process that has just slept is the first to get a core
                began = time.perf_counter()
                torch.nn.functional.linear(rows, weight)
                seconds = time.perf_counter() - began
                if number:  # the first try prepares the product
                    best_s[kind] = min(seconds, best_s.get(kind, seconds))
    return best_s[torch.bfloat16] / best_s[torch.float32]


@contextmanager
def fast_fp32_products(precision: Precision, device: torch.device) -> Iterator[Choice[str] | None]:
    """Context manager: torch makes fp32 products in its fastest way that is exact here.

    Yields the choice, None if there is none to make. On some CPUs torch's setting "medium" uses
    oneDNN, which takes half of MKL's time and is as exact. On others it rounds to bf16. So a
    product is tried and compared. On a GPU nothing is tried: "medium" rounds to TF32 there.
    """
    if precision is Precision.tf32:
        with _products_as("high"):
            evidence = "inputs of products keep 10 bits after the point, sums are fp32"
            yield Choice("TF32", "asked for", evidence)
        return
    set_before = _older_name()
    if set_before is None:  # Lightning and torch's compiler read it, and would fail
        with _products_as(fp32_products(device.type)):
            yield None
    elif precision is not Precision.fp32 or set_before != "highest":
        yield None
    elif device.type == "cuda":
        with arithmetic(precision, device):
            evidence = f"TF32 by torch's flags: {_parts_in_tf32()}"
            yield Choice("highest", "fp32 was asked for", evidence)
    elif device.type == "cpu":
        error = _error_of_medium()
        evidence = f"largest error {error:.0e} of the largest answer, allowed {_LARGEST_ERROR:.0e}"
        if error <= _LARGEST_ERROR:
            with _products_as("medium"):
                yield Choice("medium", "torch's faster way, tried here and exact", evidence)
        else:
            yield Choice("highest", "torch's faster way is not exact here", evidence)
    else:
        yield None


def _parts_in_tf32() -> str:
    """Which kinds of layers a GPU computes in TF32 now, as words; "nowhere" for none."""
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    parts = {"products": matmul, "convolutions": cudnn.conv, "recurrent layers": cudnn.rnn}
    names = [name for name, part in parts.items() if part.fp32_precision == "tf32"]
    return ", ".join(names) or "nowhere"


def _error_of_medium() -> float:
    """Largest error of a product made with torch's "medium", over its largest number."""
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=random) for _ in range(2))
    exact = left.double() @ right.double()
    with _products_as("medium"):
        difference = (left @ right).double() - exact
    return float(difference.abs().max() / exact.abs().max())


def fp32_products(device_type: str) -> str:
    """How torch makes fp32 products on such devices, by a name of set_float32_matmul_precision."""
    backends: Any = torch.backends
    kind = (backends.mkldnn if device_type == "cpu" else backends.cuda).matmul.fp32_precision
    return _older_name() or {"tf32": "high", "bf16": "medium"}.get(kind, "highest")


def _older_name() -> str | None:
    """torch.get_float32_matmul_precision(); None if it raises.

    It raises after torch's newer settings were used, as transformers' Trainer does to compile.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


@contextmanager
def _products_as(name: str) -> Iterator[None]:
    """Context manager around torch.set_float32_matmul_precision."""
    # Setting the old name again leaves "ieee" in backends where nothing was set. So their settings
    # are restored, too: a model that was compiled with "ieee" later wrote beyond its memory (torch
    # 2.13, a CPU with AVX512 and without bf16).
    before = _older_name()
    backends: list[Any] = [cast(Any, torch.backends.mkldnn).matmul, torch.backends.cuda.matmul]
    kinds = [backend.fp32_precision for backend in backends]
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before or "highest")
        of_all: str = cast(Any, torch.backends).fp32_precision
        for backend, kind in zip(backends, kinds, strict=True):
            # "none" follows the setting of all backends, also when that changes.
            backend.fp32_precision = "none" if kind == of_all else kind


def bf16_is_native_on_cpu() -> bool:
    """Whether the processor has instructions for bf16, and oneDNN may use them.

    Torch's own question is also answered with yes where oneDNN emulates them.
    """
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _ISAS_WITHOUT_BF16:
        return False
    questions = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(hasattr(torch.cpu, name) and getattr(torch.cpu, name)() for name in questions)


def arithmetic(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Context manager: matrix products of a model run in this precision; weights stay in fp32."""
    if precision in PRODUCT_TYPES:
        return torch.autocast(device.type, dtype=product_type(precision))
    is_fp32_on_gpu = precision is Precision.fp32 and device.type == "cuda"
    return _without_tf32() if is_fp32_on_gpu else nullcontext()


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Context manager: convolutions and recurrent layers of a GPU compute in fp32.

    Torch's default for them is TF32. Another setting of yours stays.
    """
    cudnn: Any = torch.backends.cudnn
    is_default = cudnn.conv.fp32_precision == cudnn.rnn.fp32_precision == "tf32"
    if is_default:
        # Not by the newer settings: after those torch's compiler could not read the older ones.
        cudnn.allow_tf32 = False
    try:
        yield
    finally:
        if is_default:
            cudnn.allow_tf32 = True


def answering(asked: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Context manager for predictions of a finished run, like `arithmetic`.

    auto is fp32 on a CPU. On a GPU it is a 16-bit format, which the flat encoders' kernels need.
    """
    is_plain = asked is Precision.auto and device.type != "cuda"
    return arithmetic(Precision.fp32 if is_plain else choose_precision(asked, device).value, device)
