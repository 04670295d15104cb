"""Recordings: tables parted, checked, filled, resampled, split and scaled; what does not fit is one
sentence.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from flatout.data import SequenceData
from flatout.data.sequences import recordings
from flatout.data.sequences.recordings import ReadingNotes, RecordingRules
from flatout.data.sequences.settings import Missing, SequenceDataConfig
from flatout.data.tables.formats import csv_file
from flatout.data.tables.sources import open_table
from flatout.errors import UserError


def recording(samples: int = 40, phase: float = 0.0, step: float = 1.0) -> dict[str, np.ndarray]:
    """A made-up recording of two features and a target that depends on both."""
    place = np.arange(samples)
    a = np.sin(place / 5 + phase)
    b = np.cos(place / 3 + phase)
    return {"t": place * step, "a": a, "b": b, "y": 10 + 3 * a - b}


def write_files(folder: Path, count: int = 6, **changes: Any) -> Path:
    """A folder of csv files, one recording each; `changes` replace columns of the second one."""
    folder.mkdir(exist_ok=True)
    for number in range(count):
        columns = recording(40 + number, phase=number)
        if number == 1:
            columns |= {name: change(columns) for name, change in changes.items()}
        lines = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
        (folder / f"r{number}.csv").write_text(
            "\n".join([",".join(columns), *lines]), encoding="utf-8"
        )
    return folder


SETTINGS: dict[str, Any] = {"features": ["a", "b"], "target": "y", "time": "t", "batch_size": 4}


def open_data(source: Any, **settings: Any) -> SequenceData:
    data = SequenceData(
        source=str(source) if isinstance(source, Path) else source, **{**SETTINGS, **settings}
    )
    data.setup()
    return data


def refusal(source: Any, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        open_data(source, **settings)
    return str(caught.value)


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
        assert info.scaler.shift == [0, 0, 0] and train[:, 2].max() > 12


def table_of_recordings(parts: list[dict[str, Any]]) -> pa.Table:
    """The recordings below each other; what is one value of a recording stands in each row."""
    samples = len(parts[0]["a"])
    blocks = []
    for part in parts:
        columns = {name: np.broadcast_to(column, samples) for name, column in part.items()}
        blocks.append(pa.table(columns))
    return pa.concat_tables(blocks)


def test_groups_part_a_table_and_the_first_group_stays_whole():
    parts = [
        {"cell": f"c{cell}", "cycle": cycle, **recording(20, cell + cycle / 9)}
        for cell in range(5)
        for cycle in range(3)
    ]
    info = open_data(table_of_recordings(parts), group=["cell", "cycle"]).info
    assert len(info.recording_names) == 15
    cell_of = [name.split("cell=")[1][:2] for name in info.recording_names]
    cells = {
        split: set(map(cell_of.__getitem__, segments.recording))
        for split, segments in info.segments.items()
    }
    assert cells["train"] | cells["validation"] | cells["test"] == {f"c{cell}" for cell in range(5)}
    assert sum(map(len, cells.values())) == 5


def test_a_single_recording_is_cut_in_time_at_the_samples_that_are_named(tmp_path):
    info = open_data(pa.table(recording(100)), split_by="time", split_at=[60, 80, 95]).info
    spans = {
        split: (int(each.first[0]), int(each.stop[0])) for split, each in info.segments.items()
    }
    assert spans == {"train": (0, 60), "validation": (60, 80), "test": (80, 95)}
    short = open_data(pa.table(recording(100))).info
    assert {split: int(each.stop[0] - each.first[0]) for split, each in short.segments.items()} == {
        "train": 80,
        "validation": 10,
        "test": 10,
    }


def test_resampling_repeats_the_last_sample_and_gaps_split_a_recording():
    times = np.array([0.0, 1.0, 2.5, 4.0, 50.0, 51.0, 53.0])
    table = pa.table({"t": times, "a": times * 2, "b": np.sin(times), "y": times})
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
        {"t": times, "a": [2.0, 2.0, 4.0, 4.0, 0.0, 1.0], "b": np.sin(times), "y": times}
    )
    cut = {"split_by": "time", "split_at": [4, 5]}
    info = open_data(table, cumulate=["a"], scale="none", **cut).info
    assert info.columns == ["a cumulated", "a", "b", "y"] and info.shape.inputs == 3
    np.testing.assert_allclose(info.rows_of("train").values[:, 0], [0, 1, 2.5, 6.5, 7.5, 7.625])
    assert "data.cumulate: no such feature 'z' (a, b)" in refusal(table, cumulate=["z"])


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


@pytest.mark.parametrize("time", ["28.03.2026 07:00:00", "P1"])
def test_a_time_that_cannot_be_read_is_no_number_with_a_comma(tmp_path, time):
    folder = write_files(tmp_path / "runs", t=lambda columns: [time] * 41)
    said = (
        f"t is {time!r} in row 1 (seconds or dates). Write dates as 2026-03-28T07:00:00, or seconds"
        " as numbers."
    )
    assert said in refusal(folder)


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


def _labelled(*labels: object, phase: int = 0) -> pa.Table:
    """A recording for each label, in column `load`, of a cell of its number."""
    numbered = enumerate(labels)
    return pa.concat_tables(
        pa.table({"cell": [str(cell)] * 20, "load": [label] * 20, **recording(20, phase + cell)})
        for cell, label in numbered
    )


def _splits_of_files(data: SequenceData) -> dict[str, set[str]]:
    names = data.info.facts["recordings"]
    segments = data.info.segments
    return {
        split: set(map(names.__getitem__, each.recording.tolist()))
        for split, each in segments.items()
    }


def test_files_stay_whole_where_they_are_asked_to_and_groups_otherwise(tmp_path):
    for number, name in enumerate("abcd"):
        pq.write_table(_labelled(1, 2, 3, 4, phase=10 * number), tmp_path / f"{name}.parquet")
    given: dict[str, Any] = {"group": ["cell"]}
    for split_by, file_or_group in (
        ("file", lambda name: name.partition(": ")[0]),
        ("auto", lambda name: name[-1]),
    ):
        splits = _splits_of_files(open_data(tmp_path, **given, split_by=split_by))
        parts = [set(map(file_or_group, names)) for names in splits.values()]
        assert len(parts) == 3 and sum(map(len, parts)) == 4 == len(set.union(*parts))


def test_pieces_of_a_group_between_gaps_stand_in_one_split(tmp_path):
    times = [place + 1000.0 * (place // 8) for place in range(32)]
    tables = [
        pa.table({"cell": [str(cell)] * 32, **recording(32, cell), "t": times}) for cell in range(5)
    ]
    found = _splits_of_files(open_data(pa.concat_tables(tables), group=["cell"], max_gap=10))
    assert sum(map(len, found.values())) == 20
    splits_of_cell: dict[str, set[str]] = {}
    for split, names in found.items():
        for name in names:
            splits_of_cell.setdefault(name.partition(" part ")[0], set()).add(split)
    assert [len(splits) for splits in splits_of_cell.values()] == [1] * 5
    given = {
        "train": tables[0],
        "validation": pa.concat_tables([tables[1], tables[2]]),
        "test": tables[3],
    }
    assert open_data(None, **given, group=["cell"], max_gap=10)
    same = tables[1].set_column(0, "cell", pa.array(["0"] * 32))
    with pytest.raises(
        UserError, match=r"data\.validation: .*cell=0 part 1 is the group of .*cell=0 part 1, which"
    ):
        open_data(None, **given | {"validation": same}, group=["cell"], max_gap=10)


def test_rows_without_a_group_or_a_label_are_named(tmp_path):
    table = pa.table({"cell": ["a"] * 20 + [" "] + ["b"] * 19, **recording(40)})
    with pytest.raises(
        UserError,
        match=r"data\.group: .*: cell is missing in row 21\. Write the group in each row\.",
    ):
        open_data(table, group=["cell"])
    labels = ["c0", "c1", "c0", "", "c0", "c1", "c0", "c1"]
    with pytest.raises(UserError, match=r"data\.target: .*cell=3 has 0 labels"):
        open_data(_labelled(*labels), group=["cell"], problem="label", target="load")


def test_labels_are_finite_and_whole_ones_are_told_to_be_numbers(tmp_path, capsys):
    given: dict[str, Any] = {"group": ["cell"], "problem": "label", "target": "load"}
    with pytest.raises(
        UserError, match=r"data\.target: the label of .*cell=2 is inf\. Write a number"
    ):
        open_data(_labelled(0.0, 1.0, math.inf, 1.0, 0.0, 1.0), **given)
    open_data(_labelled(0, 1, 0, 1, 0, 1), **given)
    note = (
        "labels: whole numbers are predicted as numbers; write them as texts (c0, c1) for classes"
    )
    assert note in capsys.readouterr().out
    open_data(_labelled(0.5, 1.0, 0.0, 1.0, 0.0, 1.0), **given)
    assert note not in capsys.readouterr().out


def test_places_to_split_at_do_not_go_with_given_splits():
    given = {
        name: pa.table(recording(40, seed))
        for seed, name in enumerate(("train", "validation", "test"))
    }
    with pytest.raises(UserError, match=r"data\.split_at: is set, and files give the splits"):
        open_data(None, **given, split_by="time", split_at=[20, 30])


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
    assert of_classes.labels.classes == ["fast", "slow"] and of_classes.shape.labels == 2
    numbers = open_data(table, problem="label", target="load", group=["run"]).info
    assert numbers.labels.classes == ["load"] and numbers.labels.spread > 0
    message = refusal(table, problem="label", target="kind", time=None, group=None)
    assert "table in memory has 2 labels ('slow', 'fast') (one)" in message


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
            {"problem": "forecast", "lookback": 5, "horizon": 9, "split_by": "time"},
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


def test_large_whole_numbers_are_read():
    columns = recording(90)
    table = pa.table({**columns, "t": np.arange(90) * 10**9 + 1_700_000_000_000_000_000})
    assert open_data(table).info.facts["step"] == 1e9


def test_a_table_read_in_blocks_gives_the_recordings_of_one_read_at_once(tmp_path):
    parts = [
        {"run": [f"r{run}"] * 30, "cell": [f"c{run % 4}"] * 30, **recording(30, run)}
        for run in range(8)
    ]
    table = pa.concat_tables(pa.table(part) for part in parts)
    mixed = table.take(np.argsort(np.tile(np.arange(30), 8), kind="stable"))
    small = pa.Table.from_batches(mixed.to_batches(max_chunksize=7))
    infos = [open_data(source, group=["cell", "run"]).info for source in (table, small)]
    assert (
        infos[0].recording_names == infos[1].recording_names and len(infos[0].recording_names) == 8
    )
    for split, segments in infos[0].segments.items():
        assert (segments.recording == infos[1].segments[split].recording).all()
    np.testing.assert_array_equal(
        infos[0].rows_of("train").values, infos[1].rows_of("train").values
    )
    rows = write_files(tmp_path / "runs", a=lambda c: [*c["a"][:30], "high", *c["a"][31:]])
    assert "r1.csv: a is 'high' in row 31 (numbers)." in refusal(rows)


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
    assert line.startswith(f"warning train: {shorter}: ") and line.endswith("run=r4 (5)")


@pytest.mark.parametrize(
    "way",
    [
        {},
        {"chunk": 7},
        {"lookback": 9, "stride": 4},
        {"problem": "forecast", "lookback": 9, "horizon": 3},
    ],
)
def test_rows_are_counted_when_a_store_is_opened_and_made_when_they_are_read(way):
    data = open_data(pa.table(recording(100)), split_by="time", **way)
    for split in ("train", "validation", "test"):
        view = data.info.store.splits[split]
        assert "columns" not in vars(view)
        counted = view.num_rows
        assert counted == len(view.ragged("tokens").offsets) == len(view.fixed("recording")) > 0


def test_a_constant_feature_is_refused(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    for number in range(4):
        pq.write_table(
            pa.table({**recording(30, number), "b": np.full(30, 25.0)}),
            folder / f"{number}.parquet",
        )
    assert (
        refusal(folder)
        == "data.features: 'b' is constant in the training recordings (25). Leave it out."
    )


def test_a_group_in_two_splits_and_equal_recordings_are_refused(tmp_path):
    def table(group: str, phase: float) -> pa.Table:
        return pa.table({"cell": [group] * 20, **recording(20, phase)})

    given = {
        "train": table("c1", 0),
        "validation": table("c2", 1),
        "test": table("c1", 2),
        "source": None,
    }
    message = refusal(None, **{k: v for k, v in given.items() if k != "source"}, group=["cell"])
    assert (
        "data.test: table in memory: cell=c1 is the group of table in memory: cell=c1, which is in"
        " the train" in message
    )
    given["test"] = table("c3", 0)
    message = refusal(None, **{k: v for k, v in given.items() if k != "source"}, group=["cell"])
    assert (
        "data.test: table in memory: cell=c3 holds the samples of table in memory: cell=c1"
        in message
    )


def test_a_part_of_a_training_recording_in_another_split_is_warned_of():
    random = np.random.default_rng(0)
    columns = {
        name: values + random.standard_normal(400)
        for name, values in recording(400).items()
        if name != "t"
    }
    columns["t"] = np.arange(400)
    other = {name: values + (name != "t") for name, values in columns.items()}
    given = {
        "train": columns,
        "validation": other,
        "test": {name: values[60:] for name, values in columns.items()},
    }
    info = SequenceData(**{**SETTINGS, **{name: pa.table(each) for name, each in given.items()}})
    info.setup()
    (line,) = [line for line in info.info.lines if line.startswith("warning")]
    assert (
        line
        == "warning test: table in memory has 100% of its samples in table in memory, which is in"
        " the train split; leave one out"
    )


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
    given = {"train": recording(40), "validation": recording(40, 1), "test": recording(40, 2)}
    given["test"]["a"] = given["test"]["a"] * 1000
    tables = {name: pa.table(columns) for name, columns in given.items()}
    info = SequenceData(**{**SETTINGS, **tables})
    info.setup()
    (line,) = [line for line in info.info.lines if line.startswith("warning test")]
    assert line.startswith("warning test: a is ") and line.endswith("in another unit?")


def test_settings_of_hydra_make_the_same_data():
    config = SequenceDataConfig(lookback=20, batch_size=8)
    data = SequenceData.of(config, seed=3)
    assert data.config == config and config.features == ["voltage", "current", "temperature"]


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
    first, second = SequenceData(lookback=20), SequenceData(lookback=50)
    for data in (first, second):
        data.setup()
    assert first.info.report.key == second.info.report.key and first.info.key != second.info.key
    assert second.info.report.hit


def write_long_file(path: Path, *, missing: int | None = None, back: int | None = None) -> Path:
    """A csv of several blocks; a value may be missing, a time may go back."""
    columns = recording(30_000)
    rows = [list(map(str, row)) for row in zip(*columns.values(), strict=True)]
    if missing is not None:
        rows[missing][1] = ""
    if back is not None:
        rows[back][0] = "3"
    path.write_text("\n".join([",".join(columns), *map(",".join, rows)]), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "settings", [{"time": "t"}, {"time": None}, {"split_at": [20_000, 25_000]}]
)
def test_a_large_file_is_read_in_blocks_to_the_same_bits(tmp_path, monkeypatch, settings):
    monkeypatch.setattr(csv_file, "_CSV_BLOCK_BYTES", 1 << 17)
    path = write_long_file(tmp_path / "long.csv")
    stores = []
    for least in (1 << 40, 0):
        monkeypatch.setattr(recordings, "LEAST_BYTES", least)
        data = open_data(
            path, lookback=9, split_by="time", cache=str(tmp_path / f"{least}"), **settings
        )
        stores.append(data.info.store.folder)
    of_small, of_large = map(columns_of_store, stores)
    assert of_small == of_large and len(of_small) > 5
    facts = [
        json.loads((store / "manifest.json").read_text(encoding="utf-8"))["facts"]
        for store in stores
    ]
    assert facts[0] == facts[1]
    assert not list(stores[1].glob("scratch*"))


def columns_of_store(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.rglob("*.bin")}


def test_a_large_file_that_is_not_whole_is_read_and_refused_as_a_small_one(tmp_path, monkeypatch):
    monkeypatch.setattr(recordings, "LEAST_BYTES", 0)
    lacking = write_long_file(tmp_path / "lacking.csv", missing=25_000)
    assert "1 row without a (row 25001)" in refusal(lacking, split_by="time")
    filled = open_data(lacking, split_by="time", missing="fill", cache=str(tmp_path / "cache"))
    assert filled.info.rows_of("train").values.shape == (30_000, 3)
    back = write_long_file(tmp_path / "back.csv", back=21_000)
    assert "t goes back from 20999 to 3 in row 21001" in refusal(back, split_by="time")


def test_only_a_plain_recording_is_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(recordings, "LEAST_BYTES", 0)
    table = open_table(write_long_file(tmp_path / "long.csv"), where="data.source")
    rules = RecordingRules(
        columns=["a", "b", "y"],
        time="t",
        group=[],
        label=None,
        step=None,
        max_gap=None,
        missing=Missing.refuse,
    )
    notes = ReadingNotes()
    found = recordings.Scratch(tmp_path, rules).read(table, notes)
    assert found is not None and notes.steps == [1.0]
    assert found.values[29_998:40_000].shape == (2, 3) and found.values[5:5].shape == (0, 3)
    for change in ({"step": 2.0}, {"max_gap": 5.0}, {"cumulate": ["a"]}, {"group": ["t"]}):
        assert recordings.Scratch(tmp_path, replace(rules, **change)).read(table, notes) is None
