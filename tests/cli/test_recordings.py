"""Runs on recordings from the command line: train, predict a folder, export to ONNX, and what is
refused.
"""

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
    CellsConfig,
    CheckpointConfig,
    MonitorConfig,
    OptimConfig,
    RNNConfig,
    SequenceDataConfig,
    fit,
)
from flatout.data.samples.cells import CellsTable
from flatout.data.tables.formats.in_memory import table_of
from flatout.inference.export import stream_onnx
from flatout.inference.forms import exported
from flatout.inference.sequences import SequencePredictor
from flatout.models.window_mlp import WindowMLPConfig
from flatout.run.kinds import load_predictor
from tests.composed import run_train
from tests.data.whole_tables import whole_table
from tests.fitting import quiet_fit
from tests.params import at_once
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
    return quiet_fit(
        SequenceDataConfig(sample=CELLS, batch_size=8, **way),
        model,
        output=str(folder),
        max_epochs=2,
        optim=OptimConfig(lr=0.01),
        checkpoint=CheckpointConfig(patience=None),
    )


def cells_of(split: str) -> pa.Table:
    table = CellsTable(CELLS, split)
    return whole_table(table)


def write_cells(folder: Path) -> Path:
    folder.mkdir()
    rows = cells_of("test")
    for number, cell in enumerate(sorted(set(rows["cell"].to_pylist()))):
        pq.write_table(
            rows.filter(pa.compute.equal(rows["cell"], cell)), folder / f"{number}.parquet"
        )
    return folder


@pytest.mark.parametrize("kind", at_once(*list(SETTINGS)[:2], of=SETTINGS, seconds=1))
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


