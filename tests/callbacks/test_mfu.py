"""MFU: operations of the rows that were trained, over what the devices could have done in that
time.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from flatout.callbacks.gpu import CURVES
from flatout.callbacks.hardware_monitor import HardwareMonitor
from flatout.callbacks.loggers import RunLoggers, RunPlace, TensorBoardConfig
from flatout.callbacks.run_curves import MetricsFile, RunCurves
from flatout.callbacks.throughput import Throughput, Volume
from flatout.data.batches.feed import Feed
from flatout.data.batches.plan import BatchLayout, PlanSettings
from flatout.data.problem import Problem
from flatout.engine.fast_loop import FastLoop
from flatout.engine.optimizer import OptimConfig
from flatout.engine.peaks import Peak
from flatout.models.textcnn import TextCNNConfig
from flatout.tasks.classification import ClassificationConfig, Classifier, Labels
from tests.trainers import KeptFlushes, quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
LENGTHS = [3, 5, 2, 7, 4, 4, 1, 6, 2, 3, 5]


def train_with_peak(
    make_split, folder: Path, model: nn.Module, *, peak: Peak | None, **settings
) -> tuple[Throughput, KeptFlushes]:
    labels = Labels(Problem.single, ["a", "b", "c"], [5, 3, 3], 11, mean=0.0, spread=1.0)
    optim = OptimConfig(lr=0.01)
    task = Classifier(model, ClassificationConfig(), optim, labels=labels, total_steps=6)
    feed = Feed(make_split(LENGTHS), PlanSettings(rows_per_batch=4, layout=BatchLayout.padded))
    keep = KeptFlushes()
    throughput = Throughput(peak=peak)
    curves = RunCurves([keep], 2, throughput=throughput, **settings)
    trainer = quiet_trainer(folder, max_epochs=2, callbacks=[FastLoop(), curves])
    trainer.fit(task, train_dataloaders=feed)
    return throughput, keep


def small() -> nn.Module:
    return TextCNNConfig(embedding=6, filters=4).build(num_outputs=3, vocabulary_size=50)


def test_the_operations_of_a_run_are_those_of_its_rows_at_their_own_lengths(make_split, tmp_path):
    model = small()
    throughput, keep = train_with_peak(make_split, tmp_path, model, peak=Peak(0.5, "made up"))
    # two epochs
    assert throughput.volume.total.flops == pytest.approx(
        2 * model.training_flops(np.array(LENGTHS))
    )
    assert (
        throughput.volume.total.computed > throughput.volume.total.tokens
    )  # of which padding had a part, in operations it has none
    assert throughput.mfu(throughput.volume.total) == pytest.approx(
        throughput.volume.total.flops / throughput.volume.total.seconds / 0.5e12
    )
    assert all(values["speed/mfu"] > 0 for values in keep.flushes)


def test_several_devices_could_do_several_times_as_much():
    throughput = Throughput(peak=Peak(100.0, "made up"))
    throughput._world = 4
    assert throughput.mfu(Volume(flops=2e14, seconds=2.0)) == pytest.approx(0.25)


@pytest.mark.parametrize("peak", [None, Peak(0.5, "made up")])
def test_a_model_of_ones_own_without_a_formula_has_no_mfu_and_says_nothing(
    make_split, tmp_path, peak
):
    class Own(nn.Module):
        layout = "padded"

        def __init__(self) -> None:
            super().__init__()
            self.inner = small()

        def forward(self, batch):
            return self.inner(batch)

    throughput, keep = train_with_peak(make_split, tmp_path, Own(), peak=peak)
    assert throughput.volume.total.flops == 0
    assert throughput.mfu(throughput.volume.total) is None
    assert not any("speed/mfu" in values for values in keep.flushes)


def test_without_a_known_peak_there_is_no_curve_but_operations_are_counted(make_split, tmp_path):
    throughput, keep = train_with_peak(make_split, tmp_path, small(), peak=None)
    assert throughput.volume.total.flops > 0
    assert not any("speed/mfu" in values for values in keep.flushes)


def test_samples_of_the_hardware_go_to_all_listeners(make_split, tmp_path):
    class Card:
        name = "gpu"

        def sample(self) -> dict[str, float]:
            return {"gpu/power_w": 61.0}

        def facts(self) -> dict[str, object]:
            return {}

    monitor = HardwareMonitor(sources=[Card()], every_s=3600)
    monitor.watch.look()
    _, keep = train_with_peak(make_split, tmp_path, small(), peak=None, monitor=monitor)
    assert [values.get("gpu/power_w") for values in keep.flushes] == [61.0] + [None] * (
        len(keep.flushes) - 1
    )
    board = TensorBoardConfig().build(RunPlace(tmp_path, "made up"))
    with RunLoggers({"tensorboard": board}) as loggers:
        file = MetricsFile(tmp_path / "metrics.csv", [])
        for listener in (file, loggers):
            listener.on_flush(1, 0.1, keep.flushes[0])
    file.close()
    head, row = (tmp_path / "metrics.csv").read_text().splitlines()
    assert dict(zip(head.split(","), row.split(","), strict=True))["gpu/power_w"] == "61"
    assert set(CURVES) < set(head.split(","))
    assert any(b"gpu/power_w" in path.read_bytes() for path in tmp_path.glob("events.*"))


@pytest.mark.xdist_group("timing")
def test_counting_costs_a_flush_little_and_a_step_next_to_nothing():
    model = small()
    lengths = [torch.randint(1, 60, (512,)) for _ in range(50)]
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        model.training_flops(torch.cat(lengths).numpy())
        taken.append(time.perf_counter() - started)
    assert min(taken) < 0.005
