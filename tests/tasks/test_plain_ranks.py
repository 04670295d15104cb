"""Two ranks of a plain `L.Trainer` and two ranks of the runner: the same losses, with accumulation
and clipping.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout import MonitorConfig, fit
from tests.params import at_once
from tests.started import free_port, said_by_all
from tests.tasks import plain_rank
from tests.tasks.plain_rank import ACCUMULATE, CLIP, EPOCHS, ROWS, LossFile, mean_losses
from tests.tasks.test_plain_trainer import OPTIM, parts
from tests.warm import begin_function


def train_plainly(folder: Path, kind: str) -> None:
    """Leave the losses of two plain ranks in a folder."""
    folder.mkdir()
    place = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    place |= {"FLATOUT_CACHE": str(folder / "cache"), "NODE_RANK": "0"}
    ranks = [
        begin_function(plain_rank.main, folder, kind, LOCAL_RANK=str(rank), **place)
        for rank in (0, 1)
    ]
    try:
        said = said_by_all(ranks, 240)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said


@pytest.mark.parametrize("kind", at_once(of=["bits", "text", "tags"], seconds=15))
def test_two_ranks_of_a_plain_trainer_and_of_the_runner_have_the_same_losses(tmp_path, kind):
    train_plainly(tmp_path / "plain", kind)
    data, task = parts(kind)
    data.config.batch_size = ROWS
    data.config.accumulate = ACCUMULATE
    settings: dict[str, Any] = {
        "precision": "fp32",
        "trainer": {"accelerator": "cpu", "devices": 2},
        "tune": "off",
    }
    settings |= {
        "monitor": MonitorConfig(progress=False, verdict=False),
        "optim": replace(OPTIM, clip=CLIP),
    }
    callbacks = {"losses": LossFile(tmp_path, kind)}
    fit(
        data,
        task,
        max_epochs=EPOCHS,
        folder=tmp_path / "run",
        threads=1,
        callbacks=callbacks,
        **settings,
    )
    expected = mean_losses(tmp_path / "plain", kind)
    assert len(expected) > 8
    assert mean_losses(tmp_path, kind) == pytest.approx(expected, abs=1e-6, rel=0)
