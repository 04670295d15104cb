"""Recordings: tables are parted, filled, resampled and scaled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
from tests.data.recordings import open_data, recording, refusal, table_of_recordings, write_files
from tests.refusals import refused

from flatout.data import SequenceData
from flatout.data.sequences.settings import SequenceDataConfig
from flatout.data.tables.reading import ReadingConfig
from flatout.data.texts.settings import TextDataConfig
from flatout.errors import UserError


def test_files_are_recordings_and_whole_files_are_split(tmp_path):
    info = open_data(write_files(tmp_path / "runs")).info
    assert len(info.recording_names) == 6
    splits = info.facts["splits"]
    assert {name: split["recordings"] for name, split in splits.items()} == {
        "train": 4,
        "validation": 1,
        "test": 1,
    }
    samples = {number: 40 + number for number in range(6)}
    for split, segments in info.segments.items():
        assert (segments.stop - segments.first).tolist() == [
            samples[number] for number in segments.recording
        ], split


def test_scales_come_from_the_training_recordings_alone(tmp_path):
    info = open_data(write_files(tmp_path / "runs")).info
    rows = info.rows_of("train")
    train = np.concatenate(
        [
            rows.values[start : start + length]
            for start, length in zip(rows.offsets, rows.lengths, strict=True)
        ]
    )
    np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(train.std(axis=0), 1, rtol=1e-5)
    assert info.columns == ["a", "b", "y"]


@pytest.mark.parametrize("scale", ["minmax", "none"])
def test_other_scales(tmp_path, scale):
    info = open_data(write_files(tmp_path / "runs"), scale=scale).info
    rows = info.rows_of("train")
    train = np.concatenate(
        [
            rows.values[start : start + length]
            for start, length in zip(rows.offsets, rows.lengths, strict=True)
        ]
    )
    if scale == "minmax":
        np.testing.assert_allclose(
            [train.min(axis=0), train.max(axis=0)], [[0] * 3, [1] * 3], atol=1e-6
        )
    else:
        assert info.scaler.shift == [0, 0, 0]
        assert train[:, 2].max() > 12


def test_resampling_repeats_the_last_sample_and_gaps_split_a_recording():
    times = np.array([0.0, 1.0, 2.5, 4.0, 50.0, 51.0, 53.0])
    table = pa.table(
        {
            "t": times,
            "a": times * 2,
            "b": np.sin(times),
            "y": times,
        }
    )
    info = open_data(
        table, step=0.5, max_gap=10, scale="none", split_by="time", split_at=[4, 6]
    ).info
    names = info.recording_names
    assert [name.split(": ")[-1] for name in names] == [
        "table in memory part 1",
        "table in memory part 2",
    ]
    values = info.rows_of("train").values
    measured = info.measured("train")
    np.testing.assert_allclose(values[:9, 2], [0, 0, 1, 1, 1, 2.5, 2.5, 2.5, 4])
    np.testing.assert_allclose(values[9:, 2], [50, 50, 51, 51, 51, 51, 53])
    assert np.flatnonzero(measured[:, 0]).tolist() == [0, 2, 5, 8, 9, 11, 15]
    np.testing.assert_allclose(values[:, 0], 2 * values[:, 2], rtol=1e-6)


def test_an_integral_of_a_feature_is_read_too():
    times = np.array([0.0, 1800.0, 3600.0, 7200.0, 9000.0, 9900.0])
    table = pa.table(
        {
            "t": times,
            "a": [2.0, 2.0, 4.0, 4.0, 0.0, 1.0],
            "b": np.sin(times),
            "y": times,
        }
    )
    cut = {"split_by": "time", "split_at": [4, 5]}
    info = open_data(table, cumulate=["a"], scale="none", **cut).info
    assert info.columns == ["a cumulated", "a", "b", "y"]
    assert info.shape.inputs == 3
    np.testing.assert_allclose(info.rows_of("train").values[:, 0], [0, 1, 2.5, 6.5, 7.5, 7.625])
    assert "data.cumulate: no such feature 'z' (a, b)" in refusal(table, cumulate=["z"])


def test_gaps_that_part_recordings_are_named_with_their_files(tmp_path, capsys):
    def with_gaps(columns: dict[str, np.ndarray]) -> np.ndarray:
        return columns["t"] + 100 * (np.arange(41) // 15)

    open_data(write_files(tmp_path / "runs", t=with_gaps), max_gap=10)
    said = "gaps: recordings are parted at 2 gaps longer than data.max_gap: "
    assert f"{said}{tmp_path}/runs/r1.csv (2)" in capsys.readouterr().out


def test_missing_values_are_refused_filled_or_dropped(tmp_path):
    folder = write_files(
        tmp_path / "runs", a=lambda columns: [*columns["a"][:3], "", "", *columns["a"][5:]]
    )
    message = refusal(folder)
    assert (
        "r1.csv: 2 rows without a (rows 4, 5). Set data.missing=fill or data.missing=drop."
        in message
    )
    filled = open_data(folder, missing="fill", scale="none").info
    place = next(n for n, name in enumerate(filled.recording_names) if "r1" in name)
    assert any("2 rows without a (rows 4, 5) filled" in line for line in filled.lines)
    split = next(split for split, each in filled.segments.items() if place in each.recording)
    start = int(filled.segments[split].first[filled.segments[split].recording == place][0])
    a = filled.rows_of(split).values[start : start + 41, 0]
    np.testing.assert_array_equal(a[3:5], [a[2], a[2]])
    dropped = open_data(folder, missing="drop").info
    counts = sum(split["samples"] for split in dropped.facts["splits"].values())
    assert counts == sum(40 + number for number in range(6)) - 2


@pytest.mark.parametrize("zone", ["", "+02:00", "Z"])
def test_dates_are_times(tmp_path, zone):
    hours = [f"2016-07-01 {hour:02d}:00:00{zone}" for hour in range(24)]
    columns = recording(30) | {
        "t": hours + [f"2016-07-02 0{hour}:00:00{zone}" for hour in range(6)]
    }
    info = open_data(pa.table(columns), split_by="time", split_at=[20, 25]).info
    assert info.facts["step"] == 3600


@pytest.mark.parametrize(
    ("time", "form"),
    [
        ("28.03.2026 07:00:00", "%d.%m.%Y %H:%M:%S"),
        ("P1", "%d.%m.%Y %H:%M:%S"),
        ("03/28/2026 07:00:00 AM", "%m/%d/%Y %I:%M:%S %p"),
        ("03/28/2026 17:00", "%m/%d/%Y %H:%M"),
    ],
)
def test_a_time_that_cannot_be_read_is_named_with_the_form_that_fits(tmp_path, time, form):
    folder = write_files(tmp_path / "runs", t=lambda columns: [time] * 41)
    said = (
        f"t is {time!r} in row 1 (seconds or dates). Write dates as 2026-03-28T07:00:00, or say how"
        f" they are written: 'data.read.dates={form}'."
    )
    assert said in refusal(folder)


@pytest.mark.parametrize(("start", "is_said"), [(45_000.25, True), (0.0, False)])
def test_times_that_are_days_of_a_spreadsheet_are_named(start, is_said):
    days = [start + second / 86_400 for second in range(40)]
    table = pa.table(recording(40) | {"t": days})
    facts = open_data(table, split_by="time", split_at=[20, 30]).info.facts
    assert ("are they days of Excel?" in str(facts["lines"])) is is_said


EUROPEAN = ReadingConfig(decimal=",", dates="%d.%m.%Y %H:%M:%S")


def write_european(folder: Path, name: str = "a", second: str | None = None) -> Path:
    """A recording as a European logger writes it, `28.03.2026 07:00:05;-0,25`; `second` replaces
    the second value of a column.
    """
    columns = {}
    for key, values in recording(40).items():
        columns[key] = [str(value).replace(".", ",") for value in values]
    columns["t"] = [f"28.03.2026 07:00:{number:02d}" for number in range(40)]
    columns[name][1] = second or columns[name][1]
    rows = [";".join(row) for row in zip(*columns.values(), strict=True)]
    folder.mkdir()
    (folder / "r.csv").write_text("\n".join([";".join(columns), *rows]), encoding="utf-8")
    return folder


def test_decimal_commas_and_dates_of_a_european_logger_are_read(tmp_path):
    folder = write_european(tmp_path / "runs")
    cut = {"split_by": "time", "split_at": [20, 30]}
    info = open_data(folder, read=EUROPEAN, **cut).info
    assert info.facts["step"] == 1
    assert info.facts["scaler"]["shift"][0] == pytest.approx(recording(40)["a"][:20].mean())
    said = refusal(folder, read=ReadingConfig(dates=EUROPEAN.dates), **cut)
    assert "a is '0,0' in row 1 (numbers). Set data.read.decimal=','" in said


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("a", "1.514,0", "a is '1.514,0' in row 2 (numbers). Write numbers with a comma"),
        ("t", "2026-03-28", "t is '2026-03-28' in row 2 (data.read.dates=%d.%m.%Y %H:%M:%S)"),
    ],
)
def test_what_is_written_otherwise_than_named_is_refused(tmp_path, name, value, said):
    folder = write_european(tmp_path / "runs", name, value)
    assert said in refusal(folder, read=EUROPEAN)


def test_how_recordings_are_written_is_in_their_key_and_refused_for_texts():
    assert set(ReadingConfig().facts()) == {"format", "encoding", "delimiter", "quote", "columns"}
    assert EUROPEAN.facts()["decimal"] == ","
    with refused("data.read.decimal", "recordings"):
        TextDataConfig(source="rows.csv", read=ReadingConfig(decimal=","))
    with refused("data.read.decimal", "';'"):
        ReadingConfig(decimal=";")


def test_times_may_have_nanoseconds_and_lengths_of_time_are_refused():
    columns = recording(30)
    nanoseconds = [1_467_331_200_000_000_123 + 10**9 * number for number in range(30)]
    for kind in (pa.timestamp("ns"), pa.duration("ns")):
        table = pa.table(columns | {"t": pa.array(nanoseconds, pa.int64()).cast(kind)})
        if pa.types.is_timestamp(kind):
            text = table.set_column(
                table.column_names.index("t"), "t", table["t"].cast(pa.string())
            )
            assert text["t"][0].as_py() == "2016-07-01 00:00:00.000000123"
            assert open_data(text, split_by="time", split_at=[20, 25]).info.facts["step"] == 1
            assert open_data(table, split_by="time", split_at=[20, 25]).info.facts["step"] == 1
            continue
        with pytest.raises(UserError, match=r"t: holds duration\[ns\] \(numbers\)"):
            open_data(table, split_by="time", split_at=[20, 25])


def test_a_label_is_a_class_or_a_number_of_a_recording(tmp_path):
    parts = [
        {
            "run": f"r{number}",
            "kind": ["slow", "fast"][number % 2],
            "load": number / 2,
            **recording(20, number),
        }
        for number in range(8)
    ]
    table = table_of_recordings(parts)
    of_classes = open_data(table, problem="label", target="kind", group=["run"]).info
    assert of_classes.labels.classes == ["fast", "slow"]
    assert of_classes.shape.labels == 2
    numbers = open_data(table, problem="label", target="load", group=["run"]).info
    assert numbers.labels.classes == ["load"]
    assert numbers.labels.spread > 0
    message = refusal(table, problem="label", target="kind", time=None, group=None)
    assert "table in memory has 2 labels ('slow', 'fast') (one)" in message


def test_large_whole_numbers_are_read():
    columns = recording(90)
    table = pa.table({**columns, "t": np.arange(90) * 10**9 + 1_700_000_000_000_000_000})
    assert open_data(table).info.facts["step"] == 1e9


def test_settings_of_hydra_make_the_same_data():
    config = SequenceDataConfig(lookback=20, batch_size=8)
    data = SequenceData.of(config, seed=3)
    assert data.config == config
    assert config.features == ["voltage", "current", "temperature"]


def test_only_stores_whose_values_are_carried_forward_say_so_in_their_key():
    """A store that neither fills nor resamples keeps the key that it had when both were linear."""
    table = pa.table(recording(60))

    def recipe(**settings: Any) -> dict[str, Any]:
        return open_data(table, **settings).info.store.manifest["recipe"]

    assert "carried" not in recipe()
    assert "carried" not in recipe(missing="drop", max_gap=5)
    assert recipe(missing="fill")["carried"] == "forward"
    assert recipe(step=0.5)["carried"] == "forward"


def test_another_lookback_needs_no_other_store():
    first = SequenceData(lookback=20)
    second = SequenceData(lookback=50)
    for data in (first, second):
        data.setup()
    assert first.info.report.key == second.info.report.key
    assert first.info.key != second.info.key
    assert second.info.report.hit
