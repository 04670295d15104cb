"""Runs whose ranks hold slices of the weights are the runs of one process, also where they are cut
short.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
import torch

from flatout import OptimConfig, TextDataConfig, TransformerConfig, UserError, fit
from flatout.data.problem import Problem
from tests.distributed.test_processes import (
    CASES,
    ENCODER,
    SEVERAL,
    losses,
    texts,
    train_on_devices,
)
from tests.faults.plants import KillAt, SignalAt
from tests.faults.ranks import alike
from tests.faults.runs import Spec, attempt, differences, run_folder, said
from tests.params import at_once
from tests.run_files import model_weights

TOGETHER = {"devices": 2, "strategy": "fsdp"}
THAWING = replace(ENCODER, freeze_layers=2, unfreeze_epochs=1.0)
RUNS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "thawing layers, a running mean and batches that are added up": (
        texts(batch_size=16, accumulate=2),
        THAWING,
        {"optim": OptimConfig(lr=3e-3, ema=0.9)},
    ),
    "several labels, with one row for the last step of two ranks": (
        TextDataConfig(train=SEVERAL, problem=Problem.multi, batch_size=32, eval_batch_size=8),
        ENCODER,
        {},
    ),
    "tags in bf16": (CASES["tags"][0], ENCODER, {"precision": "bf16"}),
    "a model without layers of its own": CASES["padded batches of like length"],
}


@pytest.mark.parametrize("name", at_once(next(iter(RUNS)), of=RUNS, seconds=15))
def test_two_ranks_with_slices_train_like_one_process_with_all(name, tmp_path):
    data, model, settings = RUNS[name]
    rows = data.batch_size
    try:
        one = train_on_devices(tmp_path, data, model, 1, **settings)
        data.batch_size = rows // 2
        two = train_on_devices(tmp_path, data, model, 2, strategy="fsdp", **settings)
    finally:
        data.batch_size = rows
    close = 1e-5 if settings.get("precision") != "bf16" else 2e-3
    assert len(losses(one.folder)) == len(losses(two.folder)) > 8
    assert losses(two.folder) == pytest.approx(losses(one.folder), rel=close)
    assert two.metrics == pytest.approx(one.metrics, rel=close)
    assert two.summary["model"] == one.summary["model"]
    assert "1/2 on each device" in [choice["value"] for choice in two.summary["choices"]]
    whole = model_weights(one.folder)
    shared = model_weights(two.folder)
    assert whole.keys() == shared.keys()
    assert all(
        torch.allclose(shared[name], weight, atol=100 * close) for name, weight in whole.items()
    )


@pytest.mark.soak(seconds=15)
def test_killed_and_taken_up_again_the_same_bytes_come_out(tmp_path):
    spec = Spec("encoder", batch_size=6, trainer={**TOGETHER, "max_epochs": 1})
    assert attempt(spec, tmp_path / "whole") == 0, said(tmp_path / "whole")
    killed = spec.planted(KillAt, place="on_train_batch_end", step=7, rank=1)
    assert attempt(killed, tmp_path / "killed") == 1
    assert "rank 1 of 2 was ended by SIGKILL" in said(tmp_path / "killed")
    assert attempt(spec, tmp_path / "killed") == 0, said(tmp_path / "killed")
    assert not differences(run_folder(tmp_path / "killed"), run_folder(tmp_path / "whole"))


@pytest.mark.soak(seconds=30)
def test_a_run_goes_on_with_slices_and_with_whole_weights_in_turn(tmp_path):
    alone = Spec("encoder", dropout=0.0, batch_size=12, optim={"ema": 0.9})
    together = replace(alone, batch_size=6, trainer=TOGETHER)
    assert attempt(alone, tmp_path / "whole") == 0, said(tmp_path / "whole")
    for spec, step in (
        (together, 6),
        (alone, 12),
        (replace(together, trainer={"devices": 2}), 18),
    ):
        stopped = spec.planted(
            SignalAt, place="on_train_batch_end", step=step, number=signal.SIGTERM
        )
        assert attempt(stopped, tmp_path / "turns") == 128 + signal.SIGTERM, said(
            tmp_path / "turns"
        )
    assert attempt(together, tmp_path / "turns") == 0, said(tmp_path / "turns")
    assert not alike(run_folder(tmp_path / "turns"), run_folder(tmp_path / "whole"))


def test_what_cannot_be_shared_out_is_refused_before_anything_starts(tmp_path):
    refused = {
        "a single device has no other to share weights with": {"trainer": {"strategy": "fsdp"}},
        "its scaler needs whole gradients": {"trainer": TOGETHER, "precision": "fp16"},
        "needs tune=off": {"trainer": TOGETHER, "tune": "auto"},
        "does not work with compile=true": {"trainer": TOGETHER, "compile": True},
        "Did you mean 'fsdp'": {"trainer": {"devices": 2, "strategy": "fsp"}},
    }
    for words, settings in refused.items():
        with pytest.raises(UserError, match=words) as caught:
            fit(texts(), TransformerConfig(hidden=32), folder=tmp_path / "run", **settings)
        assert str(caught.value).startswith("trainer.strategy: fs")
