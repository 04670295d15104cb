"""Errors that say memory did not suffice, of all the kinds that libraries have, and what gives memory back.

Only what says so plainly counts. cuDNN's "no engine" and cuBLAS's "not initialized" often mean the same. As often
they mean something that smaller batches do not cure. On a CPU the system mostly ends a process before any error.
"""

from __future__ import annotations

import gc
import re

import torch

ERRORS = (RuntimeError, MemoryError)
"""The classes such errors are of."""
_WORDS = re.compile(
    r"(?:CUDA|HIP|XPU|MPS backend) (?:error: )?out of memory"
    r"|(?:CU|HIP|ROC)(?:BLAS|BLASLT|DNN|SPARSE|SOLVER|FFT|RAND)_STATUS_(?:\w+_)?ALLOC(?:ATION)?_FAILED"
    r"|MIOPEN_STATUS_ALLOC_FAILED|miopenStatusAllocFailed"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory",
    re.IGNORECASE,
)
_OTHERS = re.compile(r"\bNCCL\b")
"""After one of these the ranks cannot talk any more."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice for what was computed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and _WORDS.search(text) is not None and _OTHERS.search(text) is None


def in_short(error: BaseException) -> str:
    """The first words of an error: what could not be had, without the allocator's account."""
    text = " ".join(str(error).split()) or type(error).__name__
    sentences = re.split(r"(?<=\D\.) ", text)
    return " ".join(sentences[:2])[:160].rstrip(".")


def give_back_memory() -> None:
    """Return unused memory to the device; call it where the error's traceback is gone."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
