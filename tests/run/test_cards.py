"""What is asked of a GPU that is not there, or cannot do it, is refused in a sentence that says
what helps.
"""

from __future__ import annotations

import pytest
import torch

from flatout import UserError
from flatout.cli.run_arguments import answering_devices
from flatout.distributed import ranks
from flatout.engine.precision import Precision, choose_precision
from flatout.run.devices import choose_devices
from tests.refusals import refused

CUDA = torch.device("cuda", 0)


@pytest.fixture
def with_driver(monkeypatch, tmp_path):
    """A machine with a GPU that torch does not find."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(ranks, "_DRIVERS", (str(tmp_path),))


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(ranks, "_DRIVERS", ())
    with refused("trainer.accelerator", "gpu", "no GPU", fix="trainer=cpu"):
        choose_devices({"accelerator": "gpu"})
    with refused("--device", "'cuda:1'", "no GPU", allowed="auto, cpu"):
        answering_devices("cuda:1")
    assert choose_devices({}) == [0]


def test_a_torch_without_cuda_names_the_command_that_installs_another(with_driver, capsys):
    why = "this machine has a GPU, but torch 2.13.0+cpu is built without CUDA"
    run = "pip install --force-reinstall torch==2.13.0"
    with refused("trainer.accelerator", "gpu", why, fix=run):
        choose_devices({"accelerator": "gpu"})
    with refused("--device", why, allowed="auto, cpu", fix=run):
        answering_devices("cuda")
    assert choose_devices({"accelerator": "cpu"}) == [0]
    assert not capsys.readouterr().out
    assert choose_devices({}) == [0]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("devices: ")
    assert why in line
    assert run in line


def test_a_driver_that_torch_cannot_use(with_driver, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with refused("trainer.accelerator", "torch 2.13.0+cpu finds none", fix="nvidia-smi"):
        choose_devices({"accelerator": "cuda"})


def test_more_devices_than_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with refused("trainer.devices", 4, allowed="at most 2: this machine has 2 GPUs"):
        choose_devices({"devices": 4})
    with refused("trainer.devices", "device 2", allowed="0 to 1: this machine has 2 GPUs"):
        choose_devices({"devices": [2]})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1-2,MIG-3-4")
    one_slice = "at most 1: CUDA gives a process one slice of a MIG card"
    with refused("trainer.devices", 2, allowed=one_slice):
        choose_devices({"devices": 2})


@pytest.mark.parametrize(
    ("card", "kernels", "is_fine"),
    [
        ((6, 1), ["sm_75", "sm_80", "sm_90a", "sm_120"], False),
        ((12, 1), ["sm_75", "sm_80", "sm_90a", "sm_120"], True),
        ((7, 0), ["sm_75", "compute_80"], False),
        ((13, 0), ["sm_75", "compute_120"], True),
        ((6, 1), ["gfx90a"], True),  # of another maker: torch itself knows
        ((6, 1), [], True),
    ],
)
def test_a_gpu_for_which_torch_has_no_kernels(monkeypatch, card, kernels, is_fine):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: kernels)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    if is_fine:
        assert choose_precision(Precision.fp32, CUDA).value is Precision.fp32
    else:
        with pytest.raises(UserError) as caught:
            choose_precision(Precision.fp32, CUDA)
        capability = f"compute capability {card[0]}.{card[1]}"
        for named in (capability, f"torch {torch.__version__}", "kernels for 7.5 to"):
            assert named in str(caught.value)
        assert "trainer=cpu" in caught.value.hint


def test_bf16_on_a_gpu_without_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with refused("precision=bf16", "compute capability 8.0", fix="precision=fp16"):
        choose_precision(Precision.bf16, CUDA)
    assert choose_precision(Precision.bf16, torch.device("cpu")).value is Precision.bf16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choose_precision(Precision.bf16, CUDA).value is Precision.bf16
