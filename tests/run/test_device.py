"""Where a module is after each stage: Lightning takes it to the host when a stage ends."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest

from flatout import CellsConfig, MonitorConfig, OptimConfig, RNNConfig, SequenceDataConfig, fit
from flatout.perf.verdict.experiments import alone_ms
from flatout.run import closing
from flatout.run.context import OurParts


@pytest.fixture
def host_of_doubles(monkeypatch) -> None:
    """A host whose weights no batch fits: they are doubles there, and floats on the device, as they
    were.
    """
    move = L.LightningModule.to
    monkeypatch.setattr(L.LightningModule, "cpu", lambda module: module.double())

    def to(module: L.LightningModule, *place: Any, **words: Any) -> Any:
        return move(module.float(), *place, **words)

    monkeypatch.setattr(L.LightningModule, "to", to)


def test_answers_are_kept_and_other_ways_are_tried_on_the_device_of_the_run(
    tmp_path, monkeypatch, host_of_doubles
):
    alone: list[float] = []

    def judge_alone(ours: OurParts, *rest: Any) -> None:
        alone.append(alone_ms(ours.task, ours.feeds, 0.1))

    # which tries nothing where the machine is busy
    monkeypatch.setattr(closing, "judge", judge_alone)
    data = SequenceDataConfig(
        sample=CellsConfig(cells=4, cycles=3, samples=60), lookback=12, stride=3, batch_size=4
    )
    fit(
        data,
        RNNConfig(hidden=8, dropout=0.0),
        folder=tmp_path,
        precision="fp32",
        logger="none",
        max_epochs=2,
        optim=OptimConfig(lr=0.01),
        monitor=MonitorConfig(progress=False),
    )
    assert (tmp_path / "recordings.csv").exists()
    assert alone[0] > 0
