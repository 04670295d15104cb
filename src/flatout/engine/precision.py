"""Which numbers a run computes with, and why: sixteen bits where the device multiplies
them faster.
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
from flatout.files import write_atomically
from flatout.run_log import Choice

_LARGEST_SHARE = 0.9  # of the time of a product in fp32, that one in bf16 may take
_ROWS = 256
_WIDTH = 768
_TRIES = 24
_PAUSE_S = 0.01
_PATIENCE_S = 30.0  # how long a run waits for another one that measures the same
_LARGEST_ERROR = 5e-6  # of an exact product, as a share of its largest number
_ISAS_WITHOUT_BF16 = {
    "SSE41",
    "AVX",
    "AVX2",
    "AVX2_VNNI",
    "AVX2_VNNI_2",
    "AVX512_CORE",
    "AVX512_CORE_VNNI",
}
"""Instructions that oneDNN can be held to by a variable of its own, and that have no products of
bf16."""
# arithmetic of matrix products; weights stay fp32
Precision = StrEnum("Precision", "auto fp32 tf32 bf16 fp16")
LIGHTNING_NAMES = {
    Precision.fp32: "32-true",
    Precision.tf32: "32-true",
    Precision.bf16: "bf16-mixed",
    Precision.fp16: "16-mixed",
}
# of products other than fp32
PRODUCT_TYPES = {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}


def product_type(precision: Precision) -> torch.dtype:
    return PRODUCT_TYPES.get(precision, torch.float32)


def by_lightning_name(name: str) -> Precision:
    """The precision that Lightning calls so; of its others a run has none."""
    return next(precision for precision, theirs in LIGHTNING_NAMES.items() if theirs == name)


def choose_precision(
    asked: Precision, device: torch.device, before: str | None = None
) -> Choice[Precision]:
    """What was asked for, or bf16 if native and no slower, else fp16 on a GPU, else fp32; `before`:
    a resumed run's.
    """
    if device.type == "cuda":
        _require_kernels(device)
    if asked is Precision.tf32 or (asked is Precision.bf16 and device.type == "cuda"):
        is_there = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        require(
            is_there,
            f"precision={asked}",
            "needs a GPU of compute capability 8.0 or later",
            hint=f"Set precision={'fp32' if asked is Precision.tf32 else 'fp16'}, or leave it out.",
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
        evidence = f"a product takes {share:.2f} of its time in fp32, {source}"
        if share > _LARGEST_SHARE:  # as on processors with AVX512_BF16 and without AMX
            return Choice(Precision.fp32, "bf16 is native on this CPU, but not faster", evidence)
        return Choice(Precision.bf16, "bf16 is native on this CPU, and faster", evidence)
    return Choice(
        Precision.fp32, f"sixteen bits are not native on this {device.type}", "no native bf16"
    )


def _require_kernels(device: torch.device) -> None:
    """Refuse a GPU for which this build of torch has no kernels, before the first of them fails."""
    names = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(torch.cuda.get_arch_list()))
    kernels = sorted(((int(major), int(minor)), kind) for kind, major, minor in names)
    if not kernels:
        return
    card = torch.cuda.get_device_capability(device)
    # One for an older card of the same kind does; one that is compiled when it runs does on every
    # later card.
    if any(place <= card and (kind == "compute" or place[0] == card[0]) for place, kind in kernels):
        return
    own, lowest, highest = (
        ".".join(map(str, place)) for place in (card, kernels[0][0], kernels[-1][0])
    )
    what = (
        f"compute capability {own}, but torch {torch.__version__} has kernels for {lowest} to"
        f" {highest}"
    )
    raise UserError(
        "trainer.accelerator",
        f"a GPU of {what}",
        hint="Install a build of torch for this GPU (pytorch.org), or set trainer=cpu.",
    )


def kept_bf16_share() -> tuple[float, str]:
    """`bf16_share` and where it comes from: the cache keeps it for this machine, processor and
    version of torch.
    """
    # So a busy moment does not give the next run another answer, and trials that begin at once have
    # the same one.
    about = {"machine": platform.node(), "processor": processor_name(), "torch": torch.__version__}
    # earlier versions took several
    about |= {"instructions": os.environ.get("ONEDNN_MAX_CPU_ISA", ""), "threads": "1"}
    path = default_cache_folder() / "precision" / f"{recipe_key(about)}.json"
    with suppress(OSError, Timeout):  # where the cache cannot be written, each run measures
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = file_lock(path.with_suffix(".lock"))
        acquire(lock, _PATIENCE_S)
        try:
            # a damaged one is written again
            with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
                known = json.loads(path.read_text(encoding="utf-8"))
                return float(known["bf16_share"]), f"measured on {known['date']} and kept in {path}"
            known = {**about, "date": time.strftime("%Y-%m-%d"), "bf16_share": bf16_share()}
            write_atomically(path, json.dumps(known, indent=1))
            return float(known["bf16_share"]), f"measured now and kept in {path}"
        finally:
            lock.release()
    return bf16_share(), "measured"


@contextmanager
def one_thread() -> Iterator[None]:
    """A single thread is left in peace where several are never all running at once; it has no
    barrier to wait at.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@cache
