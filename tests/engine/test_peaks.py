"""A card's peak is found by its very name, and a CPU's is measured without leaving a trace."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch

from flatout.distributed.limits import Limits
from flatout.engine import peaks
from flatout.engine.peaks import arithmetic_of, known_peak, listed_peak, measured_peak
from flatout.engine.precision import Precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "arithmetic", "tflops"),
    [
        ("NVIDIA A16", "fp16", 17.9),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A2", "bf16", 18),
        ("NVIDIA A30", "bf16", 165),
        ("NVIDIA A40", "fp32", 37.4),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100-PCIE-40GB", "fp16", 312),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("Tesla P100-PCIE-16GB", "fp16", 18.7),
        ("Tesla P100-SXM2-16GB", "fp16", 21.2),
        ("Tesla T4", "fp16", 65),
        ("NVIDIA T4", "fp16", 65),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("NVIDIA GeForce RTX 2080 Ti", "fp16", 53.8),
        ("GeForce RTX 2080 Ti", "fp32", 13.4),
        ("NVIDIA GeForce RTX 3090", "bf16", 71),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40", "bf16", 181),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA B200", "bf16", 2250),
    ],
)
def test_a_card_is_known_by_the_name_that_its_driver_gives(name, arithmetic, tflops):
    found = listed_peak(name, Precision(arithmetic))
    assert found.tflops == tflops
    assert f"dense {arithmetic}" in found.source


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A10G",
        "NVIDIA A100X",
        "NVIDIA A800-SXM4-80GB",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "Quadro RTX 6000",
        "NVIDIA GH200 480GB",
        "NVIDIA H20",
        "Tesla V100-FHHL-16GB",
        "GRID T4-16Q",
        "AMD Instinct MI300X",
        "",
    ],
)
def test_a_card_that_only_sounds_like_another_is_unknown(name):
    assert listed_peak(name, Precision.fp16) is None


def test_arithmetic_that_a_card_has_not_is_unknown_and_tf32_without_its_units_is_fp32():
    assert listed_peak("Tesla T4", Precision.bf16) is None
    assert listed_peak("Tesla V100-SXM2-16GB", Precision.tf32).tflops == 15.7
    assert listed_peak("Tesla T4", None) is None
    assert known_peak(CPU, "32-true") is None


def test_a_cuda_device_is_asked_for_its_name(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda device: f"NVIDIA A16 {device.index}"[:10]
    )
    assert known_peak(torch.device("cuda", 3), "16-mixed").tflops == 17.9
    assert known_peak(torch.device("cuda", 3), "32-true").tflops == 4.5
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A17")
    assert known_peak(torch.device("cuda", 3), "16-mixed") is None


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("bf16-mixed", "bf16"),
        ("bf16-true", "bf16"),
        ("16-mixed", "fp16"),
        ("32-true", "fp32"),
        ("64-true", None),
    ],
)
def test_what_lightning_calls_a_precision_is_understood(precision, expected):
    assert arithmetic_of(precision) == expected


def test_fp32_products_made_the_quicker_way_count_as_tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert arithmetic_of("32-true") is Precision.tf32
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.xdist_group("timing")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_cpu_is_measured_and_no_random_state_or_setting_is_touched(precision):
    def state() -> list[object]:
        return [
            torch.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),
            random.getstate(),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.is_grad_enabled(),
        ]

    before = state()
    started = time.perf_counter()
    found = measured_peak(CPU, precision)
    assert time.perf_counter() - started < 3
    assert state() == before
    assert found.tflops > 1e-4
    dtype = "bfloat16" if precision == "bf16-mixed" else "float32"
    assert found.source.startswith("measured")
    assert f"512 {dtype} product" in found.source or f"1024 {dtype} product" in found.source


@pytest.mark.xdist_group("timing")
def test_the_measured_peak_is_no_less_than_a_product_reaches_by_itself():
    found = measured_peak(CPU, "32-true")
    left = torch.randn(512, 512)
    right = torch.randn(512, 512)
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        torch.mm(left, right)
        taken.append(time.perf_counter() - started)
    # Half of it, because the machine may be busy with something else for as long as one of them
    # takes.
    assert found.tflops > 0.5 * 2 * 512**3 / sorted(taken)[2] / 1e12


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# A product waits for its slowest thread: where others take the cores in turn, the threads hardly
# ever run at once.
@pytest.mark.parametrize(
    ("together", "allowed", "tflops", "source"),
    [
        (170e9, None, 0.17, "measured: 512 x 512 bfloat16 product, 2 threads"),
        (
            30e9,
            None,
            0.2,
            "measured on a busy machine: 512 x 512 bfloat16 product of one thread, times 2",
        ),
        (
            30e9,
            1.5,
            0.15,
            "measured on a busy machine: 512 x 512 bfloat16 product of one thread, times 1.5",
        ),
        (95e9, 1.0, 0.095, "measured: 512 x 512 bfloat16 product, 2 threads"),
    ],
)
def test_on_a_busy_machine_one_thread_tells_for_all(
    two_threads, monkeypatch, together, allowed, tflops, source
):
    monkeypatch.setattr(
        peaks,
        "_fastest_product",
        lambda device, dtype: (100e9 if torch.get_num_threads() == 1 else together, 512),
    )
    monkeypatch.setattr(peaks, "cores_here", lambda: [0, 1])
    monkeypatch.setattr(peaks, "limits", lambda: Limits(allowed, None))
    found = measured_peak(CPU, "bf16-mixed")
    assert (found.tflops, found.source) == (pytest.approx(tflops), source)
    assert torch.get_num_threads() == 2


def test_precisions_that_nothing_is_known_of_have_no_peak():
    assert measured_peak(CPU, "64-true") is None
    assert measured_peak(torch.device("meta"), "32-true") is None
