"""`compile=true`: the same weights under the same names, only while training, and told where it
cannot be.
"""

from __future__ import annotations

import copy
import shutil
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import flatout.engine.compile
from flatout import HeadlinesConfig, MonitorConfig, TextCNNConfig, TextDataConfig, fit
from flatout.engine.compile import compile_in_place
from tests.refusals import refused

CPU = torch.device("cpu")
OF_TORCH = ("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*not a leaf Tensor")
"""Said inside torch about torch."""


@pytest.mark.soak(seconds=60)
@pytest.mark.filterwarnings(*OF_TORCH)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with a C++ compiler")
def test_a_compiled_model_computes_the_same_under_the_same_names():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    compiled = copy.deepcopy(plain)
    inputs = torch.randn(5, 4)
    compile_in_place(compiled, CPU)
    for model in (plain, compiled):
        model(inputs).square().sum().backward()
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)


def test_only_training_is_compiled_and_no_copy_is(monkeypatch):
    called: list[int] = []
    monkeypatch.setattr(flatout.engine.compile, "why_not", lambda device: "")
    monkeypatch.setattr(
        torch, "compile", lambda call: lambda *inputs: (called.append(1), call(*inputs))[1]
    )
    model = nn.Linear(2, 2)
    compile_in_place(model, CPU)
    model.eval()(torch.ones(1, 2))
    assert not called
    model.train()(torch.ones(1, 2))
    assert len(called) == 1
    copy.deepcopy(model)(torch.ones(1, 2))
    assert len(called) == 1


@pytest.mark.soak(seconds=6)
@pytest.mark.filterwarnings(*OF_TORCH)
def test_a_run_with_it_trains_the_same_weights(tmp_path, monkeypatch):
    # Traced as always, but not translated: that takes a minute, and is torch's own business.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(flatout.engine.compile, "why_not", lambda device: "")
    data = TextDataConfig(sample=HeadlinesConfig(rows=200, eval_rows=40, classes=3), batch_size=32)
    model = TextCNNConfig(embedding=8, filters=8, dropout=0.0, embedding_dropout=0.0)
    common: dict[str, Any] = {
        "precision": "fp32",
        "epochs": 1,
        "monitor": MonitorConfig(progress=False),
    }
    results = [
        fit(data, model, folder=tmp_path / f"{each}", compile=each, **common)
        for each in (False, True)
    ]
    plain, compiled = (
        load_file(result.folder / "checkpoints/last/tensors.safetensors") for result in results
    )
    assert compiled.keys() == plain.keys()
    for name in plain:
        assert torch.allclose(compiled[name], plain[name], atol=1e-5), name
    assert [
        choice["value"] for choice in results[1].summary["choices"] if choice["name"] == "compile"
    ] == [True]
    assert results[1].predict(["a headline"])


def test_a_machine_without_a_compiler_is_told_how_to_mend_it(monkeypatch):
    monkeypatch.setattr(flatout.engine.compile, "why_not", lambda device: "no C++ compiler is here")
    with refused("compile", "C++ compiler", fix="compile=false"):
        compile_in_place(nn.Linear(2, 2), CPU)


def test_a_compiler_that_is_not_there_is_found_out(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "no-such-compiler")
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    assert "no C++ compiler" in flatout.engine.compile.why_not(CPU)
