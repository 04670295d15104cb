"""Recordings in a plain Trainer, in the fast loop and in a run: the same losses; exact resume;
errors in own units.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn

from flatout import (
    CellsConfig,
    MonitorConfig,
    OptimConfig,
    RNNConfig,
    SequenceDataConfig,
    UserError,
    fit,
)
from flatout.data import SequenceData
from flatout.data.batches.flat_batch import FlatBatch
from flatout.engine import FastLoop
from flatout.models.series import flatten, rectangle
from flatout.models.window_mlp import WindowMLPConfig
from flatout.tasks import SequenceLabeller, SequenceRegressionConfig, SequenceRegressor
from flatout.tasks.kept_answers import keep_answers
from flatout.tasks.sequence_baselines import judge_label_ridge
from flatout.tasks.sequence_scores import SequenceScores
from tests.params import at_once
from tests.run_files import read_csv
from tests.tasks.test_plain_trainer import Losses
from tests.trainers import flat_weights, quiet_trainer

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*TensorBoard support.*",
    "ignore:.*number of training batches.*",
    "ignore:You defined a `validation_step`",
)
CELLS = CellsConfig(cells=4, cycles=3, samples=60)
OPTIM = OptimConfig(lr=0.01)
RNN = RNNConfig(hidden=8)
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"batch_size": 4},
    "windows": {"lookback": 12, "stride": 5, "batch_size": 16},
    "chunks": {"chunk": 20, "batch_size": 4},
    "forecast": {
        "problem": "forecast",
        "lookback": 12,
        "horizon": 3,
        "stride": 5,
        "batch_size": 16,
    },
}


def train(
    way: str,
    folder: Path,
    *callbacks: L.Callback,
    model: Any = RNN,
    accumulate: int = 1,
    **settings: Any,
):
    """The loss of each step of two epochs, the weights, and the task."""
    L.seed_everything(3, verbose=False)
    data = SequenceData(sample=CELLS, seed=3, **{**WAYS[way], **settings})
    task = SequenceRegressor(model, optim=OPTIM)
    losses = Losses()
    clip: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": accumulate}
    trainer = quiet_trainer(folder, max_epochs=2, callbacks=[*callbacks, losses], **clip)
    trainer.fit(task, datamodule=data)
    return (
        losses.of_steps,
        flat_weights(task.model),
        task,
    )


@pytest.mark.parametrize("accumulate", [2, *at_once(of=[1], seconds=1)])
@pytest.mark.parametrize("way", list(WAYS))
def test_the_fast_loop_and_lightning_s_own_loop_give_the_same_losses_and_weights(
    tmp_path, way, accumulate
):
    plain, plain_weights, _ = train(way, tmp_path, accumulate=accumulate)
    fast, fast_weights, _ = train(way, tmp_path, FastLoop(), accumulate=accumulate)
    assert len(plain) >= 2
    assert fast == pytest.approx(plain, abs=1e-6)
    torch.testing.assert_close(fast_weights, plain_weights, atol=1e-6, rtol=0)


@pytest.mark.parametrize("samples", [30, 240])
def test_the_loss_of_shorter_and_longer_recordings_is_their_mean_squared_error(tmp_path, samples):
    data = SequenceData(
        train=recordings(tmp_path / "train", 60, 4),
        validation=recordings(tmp_path / "validation", samples, 2),
        features=["x"],
        target="y",
        batch_size=2,
    )
    task = SequenceRegressor(RNN, optim=OPTIM)
    (found,) = quiet_trainer(tmp_path, max_epochs=1).validate(task, datamodule=data, verbose=False)
    assert found["val/loss"] == pytest.approx(found["val/mse_scaled"], rel=1e-4)


def recordings(folder: Path, samples: int, count: int) -> str:
    folder.mkdir()
    for number in range(count):
        random = np.random.default_rng(samples + number)
        x = random.normal(size=samples)
        lines = [f"{each},{2 * each + random.normal()}" for each in x]
        (folder / f"{number}.csv").write_text("\n".join(["x,y", *lines]))
    return str(folder)


def test_fit_gives_the_losses_and_weights_of_a_plain_trainer(tmp_path):
    _, weights, _ = train("whole", tmp_path)
    data = SequenceDataConfig(sample=CELLS, **WAYS["whole"])
    quick = MonitorConfig(progress=False, verdict=False)
    settings: dict[str, Any] = {
        "precision": "fp32",
        "logger": "none",
        "monitor": quick,
        "folder": tmp_path / "run",
    }
    L.seed_everything(3, verbose=False)
    result = fit(data, RNN, optim=OPTIM, seed=3, max_epochs=2, **settings)
    last = flat_weights(result.predictor.model)
    torch.testing.assert_close(last, weights, atol=1e-6, rtol=0)
    assert set(result.metrics) >= {"val/rmse", "test/rmse", "test/max_error", "test/r2"}
    baseline = result.summary["baseline"]
    assert baseline["name"] == "ridge on 16 samples"
    assert "test/rmse of the ridge on the last sample" in baseline["metrics"]
    assert result.summary["data"]["sequences"]["floor"] == {"soc": 0.02}
    rows = read_csv(tmp_path / "run" / "recordings.csv")
    errors = [float(row["rmse"]) for row in rows]
    assert len(rows) == 6
    assert errors == sorted(errors, reverse=True)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(
        result.metrics["test/rmse"], rel=1e-4
    )
    (row,) = read_csv(tmp_path / "run" / "targets.csv")
    assert row["target"] == "soc"
    assert list(row)[1:] == ["rmse", "mae", "max_error", "r2"]
    assert float(row["mae"]) == pytest.approx(result.metrics["test/mae"], rel=1e-4)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("way", ["whole", "windows", "chunks"])
def test_a_batch_as_large_as_one_of_a_validation_is_trained(cell, way):
    data = SequenceData(sample=CELLS, **WAYS[way])
    data.setup()
    task = SequenceRegressor(RNNConfig(hidden=4, cell=cell))
    model = task.build(data.info)
    batch = next(iter(data.train_dataloader()))
    with torch.inference_mode():
        model.eval()
        task._split = "train"
        task.judge(batch)
    model.train()
    task._begin(batch, "train")
    task.loss(model(batch), batch).backward()
    assert all(weight.grad.abs().sum() > 0 for weight in model.parameters())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_chunks_with_a_carried_state_answer_as_whole_recordings_do(tmp_path, accumulate):
    _, _, task = train("chunks", tmp_path, accumulate=accumulate)
    found = []
    for way in ("whole", "chunks"):
        data = SequenceData(sample=CELLS, **WAYS[way])
        trainer = quiet_trainer(tmp_path)
        task.info = None
        data.setup()
        task.take_info(data.info)
        task.model.shape = data.info.shape
        trainer.validate(task, datamodule=data, verbose=False)
        found.append(dict(task.results))
    for name in ("rmse", "mae", "max_error", "r2"):
        assert found[0][name] == pytest.approx(found[1][name], abs=1e-6)


def test_metrics_are_in_the_unit_of_the_target_and_equal_those_of_numpy(tmp_path):
    *_, task = train("windows", tmp_path)
    data = SequenceData(sample=CELLS, **WAYS["windows"])
    trainer = quiet_trainer(tmp_path)
    trainer.test(task, datamodule=data, verbose=False)
    answers = trainer.predict(task, datamodule=data)
    values = torch.cat([each["values"] for each in answers])[
        torch.cat([each["rows"] for each in answers]).argsort()
    ]
    rows = data.info.rows_of("test")
    info = data.info
    ends = rows.offsets + rows.lengths - 1
    truths = (
        rows.values[ends, -1].astype(np.float64) * info.scaler.factor[-1] + info.scaler.shift[-1]
    )
    errors = values[:, 0].double().numpy() - truths
    assert 0.2 < truths.mean() < 1
    assert task.results["rmse"] == pytest.approx(np.sqrt((errors**2).mean()), rel=1e-5)
    assert task.results["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-5)
    assert task.results["max_error"] == pytest.approx(np.abs(errors).max(), rel=1e-5)
    assert task.results["r2"] == pytest.approx(
        1 - (errors**2).sum() / ((truths - truths.mean()) ** 2).sum(), rel=1e-4
    )


class OwnNetwork(nn.Module):
    """Answers each sample from its three features."""

    layout = "padded"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        return flatten(self.layer(rectangle(batch)[..., :3]), batch)


def test_a_network_of_the_user_s_own_is_trained_and_answers(tmp_path):
    data = SequenceData(sample=CELLS, **WAYS["whole"])
    trainer = quiet_trainer(tmp_path, max_epochs=15)
    task = SequenceRegressor(OwnNetwork(), optim=OptimConfig(lr=0.1))
    trainer.fit(task, datamodule=data)
    trainer.test(task, datamodule=data, verbose=False)
    ridge = task.baselines[1].metrics["test"]["rmse"]
    assert task.baselines[1].name == "ridge on the last sample"
    assert task.results["rmse"] < 2 * ridge
    quick: dict[str, Any] = {
        "logger": "none",
        "output": str(tmp_path / "runs"),
        "max_epochs": 1,
    }
    monitor = MonitorConfig(progress=False, verdict=False)
    result = fit(
        SequenceDataConfig(sample=CELLS, **WAYS["whole"]), OwnNetwork(), monitor=monitor, **quick
    )
    assert result.predictor.answer(np.zeros((5, 3))).shape == (5, 1)


def test_errors_of_a_forecast_stand_at_the_steps_of_its_horizon(tmp_path):
    *_, task = train("forecast", tmp_path)
    data = SequenceData(sample=CELLS, **WAYS["forecast"])
    quiet_trainer(tmp_path).test(task, datamodule=data, verbose=False)
    kept = keep_answers(task, data.test_dataloader(), "test")
    assert [place for place, _ in kept.by_time] == [
        1.0,
        2.0,
        3.0,
    ]
    assert kept.time_name == "sample of the horizon"
    whole = np.sqrt(np.mean([error**2 for _, error in kept.by_time]))
    assert whole == pytest.approx(task.results["rmse"], rel=1e-5)
    assert len(kept.series) == 4
    assert kept.of_targets == [{"target": "voltage", **task.scores.of_targets["voltage"]}]


def test_errors_of_several_targets_and_of_each_recording():
    scores = SequenceScores(2, ["a", "b"], [2.0, 10.0])
    scores.add(
        torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 0.0]]),
        torch.zeros(3, 2),
        torch.tensor([0, 0, 1]),
    )
    values = scores.values()
    assert values["rmse_a"] == pytest.approx(2 * (10 / 3) ** 0.5)
    assert values["rmse_b"] == pytest.approx(10 * (1 / 3) ** 0.5)
    assert values["rmse"] == pytest.approx((values["rmse_a"] + values["rmse_b"]) / 2)
    assert values["mse_scaled"] == pytest.approx(11 / 6)
    assert scores.by_recording()["max_error"].tolist() == [[2.0, 10.0], [6.0, 0.0]]
    assert scores.of_targets["a"]["mae"] == pytest.approx(2 * 4 / 3)
    assert scores.of_targets["b"]["max_error"] == 10


@pytest.mark.parametrize(
    "model",
    [
        RNNConfig(hidden=8, residual="ridge"),
        WindowMLPConfig(widths=[8], residual="ridge"),
    ],
)
@pytest.mark.parametrize("way", ["windows", "forecast"])
def test_a_network_beside_a_ridge_starts_at_its_answers(tmp_path, model, way):
    L.seed_everything(3, verbose=False)
    data = SequenceData(sample=CELLS, **WAYS[way])
    task = SequenceRegressor(model, optim=OPTIM)
    trainer = quiet_trainer(tmp_path, limit_train_batches=0, num_sanity_val_steps=0)
    trainer.fit(task, datamodule=data)
    trainer.validate(task, datamodule=data, verbose=False)
    assert task.baselines[0].name == "ridge on 12 samples"
    for name, value in task.baselines[0].metrics["val"].items():
        assert task.results[name] == pytest.approx(value, rel=1e-4), name


def test_a_forecast_that_answers_zero_repeats_the_last_value(tmp_path):
    task = SequenceRegressor(RNN, optim=OPTIM)
    data = SequenceData(sample=CELLS, **WAYS["forecast"])
    trainer = quiet_trainer(tmp_path, limit_train_batches=0, num_sanity_val_steps=0)
    trainer.fit(task, datamodule=data)
    trainer.validate(task, datamodule=data, verbose=False)
    last = next(each for each in task.baselines if each.name == "last value")
    assert task.results["rmse"] == pytest.approx(last.metrics["val"]["rmse"], rel=1e-5)


def rows_of_recordings(parts: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The recordings below each other; what is one value of a recording stands in each row."""
    blocks: dict[str, list[np.ndarray]] = {name: [] for name in parts[0]}
    for part in parts:
        for name, values in part.items():
            blocks[name].append(np.broadcast_to(values, len(part["a"])))
    return {name: np.concatenate(columns) for name, columns in blocks.items()}


