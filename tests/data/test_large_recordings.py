"""Recordings that are read in blocks: the same bits, in the memory of a block."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
from tests.data.recordings import open_data, recording, refusal, write_files

from flatout.data.sequences import scratch
from flatout.data.sequences.missing import Missing
from flatout.data.sequences.recordings import ReadingNotes, RecordingRules
from flatout.data.tables.formats import csv_file
from flatout.data.tables.sources import open_table


def test_a_table_read_in_blocks_gives_the_recordings_of_one_read_at_once(tmp_path):
    parts = [
        {"run": [f"r{run}"] * 30, "cell": [f"c{run % 4}"] * 30, **recording(30, run)}
        for run in range(8)
    ]
    table = pa.concat_tables(pa.table(part) for part in parts)
    mixed = table.take(np.argsort(np.tile(np.arange(30), 8), kind="stable"))
    small = pa.Table.from_batches(mixed.to_batches(max_chunksize=7))
    infos = [open_data(source, group=["cell", "run"]).info for source in (table, small)]
    assert infos[0].recording_names == infos[1].recording_names
    assert len(infos[0].recording_names) == 8
    for split, segments in infos[0].segments.items():
        assert (segments.recording == infos[1].segments[split].recording).all()
    np.testing.assert_array_equal(
        infos[0].rows_of("train").values, infos[1].rows_of("train").values
    )
    rows = write_files(tmp_path / "runs", a=lambda c: [*c["a"][:30], "high", *c["a"][31:]])
    assert "r1.csv: a is 'high' in row 31 (numbers)." in refusal(rows)


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
    "settings",
    [
        {"time": "t"},
        {"time": None},
        {"split_at": [20_000, 25_000]},
    ],
)
def test_a_large_file_is_read_in_blocks_to_the_same_bits(tmp_path, monkeypatch, settings):
    monkeypatch.setattr(csv_file, "_CSV_BLOCK_BYTES", 1 << 17)
    path = write_long_file(tmp_path / "long.csv")
    stores = []
    for least in (1 << 40, 0):
        monkeypatch.setattr(scratch, "LEAST_BYTES", least)
        data = open_data(
            path, lookback=9, split_by="time", cache=str(tmp_path / f"{least}"), **settings
        )
        stores.append(data.info.store.folder)
    of_small, of_large = map(columns_of_store, stores)
    assert of_small == of_large
    assert len(of_small) > 5
    facts = [
        json.loads((store / "manifest.json").read_text(encoding="utf-8"))["facts"]
        for store in stores
    ]
    assert facts[0] == facts[1]
    assert not list(stores[1].glob("scratch*"))


def columns_of_store(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.rglob("*.bin")}


def test_a_large_file_that_is_not_whole_is_read_and_refused_as_a_small_one(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "LEAST_BYTES", 0)
    lacking = write_long_file(tmp_path / "lacking.csv", missing=25_000)
    assert "1 row without a (row 25001)" in refusal(lacking, split_by="time")
    filled = open_data(lacking, split_by="time", missing="fill", cache=str(tmp_path / "cache"))
    assert filled.info.rows_of("train").values.shape == (30_000, 3)
    back = write_long_file(tmp_path / "back.csv", back=21_000)
    assert "t goes back from 20999 to 3 in row 21001" in refusal(back, split_by="time")


def test_only_a_plain_recording_is_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "LEAST_BYTES", 0)
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
    found = scratch.Scratch(tmp_path, rules).read(table, notes)
    assert found is not None
    assert notes.steps == [1.0]
    assert found.values[29_998:40_000].shape == (2, 3)
    assert found.values[5:5].shape == (0, 3)
    for change in ({"step": 2.0}, {"max_gap": 5.0}, {"cumulate": ["a"]}, {"group": ["t"]}):
        assert scratch.Scratch(tmp_path, replace(rules, **change)).read(table, notes) is None
