"""What a rung needs of this machine, and why it cannot be measured where that is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable

import torch

from flatout.engine.compile import why_not
from flatout.engine.precision import bf16_is_native_on_cpu

GPU, GPUS, BF16, COMPILER = "a GPU", "several GPUs", "native bf16", "a C++ compiler"


def find_missing(needs: Iterable[str]) -> str:
    """Why a rung cannot be measured here; empty where it can."""
    return next(filter(None, map(_why_missing, needs)), "")


def _why_missing(need: str) -> str:
    if need in _CHECKS:
        return _CHECKS[need]()
    is_there = importlib.util.find_spec(need) is not None
    return "" if is_there else f"the package {need} is not installed"


def _missing_gpu() -> str:
    return "" if torch.cuda.is_available() else "not measurable here: no GPU"


def _missing_gpus() -> str:
    count = torch.cuda.device_count()
    return "" if count > 1 else f"not measurable here: {count or 'no'} GPU{'' if count == 1 else 's'}"


def _missing_bf16() -> str:
    is_there = torch.cuda.is_bf16_supported() if torch.cuda.is_available() else bf16_is_native_on_cpu()
    return "" if is_there else "not measurable here: bf16 is not native"


def _missing_compiler() -> str:
    return why_not(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


_CHECKS: dict[str, Callable[[], str]] = {
    GPU: _missing_gpu,
    GPUS: _missing_gpus,
    BF16: _missing_bf16,
    COMPILER: _missing_compiler,
}