def test_labels_of_recordings_are_learnt(tmp_path):
    place = np.arange(20)
    parts = [
        {
            "run": n,
            "a": np.sin(place * (1 + n % 2) + n),
            "kind": "ab"[n % 2],
        }
        for n in range(60)
    ]
    rows = rows_of_recordings(parts)
    data = SequenceData(
        source=rows, features=["a"], target="kind", group=["run"], problem="label", batch_size=8
    )
    task = SequenceLabeller(RNNConfig(hidden=8, bidirectional=True), optim=OptimConfig(lr=0.03))
    trainer = quiet_trainer(tmp_path, max_epochs=12)
    trainer.fit(task, datamodule=data)
    assert task.results["accuracy"] > 0.9


def test_noise_offsets_and_smoothing_change_the_inputs_of_training_alone(tmp_path):
    plain, *_ = train("chunks", tmp_path)
    for change in (
        {"noise": {"current": 1.0}},
        {"offset": {"current": 1.0}},
        {"low_pass": {"current": 0.9}},
    ):
        noisy, *_ = train("chunks", tmp_path, **change)
        assert noisy[0] != pytest.approx(plain[0], abs=1e-6)
    data = SequenceData(
        sample=CELLS, noise={"current": 1.0}, **WAYS["forecast"], features=["current"]
    )
    task = SequenceRegressor(RNN)
    data.setup()
    task.take_info(data.info)
    batch = next(iter(data.train_dataloader()))
    changed = task._augment(batch).tokens.view(-1, 15, 2) - batch.tokens.view(-1, 15, 2)
    assert changed[:, :12, 0].std() == pytest.approx(1 / data.info.scaler.factor[0], rel=0.2)
    assert not changed[:, 12:].any()
    assert not changed[..., 1].any()


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (RNNConfig(bidirectional=True), {}, "model.bidirectional: reads what comes later"),
        (
            RNNConfig(smoothing="ema"),
            {"lookback": 5},
            "model.smoothing: ema needs an answer at each time",
        ),
        (RNNConfig(residual="ridge"), {}, "model.residual: ridge reads windows. Set data.lookback"),
        (
            WindowMLPConfig(),
            {},
            "model: window_mlp reads windows. Set data.lookback, or model=rnn.",
        ),
        (WindowMLPConfig(shared=True), {"lookback": 5}, "model.shared: is for forecasts."),
    ],
)
def test_models_refuse_what_they_cannot_read(model, settings, message):
    data = SequenceData(sample=CELLS, **settings)
    data.setup()
    with pytest.raises(UserError) as caught:
        SequenceRegressor(model, SequenceRegressionConfig()).build(data.info)
    assert message in str(caught.value)


@pytest.mark.parametrize("target", ["kind", "size"])
def test_a_ridge_on_means_and_ends_stands_beside_labels(target):
    random = np.random.default_rng(0)
    parts = []
    for run in range(60):
        values = random.standard_normal(12 + run % 5) + run % 2
        parts.append(
            {
                "run": [run] * len(values),
                "a": values,
                "kind": [f"k{run % 2}"] * len(values),
                "size": values[-1] * 3 + 1,
            }
        )
    rows = rows_of_recordings(parts)
    data = SequenceData(source=rows, features=["a"], target=target, group=["run"], problem="label")
    data.setup()
    baseline = judge_label_ridge(data.info)
    assert baseline["name"] == "ridge on means and ends"
    if target == "kind":
        assert baseline["metrics"]["test/accuracy"] == 1.0
        assert 0.2 < baseline["metrics"]["test/accuracy of the commonest class"] < 0.8
    else:
        assert (
            baseline["metrics"]["test/rmse"]
            < 0.1
            < 1
            < baseline["metrics"]["test/rmse of the mean"]
        )
