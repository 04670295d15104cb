"""Runs on recordings from the command line: train, predict a folder, export to ONNX, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flatout import CellsConfig, CheckpointConfig, MonitorConfig, OptimConfig, RNNConfig, SequenceDataConfig, fit
from flatout.cli.export_sequences import stream_onnx
from flatout.data.samples.cells import CellsTable
from flatout.data.tables.formats.in_memory import table_of
from flatout.inference.load import load_predictor
from flatout.inference.sequences import SequencePredictor
from flatout.models.window_mlp import WindowMLPConfig
from tests.composed import run_train
from tests.verbs import verb

CELLS = CellsConfig(cells=4, cycles=2, samples=50)
SETTINGS = {
    "chunk": ({"chunk": 20}, RNNConfig(hidden=8, layers=2, smoothing="ema")),
    "gru": ({"cumulate": ["current"]}, RNNConfig(hidden=8, cell="gru")),
    "window": ({"lookback": 12, "stride": 5}, RNNConfig(hidden=8, residual="ridge")),
    "mlp": ({"lookback": 12, "stride": 5}, WindowMLPConfig(widths=[8])),
    "forecast": (
        {"problem": "forecast", "target": ["voltage", "soc"], "lookback": 12, "horizon": 3},
        WindowMLPConfig(widths=[8], shared=True),
    ),
}


def train(folder: Path, kind: str) -> Any:
    way, model = SETTINGS[kind]
    return fit(
        SequenceDataConfig(sample=CELLS, batch_size=8, **way),
        model,
        output=str(folder),
        max_epochs=2,
        precision="fp32",
        logger="none",
        optim=OptimConfig(lr=0.01),
        checkpoint=CheckpointConfig(patience=None),
        monitor=MonitorConfig(progress=False, verdict=False),
    )


def cells_of(split: str) -> pa.Table:
    table = CellsTable(CELLS, split)
    return pa.Table.from_batches(list(table.blocks(table.columns)))


def write_cells(folder: Path) -> Path:
    folder.mkdir()
    rows = cells_of("test")
    for number, cell in enumerate(sorted(set(rows["cell"].to_pylist()))):
        pq.write_table(rows.filter(pa.compute.equal(rows["cell"], cell)), folder / f"{number}.parquet")
    return folder


@pytest.mark.parametrize("kind", list(SETTINGS))
def test_a_saved_run_answers_a_folder_as_its_task_answers_the_test_rows(tmp_path, kind):
    result = train(tmp_path / "runs", kind)
    out = tmp_path / "answers.parquet"
    assert verb("predict", result.folder, write_cells(tmp_path / "cells"), "--out", out) == 0
    answers = pq.read_table(out)
    truth = cells_of("test")
    if kind == "forecast":
        assert answers.column_names == ["recording", "time_s", "voltage", "soc"]
        assert answers.num_rows == 3 * 4
        assert answers["time_s"].to_pylist()[:3] == [500.0, 510.0, 520.0]
        return
    assert answers.column_names == ["recording", "time_s", "soc"]
    assert answers["time_s"].to_pylist() == truth["time_s"].to_pylist()
    errors = np.array(answers["soc"]) - np.array(truth["soc"])
    assert np.sqrt((errors**2).mean()) == pytest.approx(result.metrics["test/rmse"], rel=1e-4)


@pytest.mark.filterwarnings("ignore")  # torch's exporter, of its own code
@pytest.mark.parametrize("kind", list(SETTINGS))
def test_an_exported_network_fed_sample_by_sample_answers_as_predict_does(tmp_path, kind, capsys):
    result = train(tmp_path / "runs", kind)
    assert verb("export", result.folder, "--onnx", "--out", tmp_path / "onnx") == 0
    assert "largest difference from the run's own answers" in capsys.readouterr().out
    predictor = load_predictor(result.folder)
    assert isinstance(predictor, SequencePredictor)
    recording = next(predictor.read(table_of(cells_of("test"))))
    found = stream_onnx(tmp_path / "onnx" / "model.onnx", recording.values)
    whole = predictor.answer(recording.values)
    assert len(found) in (50, 1, 3)
    np.testing.assert_allclose(found, whole[-len(found) :], atol=1e-5)


def test_blocks_of_a_stream_answer_as_the_whole_recording_does(tmp_path, monkeypatch):
    result = train(tmp_path / "runs", "chunk")
    predictor = result.predictor
    values = next(predictor.read(table_of(cells_of("test")))).values
    whole = predictor.answer(values)
    monkeypatch.setattr("flatout.inference.sequences._SAMPLES_A_BLOCK", 7)
    assert len(list(predictor.stream(values))) == 8
    np.testing.assert_allclose(predictor.answer(values), whole, atol=1e-5)


def test_evaluate_gives_the_errors_of_the_test_recordings(tmp_path, capsys):
    result = train(tmp_path / "runs", "gru")
    pq.write_table(cells_of("test"), tmp_path / "cells.parquet")
    assert verb("evaluate", result.folder, tmp_path / "cells.parquet", "--json") == 0
    printed = capsys.readouterr().out
    found = json.loads(printed[printed.rindex("{\n") :])
    assert found["rmse"] == pytest.approx(result.metrics["test/rmse"], rel=1e-4)


def test_another_sampling_rate_is_refused(tmp_path, capsys):
    result = train(tmp_path / "runs", "gru")
    rows = cells_of("test")
    slow = rows.set_column(2, "time_s", pa.array(np.array(rows["time_s"]) * 2))
    pq.write_table(slow, tmp_path / "slow.parquet")
    assert verb("predict", result.folder, tmp_path / "slow.parquet") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has a sample every 20 s, the training recordings every 10 s. Resample it" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model=bilstm", "model: bilstm does not fit sequences. Set model=rnn or model=window_mlp"),
        ("task=classification", "task: classification with data.problem=estimate. Set task=sequence."),
        ("data.lookback=0", "data.lookback: 0 (1 or more)"),
        ("data.target=voltage", "data.features: 'voltage' is the target"),
        ("model.hiden=3", "model.hiden: no such key"),
    ],
)
def test_a_setting_that_does_not_fit_is_one_message(words, message, tmp_path, monkeypatch, capsys):
    settings = ["data=cells", "model=rnn", "task=sequence", "data.features=[voltage,current]"]
    assert run_train([*settings, *words.split(), f"output={tmp_path}"], monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_model_of_sequences_does_not_fit_texts(tmp_path, monkeypatch, capsys):
    assert run_train(["model=rnn", f"output={tmp_path}"], monkeypatch) == 2
    assert "model: rnn does not fit texts." in capsys.readouterr().err
