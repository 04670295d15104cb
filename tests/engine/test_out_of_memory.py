"""Which errors say that memory did not suffice."""

from __future__ import annotations

import pytest
import torch

from flatout.engine.pieces import is_out_of_memory, shorten_error

LACKING = [
    torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB"
    ),
    MemoryError(),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    RuntimeError(
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"
    ),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory:"
        " you tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
]
OTHERS = [
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("NCCL error: unhandled cuda error, Cuda failure 2 'CUDA out of memory'"),
    RuntimeError("shape '[2, 3]' is invalid for input of size 5"),
    ValueError("CUDA out of memory"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", LACKING, ids=lambda error: str(error)[:45])
def test_errors_of_every_library_that_lacks_memory_are_known(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: str(error)[:45])
def test_other_errors_are_not_taken_for_it(error):
    assert not is_out_of_memory(error)


def test_memory_that_this_machine_does_not_have_is_such_an_error():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_the_allocators_account_is_left_out():
    assert shorten_error(LACKING[0]) == "CUDA out of memory. Tried to allocate 2.00 GiB"
    assert shorten_error(MemoryError()) == "MemoryError"
    assert len(shorten_error(LACKING[-1])) <= 160
