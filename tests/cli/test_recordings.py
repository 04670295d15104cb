"""Runs on recordings from the command line: train, predict a folder, evaluate, and what is
refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from flatout import (
    MonitorConfig,
    RNNConfig,
    SequenceDataConfig,
    fit,
)
from flatout.data.tables.formats.in_memory import table_of
from flatout.models.window_mlp import WindowMLPConfig
from tests.cli.cells import SETTINGS, cells_of, train, write_cells
from tests.params import at_once
from tests.refusals import require_printed
from tests.verbs import verb


@pytest.mark.parametrize("kind", at_once(*list(SETTINGS)[:2], of=SETTINGS, seconds=1))
def test_a_saved_run_answers_a_folder_as_its_task_answers_the_test_rows(tmp_path, kind):
    result = train(tmp_path / "runs", kind)
    out = tmp_path / "answers.parquet"
    assert verb("predict", result.folder, write_cells(tmp_path / "cells"), "--out", out) == 0
    answers = pq.read_table(out)
    truth = cells_of("test")
    if kind == "forecast":
        assert answers.column_names == ["recording", "cell", "cycle", "time_s", "voltage", "soc"]
        assert answers.num_rows == 3 * 4
        assert answers["time_s"].to_pylist()[:3] == [500.0, 510.0, 520.0]
        return
    assert answers.column_names == ["recording", "cell", "cycle", "time_s", "soc"]
    for name in ("cell", "cycle"):
        assert answers[name].to_pylist() == truth[name].to_pylist()
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
    assert "short.parquet: cell=" in (told := capsys.readouterr().err)
    assert "(9 samples; 12 are needed)" in told
    assert (tmp_path / "more.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    pq.write_table(cells_of("test").slice(0, 14), tmp_path / "short.parquet")
    assert verb("evaluate", result.folder, tmp_path / "short.parquet") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "(14 samples; 15 are needed). Name one of 15 samples or more." in line
    pq.write_table(cells_of("test").slice(0, 9), tmp_path / "short.parquet")
    assert (
        verb(
            "predict", result.folder, tmp_path / "short.parquet", "--out", tmp_path / "none.parquet"
        )
        == 2
    )
    assert "no recording is long enough: " in capsys.readouterr().err
    assert not (tmp_path / "none.parquet").exists()


def test_a_recording_of_a_single_sample_is_refused_and_the_older_answers_stay(tmp_path, capsys):
    result = train(tmp_path / "runs", "chunk")
    rows = cells_of("test")
    pa.csv.write_csv(rows.slice(0, 1), tmp_path / "one.csv")
    answers = tmp_path / "answers.csv"
    answers.write_text("older\n1\n")
    assert verb("predict", result.folder, tmp_path / "one.csv", "--out", answers) == 2
    require_printed(capsys.readouterr().err, "no recording", "two samples")
    assert answers.read_text() == "older\n1\n"
    assert (
        verb("predict", result.folder, tmp_path / "one.csv", "--out", f"{tmp_path / 'many'}/") == 2
    )
    assert not list((tmp_path / "many").glob("*.csv"))


def test_another_sampling_rate_is_refused(tmp_path, capsys):
    result = train(tmp_path / "runs", "gru")
    rows = cells_of("test")
    slow = rows.set_column(2, "time_s", pa.array(np.array(rows["time_s"]) * 2))
    pq.write_table(slow, tmp_path / "slow.parquet")
    assert verb("predict", result.folder, tmp_path / "slow.parquet") == 2
    (line,) = capsys.readouterr().err.splitlines()
    require_printed(line, "a sample every 20 s", "every 10 s", "Resample it")


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
    assert message in line
    assert not list(tmp_path.glob("*answers*"))


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
    assert line.startswith("warning voltage lies elsewhere than in training (")
    assert ") and is 988 times as large in 4 recordings: " in line
    assert line.endswith("; is it in another unit?")


@pytest.mark.parametrize(
    ("unit", "scale"), [("fahrenheit", "standard"), *at_once(of=[("kelvin", "minmax")], seconds=1)]
)
def test_degrees_of_another_scale_are_warned_of_by_recording(tmp_path, capsys, unit, scale):
    random = np.random.default_rng(4)

    def write(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Path:
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
    other = write("other\x1b[31m.csv", changes[unit])
    capsys.readouterr()
    for command in (["predict"], ["evaluate"]):
        asked = ["--out", tmp_path / "answers.csv"] if command == ["predict"] else []
        assert verb(*command, result.folder, same, *asked) == 0
        assert "unit" not in "".join(capsys.readouterr())
        assert verb(*command, result.folder, other, *asked) == 0
        said = "".join(capsys.readouterr())
        assert "warning temperature lies elsewhere than in training (24" in said
        assert "in 1 recording: " in said
        assert "other\\x1b[31m.csv (" in said, "escape codes of a name are written out"
        assert "\x1b" not in said


@pytest.mark.parametrize(
    "way",
    [
        {},
        *at_once(
            of=[
                {"lookback": 5},
                {
                    "problem": "forecast",
                    "lookback": 5,
                    "horizon": 3,
                },
            ],
            seconds=1,
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
        monkeypatch.setattr("flatout.data.sequences.scratch.LEAST_BYTES", least)
        assert (
            verb(
                "predict", result.folder, tmp_path / "r.csv", "--out", tmp_path / "answers.parquet"
            )
            == 0
        )
        answers.append(pq.read_table(tmp_path / "answers.parquet"))
    small, large = answers
    assert small.equals(large)
    assert (
        verb("predict", result.folder, tmp_path / "r.csv", "--out", tmp_path / "answers.csv") == 0
    )
    first = (tmp_path / "answers.csv").read_text("utf-8").splitlines()[1]
    assert first.split(",")[1] == f"{large['t'][0].as_py():%Y-%m-%d %H:%M:%S}.000000Z"
    expected = dates[-1] + np.arange(1, 4).astype("timedelta64[m]") if "horizon" in way else dates
    assert np.array_equal(large["t"].to_numpy(), expected.astype("datetime64[us]"))
