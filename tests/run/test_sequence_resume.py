"""A run on recordings that was ended and resumed has the weights of one that was not,
bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flatout import (
    CellsConfig,
    CheckpointConfig,
    OptimConfig,
    RNNConfig,
    SequenceDataConfig,
    fit,
)
from flatout.errors import UserError
from tests.composed import only_folder
from tests.faults.plants import Planted, RaiseAt
from tests.fitting import quiet_fit
from tests.params import at_once

CELLS = CellsConfig(cells=4, cycles=3, samples=60)


def train(folder: Path, way: dict[str, Any], callbacks: dict[str, Any] | None = None) -> Any:
    data = SequenceDataConfig(sample=CELLS, noise={"current": 0.1}, batch_size=4, **way)
    return quiet_fit(
        data,
        RNNConfig(hidden=8, dropout=0.2),
        output=str(folder),
        resume="auto",
        max_epochs=3,
        optim=OptimConfig(lr=0.01),
        checkpoint=CheckpointConfig(patience=None, every_steps=3),
        callbacks=callbacks or {},
    )


@pytest.mark.parametrize(
    "way", [{"chunk": 20}, *at_once(of=[{"lookback": 12, "stride": 9}], seconds=3)]
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, way):
    whole = train(tmp_path / "whole", way)
    with pytest.raises(Planted):
        train(tmp_path / "cut", way, {"plant": RaiseAt(place="on_train_batch_end", step=8)})
    resumed = train(tmp_path / "cut", way)
    assert resumed.summary["training"]["resumed_from"] == 8
    assert resumed.summary["training"]["steps"] == whole.summary["training"]["steps"] > 12
    expected = whole.predictor.model.state_dict()
    found = resumed.predictor.model.state_dict()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    assert resumed.metrics == whole.metrics


def test_another_lookback_is_no_resume(tmp_path):
    with pytest.raises(Planted):
        train(
            tmp_path,
            {"lookback": 12, "stride": 9},
            {"plant": RaiseAt(place="on_train_batch_end", step=8)},
        )
    folder = only_folder(tmp_path / "default")
    data = SequenceDataConfig(
        sample=CELLS, noise={"current": 0.1}, batch_size=4, lookback=13, stride=9
    )
    with pytest.raises(UserError, match="lookback was 12 and is 13"):
        fit(
            data,
            RNNConfig(hidden=8, dropout=0.2),
            resume=str(folder),
            output=str(tmp_path),
            precision="fp32",
        )