def test_a_file_without_the_columns_of_groups_is_one_recording(tmp_path):
    result = train(tmp_path / "runs", "gru")
    rows = cells_of("test")
    first = rows.filter(
        pa.compute.and_(
            *(pa.compute.equal(rows[name], rows[name][0]) for name in ("cell", "cycle"))
        )
    )
    pq.write_table(first, tmp_path / "grouped.parquet")
    pq.write_table(first.drop_columns(["cell", "cycle"]), tmp_path / "alone.parquet")
    for name in ("grouped", "alone"):
        assert (
            verb(
                "predict",
                result.folder,
                tmp_path / f"{name}.parquet",
                "--out",
                tmp_path / f"{name}.csv",
            )
            == 0
        )
    grouped, alone = (
        (tmp_path / f"{name}.csv").read_text().splitlines() for name in ("grouped", "alone")
    )
    assert [line.rpartition(",")[2] for line in grouped] == [
        line.rpartition(",")[2] for line in alone
    ]
    (tmp_path / "many").mkdir()
    (tmp_path / "alone.parquet").rename(tmp_path / "many" / "a.parquet")
    # several recordings, after a file that is one
    pq.write_table(rows, tmp_path / "many" / "b.parquet")
    assert verb("predict", result.folder, tmp_path / "many", "--out", f"{tmp_path / 'out'}/") == 0
    assert (
        verb(
            "predict",
            result.folder,
            tmp_path / "many" / "b.parquet",
            "--out",
            tmp_path / "b.parquet",
        )
        == 0
    )
    assert (tmp_path / "out" / "b.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


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
    (form,) = exported(predictor, tmp_path / "onnx").values()
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
        sizes = [5 if size == "rows" else size for size in shape]
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


@pytest.mark.parametrize("kind", ["chunk", *at_once(of=["window"], seconds=1)])
def test_blocks_of_a_stream_answer_as_the_whole_recording_does(tmp_path, monkeypatch, kind):
    result = train(tmp_path / "runs", kind)
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
    found = json.loads(printed[printed.index("{\n") :])
    assert found["rmse"] == pytest.approx(result.metrics["test/rmse"], rel=1e-4)


@pytest.mark.parametrize("kind", at_once("forecast", of=["chunk", "window", "forecast"], seconds=1))
def test_evaluate_of_each_way_gives_the_errors_of_the_test_recordings(tmp_path, kind, capsys):
    result = train(tmp_path / "runs", kind)
    folder = write_cells(tmp_path / "cells")
    assert verb("evaluate", result.folder, folder, "--json") == 0
    printed = capsys.readouterr().out
    found = json.loads(printed[printed.index("{\n") :])
    for name in ("rmse", "mae", "max_error", "r2"):
        assert found[name] == pytest.approx(result.metrics[f"test/{name}"], rel=1e-4), name


def test_recordings_too_short_for_a_forecast_are_left_out_with_a_line_and_refused_where_all_are(
    tmp_path, capsys
):
    result = train(tmp_path / "runs", "forecast")
    folder = write_cells(tmp_path / "cells")
    verb("predict", result.folder, folder, "--out", tmp_path / "whole.csv")
    pq.write_table(cells_of("test").slice(0, 9), folder / "short.parquet")
    capsys.readouterr()
    assert verb("predict", result.folder, folder, "--out", tmp_path / "more.csv") == 0
    assert (
        "short.parquet: cell=" in (told := capsys.readouterr().err) and "(9 samples of 12)" in told
    )
    assert (tmp_path / "more.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    pq.write_table(cells_of("test").slice(0, 14), tmp_path / "short.parquet")
    assert verb("evaluate", result.folder, tmp_path / "short.parquet") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "(14 samples of 15). Leave them out." in line
    pq.write_table(cells_of("test").slice(0, 9), tmp_path / "short.parquet")
    assert (
        verb(
            "predict", result.folder, tmp_path / "short.parquet", "--out", tmp_path / "none.parquet"
        )
        == 2
    )
    assert (
        "(9 samples of 12). Leave them out." in capsys.readouterr().err
        and not (tmp_path / "none.parquet").exists()
    )


def test_a_recording_of_a_single_sample_is_refused_and_the_older_answers_stay(tmp_path, capsys):
    result = train(tmp_path / "runs", "chunk")
    rows = cells_of("test")
    pa.csv.write_csv(rows.slice(0, 1), tmp_path / "one.csv")
    answers = tmp_path / "answers.csv"
    answers.write_text("older\n1\n")
    assert verb("predict", result.folder, tmp_path / "one.csv", "--out", answers) == 2
    assert (
        "no recording has two samples or more. Name longer recordings." in capsys.readouterr().err
    )
    assert answers.read_text() == "older\n1\n"
    assert (
        verb("predict", result.folder, tmp_path / "one.csv", "--out", f"{tmp_path / 'many'}/") == 2
    )
    assert not list((tmp_path / "many").glob("*.csv"))


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
    assert "export: a bidirectional network reads a recording from its end too" in line


def test_another_sampling_rate_is_refused(tmp_path, capsys):
    result = train(tmp_path / "runs", "gru")
    rows = cells_of("test")
    slow = rows.set_column(2, "time_s", pa.array(np.array(rows["time_s"]) * 2))
    pq.write_table(slow, tmp_path / "slow.parquet")
    assert verb("predict", result.folder, tmp_path / "slow.parquet") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has a sample every 20 s, the training recordings every 10 s. Resample it" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: {"voltage": [None, *c["voltage"][1:]]},
            "1 row without voltage (row 1). Write the values, or train",
        ),
        *at_once(
            of=[
                (
                    lambda c: {"time_s": [9e9, *c["time_s"][1:]]},
                    "in row 2. Sort the rows by time, and write a file for each",
                ),
                (
                    lambda c: {"voltage": c["temperature"], "temperature": None},
                    "data.features[2]: no column 'temperature' in",
                ),
            ],
            seconds=2,
        ),
    ],
)
def test_a_wrong_file_behind_a_right_one_is_one_message_and_leaves_no_answers(
    tmp_path, capsys, change, message
):
    result = train(tmp_path / "runs", "chunk")
    folder = write_cells(tmp_path / "cells")
    first = pq.read_table(min(folder.iterdir())).to_pydict()
    changed = {
        name: values for name, values in {**first, **change(first)}.items() if values is not None
    }
    pq.write_table(pa.table(changed), folder / "z.parquet")
    assert verb("predict", result.folder, folder, "--out", tmp_path / "answers.parquet") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and not list(tmp_path.glob("*answers*"))


