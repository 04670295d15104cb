"""Filled and resampled recordings: no input and no truth holds what came later, and no repeated
value is a truth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import torch

from flatout import CheckpointConfig, MonitorConfig, RNNConfig, SequenceDataConfig, fit
from flatout.data import SequenceData
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.sequences.columns import RecordingRules
from flatout.data.sequences.missing import Missing
from flatout.data.sequences.recording import Recording
from flatout.data.sequences.recordings import ReadingNotes, read_recordings
from flatout.data.tables.formats.in_memory import table_of
from flatout.models.window_mlp import WindowMLPConfig
from flatout.tasks import SequenceRegressor
from flatout.tasks.sequence_baselines import build_baselines
from tests.verbs import verb

FORECAST: dict[str, Any] = {
    "problem": "forecast",
    "target": "y",
    "time": "t",
    "lookback": 8,
    "horizon": 2,
}


def noise(samples: int = 4000, *, missing: float = 0.0, apart: float = 1.0) -> pa.Table:
    """White noise, of which nothing can be forecast; some of it missing, or a sample every so many
    seconds.
    """
    random = np.random.default_rng(3)
    values = random.standard_normal(samples)
    values[random.random(samples) < missing] = np.nan
    return pa.table({"t": np.arange(samples) * apart, "y": values})


WAYS = {
    "filled": (noise(missing=0.4), {"missing": "fill"}),
    "a step of half the samples' own": (noise(apart=2.0), {"step": 1.0}),
    "a step that is no part of the samples' own": (noise(apart=1.0), {"step": 0.7}),
    "filled and resampled": (noise(missing=0.3, apart=1.5), {"missing": "fill", "step": 1.0}),
}


def open_data(table: pa.Table, **settings: Any) -> SequenceData:
    data = SequenceData(source=table, **{**FORECAST, **settings})
    data.setup()
    return data


@pytest.mark.parametrize("way", WAYS)
def test_nothing_forecasts_white_noise_that_was_filled_or_resampled(way):
    table, settings = WAYS[way]
    ridge, last_value = build_baselines(open_data(table, **settings).info)
    assert ridge.metrics["test"]["r2"] <= 0.02
    assert last_value.metrics["test"]["r2"] <= 0.02
    assert ridge.metrics["test"]["rmse"] > 0.9


def test_a_network_does_not_forecast_white_noise_and_evaluate_says_so_too(tmp_path, capsys):
    table, settings = WAYS["filled"]
    result = fit(
        SequenceDataConfig(source=table, **FORECAST, **settings),
        WindowMLPConfig(widths=[8]),
        output=str(tmp_path),
        max_epochs=1,
        precision="fp32",
        logger="none",
        checkpoint=CheckpointConfig(patience=None),
        monitor=MonitorConfig(progress=False, verdict=False),
    )
    assert result.metrics["test/r2"] <= 0.02
    assert result.metrics["test/loss"] == pytest.approx(result.metrics["test/mse_scaled"], rel=0.05)
    pa.csv.write_csv(table, tmp_path / "whole.csv")
    capsys.readouterr()
    assert verb("evaluate", result.folder, tmp_path / "whole.csv") == 0
    printed = capsys.readouterr().out
    r2 = next(float(line.split()[1]) for line in printed.splitlines() if line.split()[:1] == ["r2"])
    assert r2 <= 0.02


def irregular(samples: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    times = np.cumsum(random.choice([0.3, 1.0, 2.0, 5.0], samples))
    columns = {name: random.standard_normal(samples) for name in ("a", "y")}
    for values in columns.values():
        values[random.random(samples) < 0.3] = np.nan
    return {"t": times, **columns}


def read(columns: dict[str, np.ndarray], rules: RecordingRules) -> Recording:
    (recording,) = read_recordings(table_of(pa.table(columns), where="test"), rules, ReadingNotes())
    return recording


@pytest.mark.parametrize("step", [None, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("problem", ["forecast", "estimate"])
def test_what_comes_later_changes_no_input_and_no_truth_before_it(step, problem):
    settings: dict[str, Any] = {"problem": problem, "lookback": 4}
    config = SequenceDataConfig(
        source="cells",
        features=["a"],
        target="y",
        time="t",
        step=step,
        missing="fill",
        cumulate=["a"],
        **settings,
    )
    rules = RecordingRules.of(config)
    for seed in range(20):
        random = np.random.default_rng(seed)
        before = irregular(60, seed)
        at = int(random.integers(10, 50))
        after = {name: values.copy() for name, values in before.items()}
        for name, values in irregular(60, seed + 100).items():
            after[name][at + 1 :] = values[at + 1 :] + (before["t"][-1] if name == "t" else 0)
        one = read(before, rules)
        other = read(after, rules)
        known = int((one.times <= before["t"][at]).sum())
        assert known >= 2
        np.testing.assert_array_equal(one.times[:known], other.times[:known])
        np.testing.assert_array_equal(one.values[:known], other.values[:known])
        assert one.measured is not None
        assert other.measured is not None
        np.testing.assert_array_equal(one.measured[:known], other.measured[:known])


def test_a_missing_value_is_the_one_before_and_rows_before_the_first_value_are_left_out():
    table = pa.table({"a": [np.nan, 1.0, np.nan, np.nan, 4.0], "y": [1.0, 2.0, 3.0, np.nan, 5.0]})
    rules = RecordingRules(
        columns=["a", "y"], time=None, group=[], max_gap=None, missing=Missing.fill, past_only=True
    )
    notes = ReadingNotes()
    (recording,) = read_recordings(table_of(table, where="test"), rules, notes)
    np.testing.assert_array_equal(recording.values, [[1, 2], [1, 3], [1, 3], [4, 5]])
    assert recording.measured is not None
    assert recording.measured.tolist() == [
        [True, True],
        [False, True],
        [False, False],
        [True, True],
    ]
    assert "1 first row without a, y dropped: no value before" in "\n".join(notes.lines())


@pytest.mark.parametrize("offset", [0.0, 1.7e9], ids=["from zero", "since 1970"])
def test_a_sample_that_stands_at_a_time_of_the_grid_is_read_there_in_spite_of_rounding(offset):
    times = offset + np.round(np.arange(1000) * 0.1, 6)
    rules = RecordingRules(
        columns=["y"],
        time="t",
        group=[],
        step=0.1,
        max_gap=None,
        missing=Missing.refuse,
        past_only=True,
    )
    recording = read({"t": times, "y": np.arange(1000.0)}, rules)
    np.testing.assert_array_equal(recording.values[:, 0], np.arange(len(recording.values)))
    assert recording.measured is None


ESTIMATE: dict[str, Any] = {"features": ["a"], "target": "y", "time": "t"}


@pytest.mark.parametrize("way", [FORECAST, ESTIMATE, {**ESTIMATE, "lookback": 4}])
def test_a_repeated_target_is_in_no_loss_and_in_no_score(tmp_path, way):
    table = noise(600, missing=0.3).append_column("a", pa.array(np.sin(np.arange(600.0))))
    data = SequenceData(source=table, missing="fill", split_by="time", batch_size=16, **way)
    task = SequenceRegressor(
        WindowMLPConfig(widths=[4]) if "lookback" in way else RNNConfig(hidden=4)
    )
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
        max_epochs=1,
    )
    (found,) = trainer.validate(task, datamodule=data, verbose=False)
    assert found["val/loss"] == pytest.approx(found["val/mse_scaled"], rel=1e-4)
    shape = task.shape
    batch = next(iter(data.feeds.train.all_rows()))
    changed = batch.tokens.clone()
    is_truth = torch.ones(len(changed), dtype=torch.bool)
    if shape.horizon:  # before it stand inputs, which may repeat a value
        is_truth = torch.arange(len(changed)) % (shape.lookback + shape.horizon) >= shape.lookback
    is_repeat = is_truth & (batch.targets[:, 0] == 0)
    assert 0 < is_repeat.sum() < is_truth.sum()
    changed[is_repeat, -1] += 100.0
    measured = changed.clone()
    measured[is_truth & ~is_repeat, -1] += 100.0
    loss, same, other = (
        float(loss_of(task, batch, tokens)) for tokens in (batch.tokens, changed, measured)
    )
    assert loss == same
    assert other > 10 * loss


def loss_of(task: SequenceRegressor, batch: FlatBatch, tokens: torch.Tensor) -> torch.Tensor:
    part = replace(batch, tokens=tokens)
    return task.loss(task.model(part), part).detach()


def test_labels_are_filled_linearly_since_they_are_answered_after_the_whole_recording():
    config = SequenceDataConfig(
        source="cells",
        features=["a"],
        target="y",
        time="t",
        problem="label",
        missing="fill",
        step=1.0,
    )
    rules = replace(RecordingRules.of(config), label=None)
    recording = read(
        {"t": np.array([0.0, 2.0, 3.0, 4.0]), "a": np.array([0.0, 2.0, np.nan, 6.0])}, rules
    )
    np.testing.assert_allclose(recording.values[:, 0], [0, 1, 2, 4, 6])
    assert not rules.carries_forward
