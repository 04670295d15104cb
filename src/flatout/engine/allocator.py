"""Memory that is freed each step and wanted again the next: on a CPU it should stay with the process.

glibc hands large freed blocks straight back to the system and fetches fresh, zeroed pages for the next step's
gradients and activations. A BiLSTM of seven million parameters trains about a quarter faster when glibc keeps them.
The process then holds its peak until it ends; where that matters, set MALLOC_TRIM_THRESHOLD_ yourself.
"""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1
_LARGEST = 2**30


def keep_freed_memory() -> bool:
    """Ask the C library to keep freed blocks; whether it could be asked. Your own setting stands."""
    if not sys.platform.startswith("linux") or {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # a C library without it, such as musl
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST) and mallopt(_M_TRIM_THRESHOLD, _NEVER))


_GROWING = "expandable_segments:True"


def let_segments_grow() -> bool:
    """Have torch take a GPU's memory in segments that grow: batches have another shape each step, which leaves gaps.

    torch reads it when a process first asks for a GPU's memory. Your own setting stands; whether this one does.
    """
    if not sys.platform.startswith("linux") or "PYTORCH_CUDA_ALLOC_CONF" in os.environ:
        return False
    return os.environ.setdefault("PYTORCH_ALLOC_CONF", _GROWING) == _GROWING