def test_a_feature_in_another_unit_than_in_training_is_warned_of(tmp_path, capsys):
    result = train(tmp_path / "runs", "gru")
    rows = cells_of("test")
    place = rows.column_names.index("voltage")
    pq.write_table(rows, tmp_path / "volts.parquet")
    pq.write_table(
        rows.set_column(place, "voltage", pa.array(np.array(rows["voltage"]) * 1000)),
        tmp_path / "mv.parquet",
    )
    assert (
        verb("predict", result.folder, tmp_path / "volts.parquet", "--out", tmp_path / "a.parquet")
        == 0
    )
    pq.write_table(rows.slice(0, 20), tmp_path / "few.parquet")
    assert (
        verb("predict", result.folder, tmp_path / "few.parquet", "--out", tmp_path / "few.csv") == 0
    )
    assert "unit" not in capsys.readouterr().err
    assert (
        verb("predict", result.folder, tmp_path / "mv.parquet", "--out", tmp_path / "b.parquet")
        == 0
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning voltage is 988 times") and line.endswith(
        "the training recordings; is it in another unit?"
    )


@pytest.mark.parametrize(
    ("unit", "scale"), [("fahrenheit", "standard"), *at_once(of=[("kelvin", "minmax")], seconds=1)]
)
def test_degrees_of_another_scale_are_warned_of_by_recording(tmp_path, capsys, unit, scale):
    random = np.random.default_rng(4)

    def write(name: str, change: Any) -> Path:
        celsius = random.uniform(24, 79, 400)
        path = tmp_path / name
        pa.csv.write_csv(pa.table({"temperature": change(celsius), "y": np.sin(celsius)}), path)
        return path

    (tmp_path / "cells").mkdir()
    for number in range(4):
        write(f"cells/{number}.csv", lambda celsius: celsius)
    data = SequenceDataConfig(
        source=str(tmp_path / "cells"),
        features=["temperature"],
        target="y",
        lookback=2,
        scale=scale,
    )
    quick = {
        "max_epochs": 1,
        "precision": "fp32",
        "logger": "none",
        "output": str(tmp_path / "runs"),
    }
    result = fit(
        data,
        WindowMLPConfig(widths=[4]),
        monitor=MonitorConfig(progress=False, verdict=False),
        **quick,
    )
    changes = {
        "fahrenheit": lambda celsius: celsius * 1.8 + 32,
        "kelvin": lambda celsius: celsius + 273.15,
    }
    same = write("same.csv", lambda celsius: celsius)
    other = write("other.csv", changes[unit])
    capsys.readouterr()
    for command in (["predict"], ["evaluate"]):
        asked = ["--out", tmp_path / "answers.csv"] if command == ["predict"] else []
        assert verb(*command, result.folder, same, *asked) == 0
        assert "unit" not in "".join(capsys.readouterr())
        assert verb(*command, result.folder, other, *asked) == 0
        said = "".join(capsys.readouterr())
        assert "warning temperature lies elsewhere than in training (24" in said
        assert "in 1 recording: " in said
        assert "other.csv (" in said


@pytest.mark.parametrize(
    "way",
    [
        {},
        *at_once(
            of=[{"lookback": 5}, {"problem": "forecast", "lookback": 5, "horizon": 3}], seconds=1
        ),
    ],
)
def test_a_large_dated_file_is_answered_in_blocks_as_a_small_one_is(tmp_path, monkeypatch, way):
    dates = np.datetime64("2026-03-01T10:00:00") + np.arange(40).astype("timedelta64[m]")
    columns = {"a": np.sin(np.arange(40)), "y": np.cos(np.arange(40))}
    pa.csv.write_csv(pa.table({"t": [f"{date}Z" for date in dates], **columns}), tmp_path / "r.csv")
    settings = {
        "features": ["a"],
        "target": "y",
        "time": "t",
        "split_by": "time",
        "batch_size": 4,
        **way,
    }
    quick = {
        "max_epochs": 1,
        "precision": "fp32",
        "logger": "none",
        "output": str(tmp_path / "runs"),
    }
    data = SequenceDataConfig(source=str(tmp_path / "r.csv"), **settings)
    result = fit(
        data, RNNConfig(hidden=4), monitor=MonitorConfig(progress=False, verdict=False), **quick
    )
    monkeypatch.setattr("flatout.inference.sequences._SAMPLES_A_BLOCK", 7)
    answers = []
    for least in (1 << 40, 0):
        monkeypatch.setattr("flatout.data.sequences.recordings.LEAST_BYTES", least)
        assert (
            verb(
                "predict", result.folder, tmp_path / "r.csv", "--out", tmp_path / "answers.parquet"
            )
            == 0
        )
        answers.append(pq.read_table(tmp_path / "answers.parquet"))
    small, large = answers
    assert small.equals(large)
    expected = dates[-1] + np.arange(1, 4).astype("timedelta64[m]") if "horizon" in way else dates
    assert np.array_equal(large["t"].to_numpy(), expected.astype("datetime64[us]"))


