"""fp32 products are made faster only where they stay exact, and only while a run lasts."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from flatout.engine import precision
from flatout.engine.peaks import arithmetic_of
from flatout.engine.precision import (
    LIGHTNING_NAMES,
    Precision,
    answering,
    bf16_is_native_on_cpu,
    by_lightning_name,
    choose_precision,
    fast_fp32_products,
)
from flatout.errors import UserError
from tests.refusals import refused

CPU = torch.device("cpu")


def test_the_way_of_products_is_put_back_and_told():
    before = torch.get_float32_matmul_precision()
    with fast_fp32_products(Precision.fp32, CPU) as found:
        assert found is not None
        assert "largest error" in found.evidence
        assert torch.get_float32_matmul_precision() == found.value
    assert torch.get_float32_matmul_precision() == before


def test_fp32_on_a_gpu_is_fp32_in_convolutions_and_recurrent_layers_and_so_is_its_peak(
    monkeypatch,
):
    # else a build for GPUs would ask for theirs
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    cuda = torch.device("cuda")
    cudnn = torch.backends.cudnn
    assert cudnn.allow_tf32  # torch's own default
    with fast_fp32_products(Precision.fp32, cuda) as found:
        assert found is not None
        assert found.value == "highest"
        assert found.evidence == "TF32 by torch's flags: nowhere"
        assert "tf32" not in {cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision}
        assert not cudnn.allow_tf32
        assert arithmetic_of("32-true") is Precision.fp32
    assert cudnn.allow_tf32
    with answering(Precision.fp32, cuda):
        assert not cudnn.allow_tf32
    with fast_fp32_products(Precision.tf32, cuda):
        assert cudnn.allow_tf32
        assert arithmetic_of("32-true") is Precision.tf32


def test_what_a_person_set_for_convolutions_stands():
    cudnn = torch.backends.cudnn
    cudnn.allow_tf32 = False
    try:
        with fast_fp32_products(Precision.tf32, torch.device("cuda")):
            assert not cudnn.allow_tf32
        assert not cudnn.allow_tf32
    finally:
        cudnn.allow_tf32 = True


def backends():
    return [
        each.fp32_precision for each in (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)
    ]


@pytest.mark.parametrize(
    ("chosen", "largest"),
    [
        ("fp32", 1.0),
        ("fp32", 0.0),
        ("tf32", 5e-6),
    ],
)
def test_what_the_backends_were_set_to_is_put_back_too(monkeypatch, chosen, largest):
    monkeypatch.setattr(precision, "_LARGEST_ERROR", largest)
    before = backends()
    device = torch.device("cuda") if chosen == "tf32" else CPU
    with fast_fp32_products(Precision(chosen), device):
        is_changed = backends() != before
    assert is_changed == (largest > 0)
    assert backends() == before


def test_products_that_are_not_exact_enough_stay_plain(monkeypatch):
    monkeypatch.setattr(precision, "_LARGEST_ERROR", 0.0)
    with fast_fp32_products(Precision.fp32, CPU) as found:
        assert found is not None
        assert found.value == "highest"
        assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("chosen", [Precision.bf16, Precision.fp16])
def test_there_is_no_choice_in_sixteen_bits(chosen):
    with fast_fp32_products(chosen, CPU) as found:
        assert found is None


def test_a_way_that_a_person_chose_stands():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with fast_fp32_products(Precision.fp32, CPU) as found:
            assert found is None
            assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tf32", "high"),
        ("bf16", "medium"),
        ("ieee", "highest"),
    ],
)
@pytest.mark.parametrize("chosen", [Precision.fp32, Precision.bf16, Precision.tf32])
def test_what_was_set_by_torchs_newer_names_can_be_read_in_a_run_and_stands_after_it(
    name, expected, chosen
):
    backends: Any = torch.backends
    matmuls = [backends.cuda.matmul, backends.mkldnn.matmul]
    before = [torch.get_float32_matmul_precision(), *(each.fp32_precision for each in matmuls)]
    matmuls[1].fp32_precision = "bf16"  # so that the older name cannot be read
    matmuls[name == "bf16"].fp32_precision = name  # which a GPU does not have
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    set_to = [each.fp32_precision for each in matmuls]
    try:
        with fast_fp32_products(chosen, torch.device("cpu" if name == "bf16" else "cuda")):
            assert torch.get_float32_matmul_precision() == (
                "high" if chosen is Precision.tf32 else expected
            )
        assert [each.fp32_precision for each in matmuls] == set_to
    finally:
        torch.set_float32_matmul_precision(before[0])
        for each, kind in zip(matmuls, before[1:], strict=True):
            each.fp32_precision = kind


def test_what_was_set_for_all_backends_is_followed_after_a_run_too():
    backends: Any = torch.backends
    before = torch.get_float32_matmul_precision(), backends.fp32_precision
    # as torch begins
    backends.cuda.matmul.fp32_precision = "none"
    backends.mkldnn.matmul.fp32_precision = "none"
    backends.fp32_precision = "tf32"
    try:
        with fast_fp32_products(Precision.bf16, torch.device("cuda")):
            assert torch.get_float32_matmul_precision() == "high"
        assert backends.cuda.matmul.fp32_precision == "tf32"
        backends.fp32_precision = "ieee"
        assert (
            backends.cuda.matmul.fp32_precision == backends.mkldnn.matmul.fp32_precision == "ieee"
        )
    finally:
        backends.fp32_precision = before[1]
        torch.set_float32_matmul_precision(before[0])


def test_tf32_is_set_while_a_run_lasts():
    before = torch.get_float32_matmul_precision()
    with fast_fp32_products(Precision.tf32, torch.device("cuda")) as found:
        assert found is not None
        assert found.value == "TF32"
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before
    assert by_lightning_name("32-true") is Precision.fp32


def test_tf32_wants_a_gpu_that_has_it(monkeypatch):
    with refused("precision=tf32", "compute capability 8.0"):
        choose_precision(Precision.tf32, CPU)
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(UserError, match="precision=tf32"):
        choose_precision(Precision.tf32, cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    choice = choose_precision(Precision.tf32, cuda)
    assert (choice.value, LIGHTNING_NAMES[choice.value]) == (Precision.tf32, "32-true")


@pytest.mark.parametrize(
    ("limit", "chosen"),
    [
        ("avx2", Precision.fp32),
        ("AVX512_CORE_BF16", Precision.bf16),
    ],
)
def test_a_processor_whose_library_is_held_to_older_instructions_has_no_bf16_of_its_own(
    limit, chosen, monkeypatch
):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(precision, "bf16_share", lambda: 0.25)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert bf16_is_native_on_cpu()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert choose_precision(Precision.auto, CPU).value is chosen


@pytest.mark.parametrize(
    ("share", "chosen", "why"),
    [
        (0.25, Precision.bf16, "and faster"),
        (1.81, Precision.fp32, "but not faster"),
    ],
)
def test_native_bf16_is_chosen_on_a_cpu_only_where_its_products_are_faster(
    share, chosen, why, monkeypatch
):
    monkeypatch.setattr(precision, "bf16_is_native_on_cpu", lambda: True)
    monkeypatch.setattr(precision, "bf16_share", lambda: share)
    choice = choose_precision(Precision.auto, CPU)
    assert choice.value is chosen
    assert choice.why == f"bf16 is native on this CPU, {why}"
    assert choice.evidence.startswith(
        f"a matrix product in bf16 takes {share}× as long as in fp32, measured now and kept in /"
    )
    assert choose_precision(Precision.bf16, CPU).value is Precision.bf16


def test_a_run_that_resumes_keeps_its_precision_however_products_are_timed_now(monkeypatch):
    monkeypatch.setattr(precision, "bf16_is_native_on_cpu", lambda: True)
    monkeypatch.setattr(precision, "bf16_share", lambda: 0.25)
    assert choose_precision(Precision.auto, CPU, before="fp32").value is Precision.fp32
    monkeypatch.setattr(precision, "bf16_share", lambda: 1.81)
    assert choose_precision(Precision.auto, CPU, before="bf16").value is Precision.bf16
    monkeypatch.setattr(precision, "bf16_is_native_on_cpu", lambda: False)
    assert choose_precision(Precision.auto, CPU, before="bf16").value is Precision.fp32


def test_the_answer_of_a_machine_stands_whatever_a_later_run_would_measure(tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "bf16_is_native_on_cpu", lambda: True)
    monkeypatch.setattr(precision, "bf16_share", lambda: 0.53)
    first = choose_precision(Precision.auto, CPU)
    monkeypatch.setattr(precision, "bf16_share", lambda: 1.02)
    then = choose_precision(Precision.auto, CPU)
    assert (first.value, then.value) == (Precision.bf16, Precision.bf16)
    (kept,) = (tmp_path / "cache" / "precision").glob("*.json")
    took = "a matrix product in bf16 takes 0.53× as long as in fp32"
    assert first.evidence == f"{took}, measured now and kept in {kept}"
    day = time.strftime("%Y-%m-%d")
    assert then.evidence == f"{took}, measured on {day} and kept in {kept}"
    kept.write_text("{}")
    assert choose_precision(Precision.auto, CPU).value is Precision.fp32


@pytest.mark.parametrize("differs", ["machine", "processor", "version of torch"])
def test_another_machine_has_an_answer_of_its_own(differs, monkeypatch):
    monkeypatch.setattr(precision, "bf16_share", lambda: 0.53)
    assert precision.kept_bf16_share()[0] == 0.53
    monkeypatch.setattr(precision, "bf16_share", lambda: 1.02)
    if differs == "machine":
        monkeypatch.setattr("platform.node", lambda: "another")
    elif differs == "processor":
        monkeypatch.setattr(precision, "processor_name", lambda: "another")
    else:
        monkeypatch.setattr(torch, "__version__", "another")
    assert precision.kept_bf16_share()[0] == 1.02


def test_runs_that_begin_at_once_have_the_same_answer(monkeypatch):
    shares = iter([0.53, 1.02, 0.91, 0.7])
    monkeypatch.setattr(precision, "bf16_share", lambda: time.sleep(0.1) or next(shares))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: precision.kept_bf16_share()[0], range(4)))
    assert found == [0.53] * 4


def test_without_a_cache_each_run_measures(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(precision, "bf16_share", lambda: 0.5)
    assert precision.kept_bf16_share() == (0.5, "measured")


def test_products_are_timed_once_a_process_and_leave_the_settings_of_torch_as_they_were():
    before = torch.get_float32_matmul_precision(), backends()
    precision.bf16_share.cache_clear()
    share = precision.bf16_share()
    assert 0 < share < 100
    assert precision.bf16_share() == share
    assert (torch.get_float32_matmul_precision(), backends()) == before
