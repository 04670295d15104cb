"""Constants are kept on a device, and made each time on a CPU."""

from __future__ import annotations

import torch

from flatout.data.batches.kept_tensors import count_up, zeros

CPU = torch.device("cpu")
DEVICE = torch.device("meta")  # stands for a GPU: its tensors have no numbers


def test_a_cpu_makes_them_each_time():
    assert torch.equal(zeros((2, 3), torch.bfloat16, CPU), torch.zeros(2, 3, dtype=torch.bfloat16))
    assert torch.equal(count_up(4, CPU), torch.tensor([0, 1, 2, 3]))
    assert zeros((2,), torch.float32, CPU)._base is None


def test_a_device_keeps_one_tensor_for_sizes_that_are_rounded_up_alike():
    first = zeros((1, 5, 16), torch.float32, DEVICE)
    second = zeros((1, 8, 16), torch.float32, DEVICE)
    assert first.shape == (1, 5, 16)
    assert first.is_contiguous()
    assert first._base is second._base
    assert first._base.shape == (128,)
    assert zeros((1, 5, 16), torch.float16, DEVICE)._base is not first._base
    assert count_up(5, DEVICE)._base is count_up(8, DEVICE)._base
    assert count_up(9, DEVICE).shape == (9,)
    assert zeros((0, 3), torch.float32, DEVICE).shape == (0, 3)


def test_what_a_validation_has_asked_for_first_serves_in_training():
    with torch.inference_mode():
        kept = zeros((1, 3, 7), torch.float64, DEVICE)
        numbers = count_up(77, DEVICE)
    assert not kept.is_inference()
    assert not numbers.is_inference()