def write_csv(folder: Path, **changes: Any) -> Path:
    """Six recordings of 50 samples."""
    folder.mkdir()
    for number in range(6):
        place = np.arange(50)
        random = np.random.default_rng(number)
        columns = {
            "t": place * 2,
            "a": random.standard_normal(50),
            "b": place + number,
            "y": place * 0.1,
        }
        columns |= {name: change(columns, number) for name, change in changes.items()}
        pa.csv.write_csv(pa.table(columns), folder / f"r{number}.csv")
    return folder


COLUMNS = ("data.features=[a,b]", "data.target=y", "data.time=t")


def test_a_check_of_recordings_prints_lengths_and_columns_and_a_command_that_trains(
    tmp_path, monkeypatch, capsys
):
    folder = write_csv(tmp_path / "runs")
    assert verb("check", folder, *COLUMNS, "data.chunk=20") == 0
    printed = capsys.readouterr().out
    assert "train: 4 recordings, 200 samples; length 50" in printed
    assert "a sample every 2 s" in printed
    assert (
        "\ny " in printed
        and "0 errors, 0 warnings; to train: python -m train data=sequence" in printed
    )
    words = printed.rsplit("python -m train ", 1)[1].replace("'", "").split()
    assert verb("check", folder, *COLUMNS, "data.chunk=20", "+data.noise.a=0.01") == 0
    assert capsys.readouterr().out.rstrip().endswith("data.chunk=20 +data.noise.a=0.01")
    assert verb("check", folder, *COLUMNS, "data.noise.c=0.01") == 2
    assert capsys.readouterr().err.rstrip() == "data.noise.c: no such feature (a, b)"
    assert verb("check", folder, "data.features=a", "data.target=y") == 2
    assert (
        capsys.readouterr().err.rstrip()
        == "data.features: 'a' does not fit (a list). Write data.features=[a]."
    )
    quick = [
        "trainer.max_epochs=1",
        "monitor.progress=false",
        "logger=none",
        f"output={tmp_path / 'out'}",
    ]
    assert run_train([*words, *quick], monkeypatch) == 0


@pytest.mark.parametrize(
    "least_bytes", [0, *at_once(of=[1 << 40], seconds=1)], ids=["a large file", "a small file"]
)
def test_the_longest_gap_is_named_in_check_in_training_and_in_predict(
    tmp_path, monkeypatch, capsys, least_bytes
):
    monkeypatch.setattr("flatout.data.sequences.recordings.LEAST_BYTES", least_bytes)
    folder = write_csv(tmp_path / "runs")
    place = np.delete(np.arange(300), slice(40, 240))
    holed = {"t": place * 5, "a": np.sin(place), "b": np.cos(place), "y": place * 0.1}
    pa.csv.write_csv(pa.table(holed), tmp_path / "holed.csv")
    said = (
        "longest gap 1,005 s, with a sample every 5 s; windows reach across it unless data.max_gap"
        " parts"
    )
    words = ["data.features=[a,b]", "data.target=y", "data.time=t", "data.split_by=time"]
    assert verb("check", tmp_path / "holed.csv", *words) == 0
    assert said in capsys.readouterr().out
    assert verb("check", tmp_path / "holed.csv", *words, "data.max_gap=60") == 0
    assert verb("check", folder, *COLUMNS) == 0
    assert "longest gap" not in capsys.readouterr().out
    data = SequenceDataConfig(
        source=str(tmp_path / "holed.csv"),
        features=["a", "b"],
        target="y",
        time="t",
        split_by="time",
    )
    quick = {
        "max_epochs": 1,
        "precision": "fp32",
        "logger": "none",
        "output": str(tmp_path / "out"),
    }
    result = fit(
        data, RNNConfig(hidden=4), monitor=MonitorConfig(progress=False, verdict=False), **quick
    )
    assert said in capsys.readouterr().out
    assert (
        verb("predict", result.folder, tmp_path / "holed.csv", "--out", tmp_path / "answers.csv")
        == 0
    )
    assert said in capsys.readouterr().err


