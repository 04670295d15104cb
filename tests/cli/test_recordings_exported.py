"""Networks of recordings in ONNX: they answer as predict does, sample by sample."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from flatout import (
    CheckpointConfig,
    MonitorConfig,
    OptimConfig,
    RNNConfig,
    SequenceDataConfig,
    fit,
)
from flatout.data.tables.formats.in_memory import table_of
from flatout.inference.folder_predictors import predictors_of_folder
from flatout.inference.recordings_onnx import stream_onnx
from flatout.inference.sequences import SequencePredictor
from flatout.run.kinds import load_predictor
from tests.cli.cells import SETTINGS, cells_of, train
from tests.params import at_once
from tests.refusals import require_printed
from tests.verbs import verb


@pytest.mark.soak(seconds=3)
@pytest.mark.filterwarnings("ignore")  # torch's exporter, of its own code
@pytest.mark.parametrize("kind", at_once("gru", of=SETTINGS, seconds=5))
def test_an_exported_network_answers_as_predict_does_sample_by_sample_and_several_rows_at_once(
    tmp_path, kind, capsys
):
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
    require_rows_at_once(tmp_path / "onnx")
    (form,) = predictors_of_folder(predictor, tmp_path / "onnx").values()
    of_file = form.predict([recording.values])[0]
    assert of_file.shape == whole.shape
    np.testing.assert_allclose(of_file, whole, atol=1e-5)


@pytest.mark.parametrize("kind", at_once("mlp", of=SETTINGS, seconds=5))
def test_exact_answers_to_recordings_are_the_usual_ones(tmp_path, kind):
    """Each recording is answered by itself either way."""
    folder = train(tmp_path / "runs", kind).folder
    recording = next(load_predictor(folder).read(table_of(cells_of("test"))))
    usual, exact = (
        load_predictor(folder, exact=is_exact).answer(recording.values)
        for is_exact in (False, True)
    )
    np.testing.assert_array_equal(exact, usual)


def require_rows_at_once(folder: Path) -> None:
    """Five rows at once have the answers of each alone."""
    from onnxruntime import InferenceSession

    session = InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    described = json.loads((folder / "signature.json").read_text())
    assert ("state" in described) == (len(described["inputs"]) > 1)
    random = np.random.default_rng(0)
    axes = {name: shape.index("rows") for name, shape in described["inputs"].items()}
    given = {}
    for name, shape in described["inputs"].items():
        sizes = list(shape)
        sizes[axes[name]] = 5
        given[name] = random.standard_normal(sizes).astype(np.float32)
    answers, *_ = session.run(None, given)
    for row in range(5):
        alone, *_ = session.run(
            None, {name: values.take([row], axes[name]) for name, values in given.items()}
        )
        np.testing.assert_allclose(alone[0], answers[row], rtol=1e-4, atol=1e-5)


@pytest.mark.soak(seconds=3)
@pytest.mark.filterwarnings("ignore")  # torch's exporter, of its own code
def test_columns_far_from_zero_are_exported_to_the_same_answers(tmp_path, capsys):
    place = np.arange(120)
    columns = {"pascal": 101_325.3 + np.sin(place / 7), "kelvin": 298.15 + 0.01 * np.cos(place / 9)}
    data = SequenceDataConfig(
        source=pa.table(columns), features=["pascal"], target="kelvin", batch_size=4
    )
    quick = {
        "max_epochs": 2,
        "precision": "fp32",
        "logger": "none",
        "output": str(tmp_path / "runs"),
    }
    result = fit(
        data, RNNConfig(hidden=8), monitor=MonitorConfig(progress=False, verdict=False), **quick
    )
    assert verb("export", result.folder, "--onnx", "--out", tmp_path / "onnx") == 0
    samples = columns["pascal"][:, None].astype(np.float32)
    whole = SequencePredictor.load(result.folder).answer(samples.astype(np.float64))
    streamed = stream_onnx(tmp_path / "onnx" / "model.onnx", samples)
    assert (
        np.abs(streamed - whole).max()
        < 2 * np.spacing(np.float32(298)) + 1e-5 * columns["kelvin"].std()
    )


def waves(first: int, runs: int) -> pa.Table:
    """Recordings of 15 to 24 samples whose wave is fast or slow."""
    parts = []
    for run in range(first, first + runs):
        place = np.arange(15 + run % 10)
        wave = np.sin(place * (1 + run % 2) / 2 + run)
        kind = "slow fast".split()[run % 2]
        speed = 1.0 + run % 2
        parts.append(
            pa.table(
                {
                    "run": [run] * len(place),
                    "a": wave,
                    "kind": [kind] * len(place),
                    "speed": speed + 0 * wave,
                }
            )
        )
    return pa.concat_tables(parts)


@pytest.mark.soak(seconds=3)
@pytest.mark.filterwarnings("ignore")  # torch's exporter, of its own code
@pytest.mark.parametrize("target", at_once("kind", of=["kind", "speed"], seconds=3))
def test_labels_are_evaluated_and_exported(tmp_path, target, capsys):
    pq.write_table(waves(0, 40), tmp_path / "waves.parquet")
    pq.write_table(waves(40, 20), tmp_path / "test.parquet")
    columns: dict[str, Any] = {
        "features": ["a"],
        "target": target,
        "group": ["run"],
        "problem": "label",
    }
    files = {"train": str(tmp_path / "waves.parquet"), "test": str(tmp_path / "test.parquet")}
    result = fit(
        SequenceDataConfig(**files, **columns, batch_size=8),
        RNNConfig(hidden=8),
        output=str(tmp_path / "runs"),
        max_epochs=2,
        precision="fp32",
        logger="none",
        optim=OptimConfig(lr=0.01),
        checkpoint=CheckpointConfig(patience=None),
        monitor=MonitorConfig(progress=False, verdict=False),
    )
    assert verb("evaluate", result.folder, tmp_path / "test.parquet", "--json") == 0
    printed = capsys.readouterr().out
    found = json.loads(printed[printed.index("{\n") :])
    metric = "accuracy" if target == "kind" else "rmse"
    assert found["rows"] == 20
    assert found[metric] == pytest.approx(result.metrics[f"test/{metric}"], rel=1e-4)
    ends = result.summary["intervals"][f"test/{metric}"]
    assert ends[0] < found[metric] < ends[1]
    assert found["intervals"][metric] == pytest.approx(ends, abs=0.1)
    recordings = list(result.predictor.read(table_of(waves(40, 20))))
    predictor = result.predictor
    if target == "kind":  # the run's temperature is in its answers, and in the file
        assert predictor.label_scale == (0.0, 1 / result.summary["calibration"]["temperature"])
        at_one = replace(predictor, label_scale=(0.0, 1.0)).answer(recordings[0].values)
        set_label_scale(result.folder, [0.0, 0.5])
        predictor = load_predictor(result.folder)
        found = np.sqrt(at_one) / np.sqrt(at_one).sum()
        np.testing.assert_allclose(predictor.answer(recordings[0].values), found, rtol=1e-5)
    assert verb("export", result.folder, "--onnx", "--out", tmp_path / "onnx") == 0
    assert len({len(each.values) for each in recordings}) == 10
    for recording in recordings[:3]:
        streamed = stream_onnx(tmp_path / "onnx" / "model.onnx", recording.values)
        np.testing.assert_allclose(streamed[-1], predictor.answer(recording.values), atol=1e-5)


def set_label_scale(run: Path, scale: list[float]) -> None:
    file = run / "model" / "config.json"
    settings = json.loads(file.read_text())
    settings["data"]["label_scale"] = scale
    file.write_text(json.dumps(settings))


def test_a_label_that_the_run_never_saw_is_named_and_both_directions_are_not_exported(
    tmp_path, capsys
):
    pq.write_table(waves(0, 20), tmp_path / "waves.parquet")
    result = fit(
        SequenceDataConfig(
            source=str(tmp_path / "waves.parquet"),
            features=["a"],
            target="kind",
            group=["run"],
            problem="label",
        ),
        RNNConfig(hidden=4, bidirectional=True),
        output=str(tmp_path / "runs"),
        max_epochs=1,
        precision="fp32",
        logger="none",
        monitor=MonitorConfig(progress=False, verdict=False),
    )
    table = waves(20, 1)
    odd = table.set_column(2, "kind", pa.array(["odd"] * table.num_rows))
    pq.write_table(odd, tmp_path / "odd.parquet")
    assert verb("evaluate", result.folder, tmp_path / "odd.parquet") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "run=20 is 'odd' (fast, slow)" in line
    assert verb("export", result.folder, "--onnx", "--out", tmp_path / "onnx") == 2
    (line,) = capsys.readouterr().err.splitlines()
    require_printed(line, "export: ", "bidirectional")
