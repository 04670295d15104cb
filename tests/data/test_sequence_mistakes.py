"""Recordings that do not fit: each is refused in one sentence, or warned of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from tests.data.recordings import (
    SETTINGS,
    labelled_recordings,
    open_data,
    recording,
    refusal,
    write_files,
)
from tests.refusals import refused

from flatout.data import SequenceData
from flatout.errors import UserError


def test_rows_without_a_group_or_a_label_are_named(tmp_path):
    table = pa.table({"cell": ["a"] * 20 + [" "] + ["b"] * 19, **recording(40)})
    with refused("data.group", "cell", "row 21"):
        open_data(table, group=["cell"])
    labels = ["c0", "c1", "c0", "", "c0", "c1", "c0", "c1"]
    with pytest.raises(UserError, match=r"data\.target: .*cell=3 has 0 labels"):
        open_data(labelled_recordings(*labels), group=["cell"], problem="label", target="load")


def test_labels_are_finite_and_whole_ones_are_told_to_be_numbers(tmp_path, capsys):
    given: dict[str, Any] = {"group": ["cell"], "problem": "label", "target": "load"}
    with refused("data.target", "cell=2", "inf"):
        open_data(labelled_recordings(0.0, 1.0, math.inf, 1.0, 0.0, 1.0), **given)
    open_data(labelled_recordings(0, 1, 0, 1, 0, 1), **given)
    note = (
        "labels: whole numbers are predicted as numbers; write them as texts (c0, c1) for classes"
    )
    assert note in capsys.readouterr().out
    open_data(labelled_recordings(0.5, 1.0, 0.0, 1.0, 0.0, 1.0), **given)
    assert note not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        (
            {"t": lambda c: [0, 2, 1, *c["t"][3:]]},
            {},
            "data.time: {folder}/r1.csv: t goes back from 2 to 1 in row 3.",
        ),
        (
            {
                "t": lambda c: [
                    str(np.datetime64("2016-07-11") + day)
                    for day in [1, 3, 2, *range(4, len(c["t"]) + 1)]
                ]
            },
            {},
            "goes back from 2016-07-14T00:00:00.000 to 2016-07-13T00:00:00.000 in row 3.",
        ),
        (
            {"t": lambda c: [0, 1, 1, *c["t"][3:]]},
            {},
            "data.time: {folder}/r1.csv: t repeats 1 in row 3.",
        ),
        (
            {"t": lambda c: [0, "", 2, *c["t"][3:]]},
            {},
            "data.time: {folder}/r1.csv: t is missing in row 2.",
        ),
        (
            {"a": lambda c: [0, "high", *c["a"][2:]]},
            {},
            "{folder}/r1.csv: a is 'high' in row 2 (numbers).",
        ),
        (
            {"b": lambda c: [0, 1, "inf", *c["b"][3:]]},
            {},
            "{folder}/r1.csv: b is infinite in row 3.",
        ),
        (
            {"b": lambda c: [0, "nan", *c["b"][2:]]},
            {},
            "1 row without b (row 2). Set data.missing=fill",
        ),
        ({}, {"features": ["a", "y"]}, "data.features: 'y' is the target. Leave it out."),
        ({}, {"features": ["a", "z"]}, "data.features[1]: no column 'z' in {folder}/r0.csv"),
        ({}, {"target": "z"}, "data.target: no column 'z' in {folder}/r0.csv"),
        (
            {},
            {"max_gap": 0.5},
            "two samples or more. Name longer recordings, or change data.max_gap=0.5.",
        ),
        (
            {},
            {"target": None},
            "data.target: is not set. Name the column that is answered: data.target=COLUMN.",
        ),
        (
            {},
            {"lookback": 10, "chunk": 5},
            "data.chunk: with data.lookback. Leave one of them out.",
        ),
        ({}, {"problem": "forecast"}, "data.problem: forecast without data.lookback."),
        ({}, {"horizon": 5}, "data.horizon: 5, but no forecast. Set data.problem=forecast."),
        (
            {},
            {"problem": "forecast", "lookback": 40, "horizon": 30},
            (
                "data.lookback=40 and data.horizon=30: 70 samples are needed, the longest train"
                " recording has 4"
            ),
        ),
        (
            {},
            {"lookback": 50},
            "data.lookback=50: 50 samples are needed, the longest train recording has 4",
        ),
        (
            {},
            {
                "problem": "forecast",
                "lookback": 5,
                "horizon": 9,
                "split_by": "time",
            },
            (
                "data.horizon: no forecast of 9 samples fits the validation samples of a recording,"
                " at most"
            ),
        ),
        ({}, {"step": 500.0}, "data: no recording has two samples or more."),
        ({}, {"time": None, "step": 2.0}, "data.step: 2.0 without data.time."),
        ({}, {"split_at": [10, 20]}, "data.split_at: with split_by=auto. Set data.split_by=time."),
        ({}, {"split_by": "group"}, "data.split_by: group without data.group."),
        ({}, {"noise": {"z": 0.1}}, "data.noise.z: no such feature (a, b)"),
        ({}, {"step": 0}, "data.step: 0 (above 0, or null)"),
        ({}, {"step": 1e-9}, "data.step: 1e-09 s makes "),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path, changes, settings, message):
    folder = write_files(tmp_path / "runs", **changes)
    assert message.format(folder=folder) in refusal(folder, **settings)


def test_a_feature_with_the_values_of_the_target_is_refused():
    columns = recording(90)
    table = pa.table({**columns, "b": columns["y"]})
    assert "data.features: 'b' has the values of the target 'y' in all recordings." in refusal(
        table
    )
    assert open_data(table, problem="forecast", lookback=4, horizon=2).info.shape.inputs == 3


def test_a_feature_that_is_the_target_in_another_unit_is_warned_of():
    columns = recording(90)
    percent = np.round(100 * np.asarray(columns["y"]) + 7, 3)
    info = open_data(pa.table({**columns, "b": percent})).info
    (line,) = [line for line in info.lines if line.startswith("warning")]
    assert line == "warning data.features: y = 0.01 * b + -0.07 in all recordings; leave b out"
    noisy = percent + np.random.default_rng(0).standard_normal(90)
    assert not any(
        line.startswith("warning")
        for line in open_data(pa.table({**columns, "b": noisy})).info.lines
    )


def test_values_that_no_scale_can_hold_are_refused():
    columns = recording(90)
    message = refusal(pa.table({**columns, "a": columns["a"] * 1e300}))
    assert (
        "data.features: 'a' reaches 9.9999e+299, its variance is not finite. Use another unit."
        in message
    )


def test_recordings_shorter_than_a_window_are_named():
    groups = [(0, 60), (1, 60), (2, 60), (3, 60), (4, 6)]
    parts = [{"run": [f"r{run}"] * size, **recording(size, run)} for run, size in groups]
    table = pa.concat_tables(pa.table(part) for part in parts)
    settings: dict[str, Any] = {"group": ["run"], "split_by": "time", "lookback": 5}
    data = open_data(table, **settings, problem="forecast", horizon=3)
    (line,) = [line for line in data.info.lines if line.startswith("warning train")]
    shorter = (
        "1 recording shorter than the 8 samples of data.lookback=5 and data.horizon=3 left out"
    )
    assert line.startswith(f"warning train: {shorter}: ")
    assert line.endswith("run=r4 (5)")


def test_a_constant_feature_is_refused(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    for number in range(4):
        pq.write_table(
            pa.table({**recording(30, number), "b": np.full(30, 25.0)}),
            folder / f"{number}.parquet",
        )
    with refused("data.features", "'b' is constant", 25):
        open_data(folder)


def pump(number: int, samples: int = 300) -> dict[str, np.ndarray]:
    random = np.random.default_rng(number)
    celsius = random.uniform(24, 79, samples)
    return {
        "t": np.arange(samples),
        "a": random.normal(3, 0.3, samples),
        "b": celsius,
        "y": celsius + number,
    }


@pytest.mark.parametrize(
    ("column", "change", "said"),
    [
        (
            "a",
            lambda bar: np.where(np.arange(300) < 150, bar, bar * 100),
            "r1.csv (second half: 30",
        ),
        ("a", lambda bar: bar * 100, "r1.csv (300"),
        ("a", lambda bar: bar / 100, "r1.csv (0.03"),
        ("b", lambda celsius: celsius * 1.8 + 32, "r1.csv (12"),
    ],
)
def test_a_recording_or_half_of_one_in_another_unit_than_the_others_is_named(
    tmp_path, column, change, said
):
    for number in range(8):
        columns = pump(number)
        if number == 1:
            columns[column] = change(columns[column])
        pa.csv.write_csv(pa.table(columns), tmp_path / f"r{number}.csv")
    lines = [
        line for line in open_data(tmp_path).info.lines if line.startswith("warning recordings: ")
    ]
    (line,) = lines
    assert line.startswith(
        f"warning recordings: {column} of 1 recording lies elsewhere than in the median recording"
    )
    assert said in line


def test_a_setting_that_differs_between_recordings_is_no_other_unit(tmp_path):
    for number in range(8):
        # of three, so that two are trained on
        setting = {"a": np.full(300, 24.0 if number % 3 == 0 else 4.0)}
        pa.csv.write_csv(pa.table(pump(number) | setting), tmp_path / f"{number}.csv")
    assert not [line for line in open_data(tmp_path).info.lines if "another unit" in line]


def test_another_unit_in_a_split_is_warned_of():
    given = {
        "train": recording(40),
        "validation": recording(40, 1),
        "test": recording(40, 2),
    }
    given["test"]["a"] = given["test"]["a"] * 1000
    tables = {name: pa.table(columns) for name, columns in given.items()}
    info = SequenceData(**{**SETTINGS, **tables})
    info.setup()
    (line,) = [line for line in info.info.lines if line.startswith("warning test")]
    assert line.startswith("warning test: a is ")
    assert line.endswith("in another unit, here or there?")