def test_a_check_takes_the_word_of_recordings_that_its_own_command_has_and_names_their_settings(
    tmp_path, capsys
):
    folder = write_csv(tmp_path / "runs")
    assert verb("check", folder, "data=sequence", *COLUMNS) == 0
    printed = capsys.readouterr().out
    assert printed.count("data=sequence") == 1
    place = np.arange(40)
    named = {"machine": ["P1"] * 40, "at": [f"2026-03-28T07:00:{second:02}" for second in place]}
    columns = {
        name: np.sin(place + number) for number, name in enumerate(("rpm", "bar", "celsius"))
    }
    pa.csv.write_csv(pa.table(named | columns), tmp_path / "pump.csv")
    assert verb("check", tmp_path / "pump.csv") == 2
    assert (
        "Are they recordings? Set data.target=COLUMN data.features=[COLUMN,…]"
        in capsys.readouterr().err
    )


def test_a_check_names_a_constant_column_beside_missing_values_and_shows_the_ranges(
    tmp_path, capsys
):
    def with_gaps(columns: Any, number: int) -> Any:
        values = list(columns["a"])
        if number == 2:
            values[3:5] = [None, None]
        return values

    folder = write_csv(tmp_path / "runs", a=with_gaps, b=lambda c, _: np.full(50, 7.0))
    assert verb("check", folder, *COLUMNS) == 2
    printed = capsys.readouterr().out
    assert (
        "r2.csv: 2 rows without a (rows 4, 5). Set data.missing=fill or data.missing=drop."
        in printed
    )
    assert "'b' is constant in the training recordings (7). Leave it out." in printed
    assert "2 errors" in printed
    assert "dropped" not in printed
    assert "\ny " in printed


def test_recordings_of_several_sampling_rates_are_warned_of_unless_they_are_resampled(
    tmp_path, capsys
):
    folder = write_csv(tmp_path / "runs", t=lambda c, number: c["t"] * (1 + number % 2))
    assert verb("check", folder, *COLUMNS, "--strict") == 1
    printed = capsys.readouterr().out
    assert "recordings: a sample every 2 to 4 s, as if all were alike; data.step=" in printed
    assert verb("check", folder, *COLUMNS, "data.step=4", "--strict") == 0
    assert "as if all were alike" not in capsys.readouterr().out


def test_a_check_of_recordings_warns_of_another_unit_and_names_mistakes(tmp_path, capsys):
    splits = [
        write_csv(tmp_path / "train"),
        write_csv(tmp_path / "test", a=lambda c, _: c["a"] * 1000),
    ]
    (tmp_path / "train" / "r5.csv").rename(tmp_path / "validation.csv")
    words = [
        splits[0],
        f"data.validation={tmp_path / 'validation.csv'}",
        f"data.test={splits[1]}",
        *COLUMNS,
    ]
    assert verb("check", *words, "--strict") == 1
    assert (
        "times as large as in the training recordings; is it in another unit?"
        in capsys.readouterr().out
    )
    assert verb("check", splits[0], *COLUMNS, "data.lookback=60") == 2
    printed = capsys.readouterr().out
    assert "data.lookback=60: 60 samples are needed, the longest train recording has 50" in printed
    assert "1 error" in printed and "to train" not in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model=bilstm", "model: bilstm does not fit sequences. Set model=rnn or model=window_mlp"),
        ("data.lookback=0", "data.lookback: 0 (1 or more, or null)"),
        *at_once(
            of=[
                (
                    "task=classification",
                    "task: classification with data.problem=estimate. Set task=sequence.",
                ),
                ("data.target=voltage", "data.features: 'voltage' is the target"),
                ("model.hiden=3", "model.hiden: no such key"),
            ],
            seconds=1,
        ),
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