def bf16_share() -> float:
    """Time of a product in bf16 on this CPU, as a share of its time in fp32: the fastest of each,
    in turn.
    """
    # The tries are spread out, so that another process that computes for a moment does not slow
    # down all of one kind. They take one thread: two wait for each other where another process has
    # a core, and tell nothing of the product.
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, _WIDTH, generator=random) for size in (_ROWS, _WIDTH))
    best: dict[torch.dtype, float] = {}
    with one_thread(), torch.no_grad(), fast_fp32_products(Precision.fp32, torch.device("cpu")):
        given = {kind: (left.to(kind), right.to(kind)) for kind in (torch.float32, torch.bfloat16)}
        for number in range(1 + _TRIES):
            for kind, inputs in given.items():
                time.sleep(_PAUSE_S)  # before each: what has just slept is the first to get a core
                started = time.perf_counter()
                torch.nn.functional.linear(*inputs)
                seconds = time.perf_counter() - started
                if number:  # the first one prepares the product
                    best[kind] = min(seconds, best.get(kind, seconds))
    return best[torch.bfloat16] / best[torch.float32]


@contextmanager
def fast_fp32_products(precision: Precision, device: torch.device) -> Iterator[Choice[str] | None]:
    """fp32 products in the faster of two ways, where a try shows it to be as exact; None where
    there is no choice.
    """
    # With torch's "medium" some CPUs make them by oneDNN, in half of MKL's time and as exactly.
    # Others round to bf16: so a try decides. GPUs round to TF32, but not all products, so there
    # nothing is tried.
    if precision is Precision.tf32:
        with _products_as("high"):
            yield Choice(
                "TF32",
                "asked for",
                "inputs of products keep 10 bits after the point, sums are fp32",
            )
        return
    asked = _older_name()
    if asked is None:  # Lightning and torch's compiler read it, and would fail
        with _products_as(fp32_products(device.type)):
            yield None
        return
    if precision is not Precision.fp32 or device.type not in ("cpu", "cuda") or asked != "highest":
        yield None
        return
    if device.type == "cuda":
        cudnn, matmul = cast(Any, torch.backends.cudnn), cast(Any, torch.backends.cuda.matmul)
        parts = {"products": matmul, "convolutions": cudnn.conv, "recurrent layers": cudnn.rnn}
        with arithmetic(precision, device):
            rounded = (
                ", ".join(name for name, part in parts.items() if part.fp32_precision == "tf32")
                or "nowhere"
            )
            yield Choice("highest", "fp32 was asked for", f"TF32 by torch's flags: {rounded}")
        return
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=random) for _ in range(2))
    exact = left.double() @ right.double()
    with _products_as("medium"):
        error = float(((left @ right).double() - exact).abs().max() / exact.abs().max())
    is_exact = error <= _LARGEST_ERROR
    value = "medium" if is_exact else "highest"
    why = (
        "torch's faster way, tried here and exact"
        if is_exact
        else "torch's faster way is not exact here"
    )
    with _products_as("medium") if is_exact else nullcontext():
        yield Choice(
            value,
            why,
            f"largest error {error:.0e} of the largest answer, allowed {_LARGEST_ERROR:.0e}",
        )


def fp32_products(device_type: str) -> str:
    """How torch makes fp32 products there, by a name of torch.set_float32_matmul_precision."""
    backends: Any = torch.backends
    kind = (backends.mkldnn if device_type == "cpu" else backends.cuda).matmul.fp32_precision
    return _older_name() or {"tf32": "high", "bf16": "medium"}.get(kind, "highest")


def _older_name() -> str | None:
    """None where torch's newer names were set, as transformers' Trainer does to compile: then it
    raises.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


@contextmanager
def _products_as(name: str) -> Iterator[None]:
    """torch.set_float32_matmul_precision for a while."""
    # Set back, it leaves "ieee" with the backends where nothing was set, so theirs is put back,
    # too. A model that was compiled with "ieee" after a run of ours wrote beyond its memory (torch
    # 2.13, a CPU with AVX512 and no bf16).
    before = _older_name()
    backends: list[Any] = [cast(Any, torch.backends.mkldnn).matmul, torch.backends.cuda.matmul]
    kinds = [backend.fp32_precision for backend in backends]
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before or "highest")
        for backend, kind in zip(backends, kinds, strict=True):
            # What all backends have, this one reads from there, and follows if it changes.
            backend.fp32_precision = (
                "none" if kind == cast(Any, torch.backends).fp32_precision else kind
            )


def bf16_is_native_on_cpu() -> bool:
    """Whether the processor itself multiplies bf16 and oneDNN may; it answers yes also where it
    emulates them.
    """
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _ISAS_WITHOUT_BF16:
        return False
    asked = [
        getattr(torch.cpu, name, None)
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    ]
    return any(question() for question in asked if question is not None)


def arithmetic(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """In here a model's products are made so; its weights stay fp32."""
    if precision in PRODUCT_TYPES:
        return torch.autocast(device.type, dtype=product_type(precision))
    return (
        _without_tf32() if precision is Precision.fp32 and device.type == "cuda" else nullcontext()
    )


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Convolutions and recurrent layers of a GPU in fp32, where torch's own default stands, which
    is TF32.
    """
    cudnn: Any = torch.backends.cudnn
    is_default = cudnn.conv.fp32_precision == cudnn.rnn.fp32_precision == "tf32"
    if is_default:
        # set by their newer names, torch's compiler could not read the older one
        cudnn.allow_tf32 = False
    try:
        yield
    finally:
        if is_default:
            cudnn.allow_tf32 = True


def answering(asked: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """The arithmetic of a finished run's answers: auto is fp32 on a CPU, on a GPU sixteen bits, as
    its kernels need.
    """
    is_plain = asked is Precision.auto and device.type != "cuda"
    return arithmetic(Precision.fp32 if is_plain else choose_precision(asked, device).value, device)
