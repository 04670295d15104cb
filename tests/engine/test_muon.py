"""Muon steps the matrices of layers, AdamW the rest, and both are one optimizer to whatever holds
it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatout import BiLSTMConfig, OptimConfig, TextDataConfig, TransformerConfig, UserError, fit
from flatout.data.batches.flat_batch import flat_batch
from flatout.models.encoder.lora import LoraConfig
from flatout.models.encoder.transformer import Outputs, Transformer
from tests.faults.plants import Planted, RaiseAt
from tests.faults.runs import write_rows
from tests.refusals import refused
from tests.run_files import model_weights

MUON = OptimConfig(name="muon", lr=1e-2, weight_decay=0.1)
CALM = TransformerConfig(hidden=16, layers=2, heads=2, dropout=0.0, attention_dropout=0.0)


def encoder(config: TransformerConfig = CALM) -> Transformer:
    torch.manual_seed(0)
    return config.build(
        Outputs(["a", "b"], "single"), vocabulary_size=30, padding_id=0, separator_id=None
    )


def take_step(model: Transformer, optimizer: torch.optim.Optimizer, seed: int) -> None:
    rows = torch.randint(5, 30, (4, 7), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    model(flat_batch(list(rows))).square().mean().backward()
    optimizer.step()


def test_matrices_of_layers_get_the_steps_of_muon_and_all_else_those_of_adamw() -> None:
    model = encoder()
    other = encoder()
    ours = MUON.build(model)
    in_layers = {
        id(weight) for weight in nn.ModuleList(other.blocks()).parameters() if weight.ndim == 2
    }
    matrices = [weight for weight in other.parameters() if id(weight) in in_layers]
    tables = [
        weight for weight in other.parameters() if weight.ndim > 1 and id(weight) not in in_layers
    ]
    flat = [weight for weight in other.parameters() if weight.ndim == 1]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups: list[dict[str, Any]] = [
        {"params": tables, "weight_decay": 0.1},
        {"params": flat, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    for seed in range(3):
        take_step(model, ours, seed)
        take_step(other, adamw, seed)
        muon.step()
    assert len(matrices) == 12
    assert len(tables) == 5
    for (name, found), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_its_state_continues_the_same_steps() -> None:
    model = encoder()
    optimizer = MUON.build(model)
    take_step(model, optimizer, 0)
    again = copy.deepcopy(model)
    resumed = MUON.build(again)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in (1, 2):
        take_step(model, optimizer, seed)
        take_step(again, resumed, seed)
    assert all(
        torch.equal(one, other)
        for one, other in zip(model.parameters(), again.parameters(), strict=True)
    )


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    model = encoder()
    optimizer = MUON.build(model)
    before = [weight.clone() for weight in model.parameters()]
    vars(optimizer)["found_inf"] = torch.ones(())
    take_step(model, optimizer, 0)
    assert all(
        torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True)
    )
    vars(optimizer)["found_inf"] = torch.zeros(())
    take_step(model, optimizer, 0)
    assert not all(
        torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True)
    )


def train(folder: Path, **settings: Any) -> Any:
    folder.mkdir(exist_ok=True)
    write_rows(folder / "rows.csv")
    data = TextDataConfig(
        train=str(folder / "rows.csv"), max_length=16, batch_size=12, cache=str(folder / "cache")
    )
    optim = OptimConfig(name="muon", lr=3e-3, layer_decay=0.9, ema=0.9)
    given = {
        "optim": optim,
        "epochs": 3,
        "output": str(folder / "runs"),
        "logger": "none",
        "precision": "fp32",
    }
    return fit(data, TransformerConfig(hidden=16, layers=2, heads=2), **(given | settings))


@pytest.mark.soak(seconds=3)
def test_a_run_with_muon_resumes_to_the_same_weights(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    with pytest.raises(Planted):
        train(
            tmp_path / "cut",
            resume="auto",
            callbacks={"plant": RaiseAt(place="on_train_batch_end", step=14)},
        )
    resumed = train(tmp_path / "cut", resume="auto", callbacks={})
    assert resumed.summary["training"]["resumed_from"] == 14
    expected = model_weights(whole.folder)
    found = model_weights(resumed.folder)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert resumed.metrics == whole.metrics


@pytest.mark.parametrize(
    "model",
    [
        lambda: BiLSTMConfig(embedding=8, hidden=8).build(num_outputs=2, vocabulary_size=30),
        lambda: encoder(TransformerConfig(hidden=16, layers=2, heads=2, lora=LoraConfig(rank=2))),
        lambda: encoder(TransformerConfig(hidden=16, layers=2, heads=2, freeze_layers=2)),
    ],
    ids=["bilstm", "lora", "frozen"],
)
def test_a_model_without_matrices_that_are_trained_is_refused(
    model: Callable[[], nn.Module],
) -> None:
    with refused("optim.name", "muon", "no whole matrices"):
        MUON.build(model())


def test_a_torch_without_muon_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(UserError, match=r"optim\.name: muon: torch .* has none"):
        MUON.build(encoder())


def test_no_other_optimizer_is_known() -> None:
    with pytest.raises(UserError, match=r"optim\.name: 'lion'"):
        OptimConfig(name="lion")  # a word that is none of the options
