"""Two ranks on recordings train as one rank with all rows: chunks in their lanes, whole recordings,
windows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from flatout import (
    CellsConfig,
    CheckpointConfig,
    OptimConfig,
    RNNConfig,
    SequenceDataConfig,
)
from flatout.data import SequenceData
from flatout.data.batches.flat_batch import cut_batch
from flatout.distributed.processes import warm_start
from flatout.tasks import SequenceRegressor
from tests.fitting import quiet_fit

CELLS = CellsConfig(cells=4, cycles=3, samples=60)
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "windows": {"lookback": 12, "stride": 9},
    "chunks": {"chunk": 20},
}


@pytest.fixture(scope="module", autouse=True)
def started() -> None:
    """What the ranks fork from."""
    warm_start()


def train(folder: Path, way: str, ranks: int, steps: int = -1, **settings: Any) -> Any:
    trainer = {"accelerator": "cpu", "devices": ranks, "max_steps": steps}
    return quiet_fit(
        SequenceDataConfig(sample=CELLS, batch_size=4 // ranks, **WAYS[way]),
        RNNConfig(hidden=8),
        output=str(folder),
        tune="off",
        threads=1,
        max_epochs=2,
        trainer=trainer,
        optim=OptimConfig(lr=0.01),
        checkpoint=CheckpointConfig(patience=None),
        **settings,
    )


@pytest.mark.soak(seconds=8)
@pytest.mark.parametrize("way", ["chunks", "whole", "windows"])
def test_two_ranks_train_as_one_does(tmp_path, way):
    one, two = (train(tmp_path / f"{ranks}", way, ranks) for ranks in (1, 2))
    assert two.summary["training"]["steps"] == one.summary["training"]["steps"] >= 4
    expected = one.predictor.model.state_dict()
    found = two.predictor.model.state_dict()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=0, msg=name)
    for name, value in one.metrics.items():
        assert two.metrics[name] == pytest.approx(value, abs=1e-5), name


@pytest.mark.soak(seconds=15)
def test_chunks_go_on_where_they_were_on_two_ranks_then_one_then_two(tmp_path):
    # a recording has three chunks, so both cut each lane's in two
    for steps, ranks in ((4, 2), (11, 1), (-1, 2)):
        found = train(tmp_path / "several", "chunks", ranks, steps, resume="auto")
        expected = train(tmp_path / "one", "chunks", 1, steps, resume="auto")
    assert found.summary["training"]["steps"] == expected.summary["training"]["steps"] == 18
    assert found.summary["training"]["resumed_from"] == 11
    weights = found.predictor.model.state_dict()
    for name, weight in expected.predictor.model.state_dict().items():
        torch.testing.assert_close(weights[name], weight, atol=1e-6, rtol=0, msg=name)


def test_hidden_states_of_all_ranks_go_on_where_fewer_ranks_do(tmp_path):
    data = SequenceData(sample=CELLS, batch_size=4, chunk=20)
    data.setup()
    task = SequenceRegressor(RNNConfig(hidden=8))
    task.build(data.info)
    task.trainer = L.Trainer(
        logger=False, enable_checkpointing=False, default_root_dir=tmp_path, barebones=True
    )
    first, second, *_ = data.train_dataloader()

    def answers(*of_ranks: dict[str, Any]) -> torch.Tensor:
        task.load_position_state(list(of_ranks), 0)
        task._begin(second, "train")
        return task.model(second)

    of_ranks = []
    for part in [first, *cut_batch(first, 2)]:
        task.load_position_state([{}], 0)
        task._begin(replace(part, cut_from=None), "train")
        task.model(part)
        of_ranks.append(task.position_state())
    whole, *halves = of_ranks
    assert len(halves) == 2
    assert (answers(whole) - answers({})).abs().max() > 1e-3
    torch.testing.assert_close(answers(*halves), answers(whole))
