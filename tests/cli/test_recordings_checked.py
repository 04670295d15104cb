"""`python -m flatout check` of recordings: lengths, columns, units and a command that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from flatout import (
    MonitorConfig,
    RNNConfig,
    SequenceDataConfig,
    fit,
)
from tests.composed import run_train
from tests.params import at_once
from tests.refusals import require_printed
from tests.verbs import verb


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
    assert "data.group=[COLUMN] keeps the files of one machine in one split" in printed
    assert "\ny " in printed
    assert "0 errors, 0 warnings; to train: python -m train data=sequence" in printed
    words = printed.rsplit("python -m train ", 1)[1].replace("'", "").split()
    assert verb("check", folder, *COLUMNS, "data.chunk=20", "+data.noise.a=0.01") == 0
    assert capsys.readouterr().out.rstrip().endswith("data.chunk=20 +data.noise.a=0.01")
    assert verb("check", folder, *COLUMNS, "data.noise.c=0.01") == 2
    refusal = capsys.readouterr().err
    assert refusal.startswith("data.noise.c: ")
    assert "(a, b)" in refusal
    assert verb("check", folder, "data.features=a", "data.target=y") == 2
    refusal = capsys.readouterr().err
    assert refusal.startswith("data.features: 'a' ")
    assert "data.features=[a]" in refusal
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
    monkeypatch.setattr("flatout.data.sequences.scratch.LEAST_BYTES", least_bytes)
    folder = write_csv(tmp_path / "runs")
    place = np.delete(np.arange(300), slice(40, 240))
    holed = {
        "t": place * 5,
        "a": np.sin(place),
        "b": np.cos(place),
        "y": place * 0.1,
    }
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
    def with_gaps(columns: dict[str, np.ndarray], number: int) -> Any:
        values = list(columns["a"])
        if number == 2:
            values[3:5] = [None, None]
        return values

    folder = write_csv(tmp_path / "runs", a=with_gaps, b=lambda c, _: np.full(50, 7.0))
    assert verb("check", folder, *COLUMNS) == 2
    printed = capsys.readouterr().out
    fixes = ("data.missing=fill", "data.missing=drop")
    require_printed(printed, "r2.csv: ", "2 rows without a", "(rows 4, 5)", *fixes)
    require_printed(printed, "'b' is constant", "(7)")
    assert "2 errors" in printed
    assert "dropped" not in printed
    assert "\ny " in printed


def test_a_check_of_recordings_names_the_mistakes_of_all_files_at_once(tmp_path, capsys):
    def wrong_text(columns: dict[str, np.ndarray], number: int) -> Any:
        values = list(map(str, columns["a"]))
        values[6] = "high" if number == 1 else values[6]
        return values

    def wrong_time(columns: dict[str, np.ndarray], number: int) -> Any:
        return columns["t"][::-1].copy() if number == 3 else columns["t"]

    folder = write_csv(tmp_path / "runs", a=wrong_text, t=wrong_time, b=lambda c, _: np.full(50, 7))
    assert verb("check", folder, *COLUMNS, "data.lookback=60", "data.step=4") == 2
    printed = capsys.readouterr().out
    require_printed(printed, f"{folder}/r1.csv: ", "a is 'high' in row 7")
    require_printed(printed, f"data.time: {folder}/r3.csv: ", "goes back")
    require_printed(printed, "'b' is constant", "(7)")
    require_printed(printed, "data.lookback=60: ", "the longest train recording has 25")
    assert "4 errors" in printed
    assert "a sample every 4 s (resampled from 2 s)" in printed

    columns = {name: ["high"] * 50 for name in "ab"}
    folder = write_csv(tmp_path / "worse", **{name: lambda c, _: columns["a"] for name in "ab"})
    for number in range(6, 15):
        (folder / f"r{number}.csv").write_text("t,a,b,y\n0,x,x,1\n", encoding="utf-8")
    assert verb("check", folder, *COLUMNS) == 2
    printed = capsys.readouterr().out
    assert "5 mistakes more of these recordings" in printed
    assert printed.splitlines()[-1].startswith("15 errors, ")


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
        "times as large as in the training recordings; is it in another unit, here or there?"
        in capsys.readouterr().out
    )
    assert verb("check", splits[0], *COLUMNS, "data.lookback=60") == 2
    printed = capsys.readouterr().out
    require_printed(printed, "data.lookback=60: ", "60 samples", "longest train recording has 50")
    assert "1 error" in printed
    assert "to train" not in printed


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
